"""Each key of a ds_config beside what the schema knows of it, and what is wrong with its value alone."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, get_args

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from ds_toolkit.config.schema import DsConfig, Section, fields_by_key

PRIVATE_PREFIXES = ("_", "x-")
_RANGE_ERRORS = frozenset(
    {
        "greater_than",
        "greater_than_equal",
        "less_than",
        "less_than_equal",
        "finite_number",
        "string_too_short",
    }
)


class Fault(Enum):
    """What can be wrong with a value, whatever stands beside it."""

    TYPE = "type"
    NUMBER_AS_STRING = "number as string"
    FRACTION = "fraction"
    BOOLEAN_AS_STRING = "boolean as string"
    RANGE = "range"
    CHOICE = "choice"


@dataclass(frozen=True)
class Known:
    """A key that DeepSpeed knows.

    Attributes:
        key: the name that people write.
        field: its type, default and description.
        subsection: the model of the object that stands there, None for other values.
        read_raw: whether DeepSpeed takes the value as it is.
    """

    key: str
    field: FieldInfo
    subsection: type[Section] | None
    read_raw: bool

    @property
    def takes_auto(self) -> bool:
        """Whether `"auto"` is a value of its own here."""
        return isinstance(self.field.default, str) and self.field.default == "auto"

    @property
    def takes_null(self) -> bool:
        """Whether DeepSpeed accepts `null` here."""
        return self.field.annotation is Any or type(None) in get_args(self.field.annotation)

    @functools.cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        # One annotation that carries the constraints as well.
        annotation: Any = self.field.annotation
        for constraint in self.field.metadata:
            annotation = Annotated[annotation, constraint]
        return TypeAdapter(annotation)

    def fault(self, value: object) -> tuple[Fault, str] | None:
        """What is wrong with a value that is no object of its own, and what was expected instead."""
        if self.read_raw and isinstance(value, float) and value.is_integer():
            # As good as the whole number everywhere that DeepSpeed compares and multiplies.
            value = int(value)
        try:
            self._adapter.validate_python(value, strict=self.read_raw)
        except ValidationError as error:
            return _fault(value, error.errors(include_url=False, include_context=True))
        return None


@dataclass(frozen=True)
class Member:
    """One key of a configuration; `known` is None where DeepSpeed does not know it."""

    path: tuple[str, ...]
    value: object
    section: type[Section]
    known: Known | None

    @property
    def key(self) -> str:
        """The last part of the path."""
        return self.path[-1]

    @property
    def is_private(self) -> bool:
        """Whether it is marked as nobody's business; only where DeepSpeed ignores unknown keys."""
        return self.section.read_raw and self.key.startswith(PRIVATE_PREFIXES)


def members(data: Mapping[str, object]) -> Iterator[Member]:
    """Every key of a ds_config and of the sections in it, from the outside in."""
    pending: list[tuple[tuple[str, ...], Mapping[str, object], type[Section]]] = [((), data, DsConfig)]
    while pending:
        path, values, section = pending.pop()
        table = known_keys(section)
        for key, value in values.items():
            known = table.get(key)
            yield Member((*path, key), value, section, known)
            if known is not None and known.subsection is not None and isinstance(value, Mapping):
                pending.append(((*path, key), value, known.subsection))


@functools.cache
def known_keys(section: type[Section]) -> dict[str, Known]:
    """The keys of a section, under every name that DeepSpeed takes."""
    return {
        key: Known(field.alias or key, field, _subsection(field.annotation), section.read_raw)
        for key, field in fields_by_key(section).items()
    }


def _subsection(annotation: Any) -> type[Section] | None:
    candidates = get_args(annotation) or (annotation,)
    return next((part for part in candidates if isinstance(part, type) and issubclass(part, Section)), None)


def _fault(value: object, errors: list[Any]) -> tuple[Fault, str]:
    kinds = {error["type"] for error in errors}
    number_expected = any(kind.startswith(("int", "float")) for kind in kinds)
    last = errors[-1]
    says = last["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    if isinstance(value, str):
        if number_expected and as_number(value) is not None:
            return Fault.NUMBER_AS_STRING, says
        if any(kind.startswith("bool") for kind in kinds) and value.lower() in ("true", "false"):
            return Fault.BOOLEAN_AS_STRING, says
        choices = next(
            (error["ctx"]["expected"] for error in errors if error["type"] == "literal_error"), None
        )
        if choices is not None:
            return Fault.CHOICE, choices
    if kinds & _RANGE_ERRORS:
        if kinds <= _RANGE_ERRORS:
            # Of several ranges any would do.
            says = " or ".join(error["msg"].removeprefix("Input should be ") for error in errors)
        return Fault.RANGE, says
    if isinstance(value, float) and number_expected and math.isfinite(value):
        return Fault.FRACTION, "a whole number"
    return Fault.TYPE, says


def as_number(text: str) -> int | float | None:
    """The number that a string spells, whole where it can be; None where it spells none."""
    # Python takes 1_0 for 10, which is as likely to be a slip of the finger.
    if "_" in text:
        return None
    try:
        number = float(text)
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    return int(number) if number.is_integer() else number


def shown(value: object) -> str:
    """A value as it would be written, shortened for a message."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
