"""DS0xx: values of the wrong kind, and `"auto"` that nobody resolves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ds_toolkit.config.consumers import Consumer
from ds_toolkit.config.members import Fault, Member, as_number, shown
from ds_toolkit.config.rules.batch import BATCH_SIZES
from ds_toolkit.config.rules.registry import rule
from ds_toolkit.config.schema import DsConfig
from ds_toolkit.config.subject import Config, json_pointer
from ds_toolkit.findings import Edit, Severity
from ds_toolkit.rules import Problem

_ZERO = "zero_optimization"


@rule("DS013", "wrong-type", Severity.ERROR)
def wrong_type(config: Config) -> Iterator[Problem]:
    """A value is not of the type that DeepSpeed expects.

    Sections that are read key by key take it as it is and fail later, with a message that names no key.

    Bad:
        {"train_batch_size": 8, "zero_optimization": {"stage": 2, "overlap_comm": "often"}}
    Bad:
        {"train_batch_size": 8, "gradient_clipping": [1.0]}
    Good:
        {"train_batch_size": 8, "gradient_clipping": 1.0}
    """
    for member, fault, expected in config.faults:
        if fault is Fault.TYPE and not _has_its_own_rule(member):
            message = f"`{member.key}` cannot be {shown(member.value)}"
            yield Problem(json_pointer(*member.path), message, f"expected: {expected}")


@rule("DS014", "number-as-string", Severity.ERROR)
def number_as_string(config: Config) -> Iterator[Problem]:
    """A number stands in quotes, where DeepSpeed compares and multiplies without looking.

    YAML is one way to get there: `5e8` without a dot is a text to it.

    Bad:
        {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": "8"}
    Bad:
        {"train_batch_size": 8, "zero_optimization": {"stage": 3, "reduce_bucket_size": "5e8"}}
    Good:
        {"train_batch_size": 8, "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8}}
    """
    for member, fault, _ in config.faults:
        if fault is Fault.NUMBER_AS_STRING and not _has_its_own_rule(member):
            number = as_number(str(member.value))
            edit = Edit(json_pointer(*member.path), value=number)
            message = f"`{member.key}` is the text {shown(member.value)}, not a number"
            yield Problem(json_pointer(*member.path), message, f"write {number}", edit)


@rule("DS015", "fraction", Severity.ERROR)
def fraction(config: Config) -> Iterator[Problem]:
    """A number has a fraction where DeepSpeed counts whole things.

    Sizes that were computed, such as 0.9 x hidden size x hidden size, have to be rounded.

    Bad:
        {"train_batch_size": 8, "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 15099494.4}}
    Good:
        {"train_batch_size": 8, "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 15099494}}
    """
    for member, fault, _ in config.faults:
        if fault is Fault.FRACTION and not _has_its_own_rule(member):
            assert isinstance(member.value, float)  # noqa: S101  (what the fault means)
            message = f"`{member.key}` must be a whole number, not {member.value}"
            # Between 0 and 1 there was meant to be something: a size of nothing is no repair.
            number = max(1, round(member.value)) if member.value > 0 else round(member.value)
            yield Problem(json_pointer(*member.path), message, f"write {number}")


@rule("DS016", "boolean-as-string", Severity.ERROR)
def boolean_as_string(config: Config) -> Iterator[Problem]:
    """A boolean stands in quotes where DeepSpeed takes values as they are: `"false"` switches it on.

    Bad:
        {"train_batch_size": 8, "prescale_gradients": "false"}
    Good:
        {"train_batch_size": 8, "prescale_gradients": false}
    """
    for member, fault, _ in config.faults:
        if fault is Fault.BOOLEAN_AS_STRING:
            value = str(member.value).lower() == "true"
            edit = Edit(json_pointer(*member.path), value=value)
            message = f"`{member.key}` is the text {shown(member.value)}, which counts as true"
            yield Problem(json_pointer(*member.path), message, f"write {str(value).lower()}", edit)


@rule("DS017", "out-of-range", Severity.ERROR)
def out_of_range(config: Config) -> Iterator[Problem]:
    """A number is outside the range that makes sense, and mostly outside the one that DeepSpeed accepts.

    Some are noticed late: `steps_per_print: 0` divides by zero at the first step. A negative
    `gradient_clipping` is accepted and switches clipping off; 0 says so.

    Bad:
        {"train_batch_size": 8, "zero_optimization": {"stage": 2, "reduce_bucket_size": 0}}
    Bad:
        {"train_batch_size": 8, "steps_per_print": 0}
    Good:
        {"train_batch_size": 8, "steps_per_print": 10}
    """
    for member, fault, expected in config.faults:
        if fault is Fault.RANGE and not _has_its_own_rule(member):
            message = f"`{member.key}` cannot be {shown(member.value)}"
            yield Problem(json_pointer(*member.path), message, f"expected: {expected}")


@rule("DS018", "no-such-choice", Severity.ERROR)
def no_such_choice(config: Config) -> Iterator[Problem]:
    """A text is none of those that DeepSpeed knows here.

    Bad:
        {"train_batch_size": 8, "communication_data_type": "float32"}
    Bad:
        {"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_param": {"device": "gpu"}}}
    Good:
        {"train_batch_size": 8, "communication_data_type": "fp32", "checkpoint": {"tag_validation": "Fail"}}
    """
    for member, fault, expected in config.faults:
        if fault is Fault.CHOICE:
            message = f"`{member.key}` cannot be {shown(member.value)}"
            yield Problem(json_pointer(*member.path), message, f"write one of {expected}")


@rule("DS019", "unresolved-auto", Severity.ERROR)
def unresolved_auto(config: Config) -> Iterator[Problem]:
    """`"auto"` stands where nobody puts a value in its place.

    DeepSpeed itself knows next to no `"auto"`: it drops it in the sections that it checks, so that the
    default holds, and fails on it elsewhere, sometimes at the first step only. The Hugging Face Trainer and
    Accelerate resolve a list of keys each (see `--for`) and stop at every other `"auto"`, even where
    DeepSpeed takes it.

    Bad:
        {"train_batch_size": "auto"}
    Bad:
        {"train_batch_size": 8, "bf16": {"enabled": "auto"}}
    Bad (consumer=hf):
        {"train_batch_size": "auto", "zero_optimization": {"stage": 2, "overlap_comm": "auto"}}
    Bad (consumer=accelerate):
        {"train_batch_size": "auto", "zero_optimization": {"stage": 2},
         "data_types": {"keep_in_fp32_modules": "auto"}}
    Good (consumer=hf):
        {"train_batch_size": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}}
    """
    for path, effect in _autos_refused(config) if config.consumer.uses_accelerate else _autos(config):
        if path != (_ZERO, "stage"):
            message = f'nobody resolves "auto" for `{".".join(path)}`: {effect}'
            yield Problem(json_pointer(*path), message, _fix_of_auto(config, path))


def _fix_of_auto(config: Config, path: tuple[str, ...]) -> str:
    if any(member.path == path and member.known and member.known.takes_auto for member in config.members):
        return 'remove it: "auto" is DeepSpeed\'s default'
    others = [consumer.value for consumer in Consumer if consumer.resolves(path)]
    if not others:
        return "write the value"
    return f"write the value; a file for one that resolves it is linted with --for {' or '.join(others)}"


def _autos(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """Paths where "auto" stands unresolved, and what DeepSpeed does about it."""
    who = "" if config.consumer is Consumer.NATIVE else f"not {config.consumer.label}, and "
    fails, drops = f"{who}DeepSpeed fails on it", f"{who}DeepSpeed drops it, and the default holds"
    for member in config.members:
        known = member.known
        if known is not None and member.value == "auto" and not known.takes_auto:
            whole_section = known.subsection is not None and member.section.read_raw
            if not whole_section:
                yield member.path, fails if member.section.read_raw else drops
    for section in ("optimizer", "scheduler"):
        for key, value in config.section(section, "params").items():
            if value == "auto":
                yield (section, "params", key), fails


def _autos_refused(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """Paths where "auto" stands that Accelerate has no value for: it looks at every key of every object."""
    effect = f"{config.consumer.label} stops at it"
    # That a section is an object is the matter of another rule.
    sections = {member.path for member in config.members if member.known and member.known.subsection}
    pending: list[tuple[tuple[str, ...], object]] = [((), config.data)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, Mapping):
            pending += [((*path, key), child) for key, child in value.items()]
        elif value == "auto" and path not in sections and not config.consumer.resolves(path):
            yield path, effect


def _has_its_own_rule(member: Member) -> bool:
    if member.path == (_ZERO, "stage"):
        return True
    batch = member.section is DsConfig and member.key in BATCH_SIZES
    number = isinstance(member.value, int | float) and not isinstance(member.value, bool)
    return batch and number and member.value < 1  # type: ignore[operator]
