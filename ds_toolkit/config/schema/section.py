"""What an object of a ds_config is: named fields, each with a type, a default and a line that explains it."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, WithJsonSchema
from pydantic.fields import FieldInfo


class Section(BaseModel):
    """An object that DeepSpeed reads through pydantic: it converts "2" to 2 and refuses unknown keys.

    The models are never filled; they say which keys there are. A field's alias, where it has one, is the
    name that people write; DeepSpeed takes the field's own name as well.
    """

    model_config = ConfigDict(
        extra="forbid", populate_by_name=True, defer_build=True, protected_namespaces=(), frozen=True
    )
    read_raw: ClassVar[bool] = False


class RawSection(Section):
    """An object that DeepSpeed reads key by key: values are taken as they are, unknown keys ignored."""

    read_raw: ClassVar[bool] = True


def _refuse(_value: object) -> object:
    raise ValueError("it cannot be written in a file")


def _no_boolean(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("it must be a number, not a boolean")
    return value


def _no_text(value: object) -> object:
    if isinstance(value, str):
        raise ValueError("it must be a number, not a text")
    return value


Unwritable = Annotated[None, BeforeValidator(_refuse), WithJsonSchema({"not": {}})]
NotBoolean = BeforeValidator(_no_boolean)
NotText = BeforeValidator(_no_text)
AnyObject = dict[str, Any]
# The default of a key that may be left out but not be null.
ABSENT: Any = None
Elements = int


def any_case(*choices: str) -> WithJsonSchema:
    """For editors: the choices to complete, and every other mixture of cases, which DeepSpeed takes too."""
    patterns = ("".join(f"[{mark.upper()}{mark.lower()}]" for mark in word) for word in choices)
    spellings = [spelt for word in choices for spelt in (word.title(), word.upper(), word.lower())]
    pattern = {"type": "string", "pattern": f"^({'|'.join(patterns)})$"}
    return WithJsonSchema({"anyOf": [{"enum": spellings}, pattern]})


def fields_by_key(section: type[Section]) -> dict[str, FieldInfo]:
    """The fields by every name that DeepSpeed takes for them."""
    fields: dict[str, FieldInfo] = {}
    for name, field in section.model_fields.items():
        fields[field.alias or name] = field
        fields.setdefault(name, field)
    return fields


def keys_of(section: type[Section]) -> list[str]:
    """The names that people write, in the order of the model."""
    return [field.alias or name for name, field in section.model_fields.items()]
