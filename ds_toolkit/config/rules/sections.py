"""DS0xx: sections that are no objects, null, or never switched on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ds_toolkit.config.members import known_keys
from ds_toolkit.config.rules.registry import rule
from ds_toolkit.config.subject import Config, json_pointer
from ds_toolkit.findings import Edit, Severity
from ds_toolkit.rules import Problem

_ZERO = "zero_optimization"


@rule("DS008", "null-section", Severity.ERROR)
def null_section(config: Config) -> Iterator[Problem]:
    """A section is `null`, and DeepSpeed stops with a message about NoneType that names no key.

    Bad:
        {"train_batch_size": 8, "zero_optimization": null}
    Good:
        {"train_batch_size": 8, "zero_optimization": {}}
    """
    for member in config.members:
        known = member.known
        if (
            known is not None
            and known.subsection is not None
            and member.value is None
            and not known.takes_null
        ):
            yield Problem(json_pointer(*member.path), f"`{member.key}` is null", "remove it")


@rule("DS009", "section-not-an-object", Severity.ERROR)
def section_not_an_object(config: Config) -> Iterator[Problem]:
    """A section is a single value where DeepSpeed expects an object.

    The message that it stops with names no key: `argument after ** must be a mapping`.

    Bad:
        {"train_batch_size": 8, "bf16": true}
    Bad:
        {"train_batch_size": 8, "zero_optimization": "auto"}
    Good:
        {"train_batch_size": 8, "bf16": {"enabled": true}}
    """
    for member in config.members:
        if member.known is None or member.known.subsection is None:
            continue
        value = member.value
        old_zero = member.path == (_ZERO,) and isinstance(value, bool)
        dropped = value == "auto" and not member.section.read_raw
        if not isinstance(value, Mapping) and value is not None and not old_zero and not dropped:
            fix, edit = "write an object `{...}`", None
            if isinstance(value, bool) and "enabled" in known_keys(member.known.subsection):
                fix = f'write {{"enabled": {str(value).lower()}}}'
                edit = Edit(json_pointer(*member.path), value={"enabled": value})
            yield Problem(json_pointer(*member.path), f"`{member.key}` must be an object", fix, edit)


@rule("DS021", "section-without-enabled", Severity.WARNING)
def section_without_enabled(config: Config) -> Iterator[Problem]:
    """A section has settings but no `enabled`, and DeepSpeed leaves it off.

    Bad:
        {"train_batch_size": 8, "fp16": {"initial_scale_power": 12}}
    Good:
        {"train_batch_size": 8, "fp16": {"enabled": true, "initial_scale_power": 12}}
    """
    for member in config.members:
        if member.known is None or member.known.subsection is None or not isinstance(member.value, Mapping):
            continue
        switch = known_keys(member.known.subsection).get("enabled")
        if (
            switch is not None
            and switch.field.default is False
            and member.value
            and "enabled" not in member.value
        ):
            message = f"`{'.'.join(member.path)}` is off: it does not say `enabled`"
            yield Problem(json_pointer(*member.path), message, 'add "enabled": true, or remove the section')


@rule("DS022", "incomplete-section", Severity.ERROR)
def incomplete_section(config: Config) -> Iterator[Problem]:
    """A section is enabled without what it cannot do without, and DeepSpeed stops at the start.

    Curriculum learning needs `curriculum_metrics`, dynamic batching needs `max_tokens`.

    Bad:
        {"train_batch_size": 8, "data_efficiency": {"enabled": true, "data_sampling": {"enabled": true,
         "dynamic_batching": {"enabled": true}}}}
    Good:
        {"train_batch_size": 8, "data_efficiency": {"enabled": true, "data_sampling": {"enabled": true,
         "dynamic_batching": {"enabled": true, "max_tokens": 4096}}}}
    """
    sampling = ("data_efficiency", "data_sampling")
    for name, needed in (("curriculum_learning", "curriculum_metrics"), ("dynamic_batching", "max_tokens")):
        section = config.section(*sampling, name)
        if section.get("enabled") and needed not in section:
            pointer = json_pointer(*sampling, name)
            yield Problem(pointer, f"`{name}` is enabled without `{needed}`", f"add `{needed}`")
