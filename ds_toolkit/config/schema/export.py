"""The schema as JSON Schema, for editors that complete and check a ds_config."""

from __future__ import annotations

import json
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from ds_toolkit.config.consumers import Consumer
from ds_toolkit.config.guard_settings import SECTION, GuardSettings
from ds_toolkit.config.schema import SUPPORTED_DEEPSPEED
from ds_toolkit.config.schema.section import RawSection, Section
from ds_toolkit.config.schema.top_level import DsConfig
from ds_toolkit.config.schema.zero import ZeroOptimization

DIALECT = "https://json-schema.org/draft/2020-12/schema"
# The name that `$schema` of a configuration gives, for a schema that lies beside it.
FILE_NAME = "ds_config.schema.json"
_TITLE = "ds_config"
_COMMENT = "Written by ds-toolkit, which replaces it when it has a newer one."
_AUTO = {"const": "auto"}


def schema_text() -> str:
    """The JSON Schema as the content of a file."""
    return json.dumps(json_schema(), indent=2) + "\n"


def is_own_schema(text: str) -> bool:
    """Whether a file with this content was written by the toolkit, this version or another."""
    try:
        schema = json.loads(text)
    except ValueError:
        return False
    return isinstance(schema, dict) and (schema.get("title"), schema.get("$comment")) == (_TITLE, _COMMENT)


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a whole ds_config, with descriptions and defaults.

    `"auto"` is allowed where some consumer resolves it; keys that begin with `_` or `x-` are free where
    DeepSpeed ignores unknown keys.
    """
    schema = DsConfig.model_json_schema(by_alias=True, schema_generator=GenerateJsonSchema)
    definitions: dict[str, Any] = schema["$defs"]
    for consumer in Consumer:
        for path in sorted(consumer.resolved):
            _allow_auto(schema, definitions, path.split("."))
    everything: list[tuple[type[Section], dict[str, Any]]] = [(DsConfig, schema), *_sections(definitions)]
    for section, definition in everything:
        if section.read_raw:
            definition["patternProperties"] = {"^(_|x-)": {}}
        _add_made_defaults(section, definition)
        _add_short_names(section, definition)
    guard = GuardSettings.model_json_schema()
    guard["description"] = "Settings of CheckpointGuard; DeepSpeed ignores them."
    # The oldest spelling, with a boolean, is one that DeepSpeed still reads.
    definitions[ZeroOptimization.__name__]["type"] = ["object", "boolean"]
    schema["properties"] |= {
        "$schema": {"type": "string", "description": "Where this schema lies; DeepSpeed ignores it."},
        SECTION: guard,
    }
    del schema["title"]
    about = f"{schema.pop('description')} Written down for DeepSpeed {SUPPORTED_DEEPSPEED[1]}."
    return {"$schema": DIALECT, "$comment": _COMMENT, "title": _TITLE, "description": about, **schema}


def _sections(definitions: dict[str, Any]) -> list[tuple[type[Section], dict[str, Any]]]:
    by_name = {section.__name__: section for section in _subclasses(Section)}
    return [(by_name[name], definition) for name, definition in definitions.items() if name in by_name]


def _subclasses(section: type[Section]) -> list[type[Section]]:
    direct = [part for part in section.__subclasses__() if part is not RawSection]
    deeper = [found for part in section.__subclasses__() for found in _subclasses(part)]
    return list(dict.fromkeys([*direct, *deeper]))


def _allow_auto(schema: dict[str, Any], definitions: dict[str, Any], path: list[str]) -> None:
    *sections, key = path
    place = schema
    for name in sections:
        reference = _reference(place["properties"].get(name, {}))
        if reference is None:
            # Params of optimizers and schedulers take any value already.
            return
        place = definitions[reference]
    member = place["properties"][key]
    choices = member.get("anyOf")
    if choices is None:
        about = {"default", "description", "title"}
        kept = {name: member.pop(name) for name in list(member) if name not in about}
        member["anyOf"] = choices = [kept]
    if _AUTO not in choices:
        choices.append(_AUTO)


def _reference(member: dict[str, Any]) -> str | None:
    candidates = [member, *member.get("anyOf", []), *member.get("allOf", [])]
    return next((found["$ref"].rpartition("/")[2] for found in candidates if "$ref" in found), None)


def _add_made_defaults(section: type[Section], definition: dict[str, Any]) -> None:
    # Pydantic writes down fixed defaults only; lists and objects are made anew each time.
    for name, field in section.model_fields.items():
        if field.default_factory is not None:
            default = field.get_default(call_default_factory=True)
            if not isinstance(default, Section):
                definition["properties"][field.alias or name].setdefault("default", default)


def _add_short_names(section: type[Section], definition: dict[str, Any]) -> None:
    for name, field in section.model_fields.items():
        if field.alias and field.alias != name:
            definition["properties"][name] = {
                **definition["properties"][field.alias],
                "description": f"Short for {field.alias}.",
            }
