"""DS0xx: keys that DeepSpeed does not know, knows no longer, or knows elsewhere."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Iterator

from ds_toolkit.config.guard_settings import SECTION
from ds_toolkit.config.members import PRIVATE_PREFIXES, Member, known_keys
from ds_toolkit.config.rules.registry import rule
from ds_toolkit.config.schema import (
    RELOCATED_KEYS,
    REMOVED_TOP_LEVEL_KEYS,
    REMOVED_ZERO_KEYS,
    TOP_LEVEL_KEYS,
    DsConfig,
    Section,
)
from ds_toolkit.config.schema.removed import GENERAL_NAMES, OLD_AND_IGNORED
from ds_toolkit.config.subject import Config, json_pointer
from ds_toolkit.findings import Edit, Severity
from ds_toolkit.rules import Problem

# difflib's ratio: one wrong letter in six or so, which no two real keys' confusion reaches by accident.
_SMALL_EDIT = 0.82
# Arguments of torch.nn.parallel.DistributedDataParallel, which DeepSpeed takes the place of.
_DDP_ARGUMENTS = {
    "find_unused_parameters": "remove it: `zero_optimization.ignore_unused_parameters` is on already, at no"
    " cost, while DDP walks the graph at every step",
    "static_graph": "remove it",
    "bucket_cap_mb": "remove it; `zero_optimization.reduce_bucket_size` counts elements",
    "gradient_as_bucket_view": "remove it; `zero_optimization.contiguous_gradients` is on already",
    "broadcast_buffers": "remove it",
}
# Loss scaling is fp16's; in bf16 these have a rule of their own.
LOSS_SCALING = frozenset(
    {"loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"}
)


@rule("DS001", "misspelt-key", Severity.ERROR)
def misspelt_key(config: Config) -> Iterator[Problem]:
    """A top-level key is a small edit away from one that DeepSpeed reads, so it is taken for a slip.

    DeepSpeed ignores unknown keys at the top level in silence: the run starts with the default instead.
    With `zero_optimisation` it trains without ZeRO. A key that ends in a blank is such a slip too.

    Bad:
        {"train_batch_size": 8, "zero_optimisation": {"stage": 3}}
    Bad:
        {"train_batch_size": 8, "gradient_clipping ": 0.5}
    Good:
        {"train_batch_size": 8, "zero_optimization": {"stage": 3}}
    """
    for key in _unknown_keys(config):
        near = _nearest(key, TOP_LEVEL_KEYS)
        if near and not _elsewhere(key):
            message = f"DeepSpeed does not know `{key}` and ignores it"
            yield Problem(
                json_pointer(key), message, f"did you mean `{near}`?", severity=_unknown_severity(config)
            )


@rule("DS002", "unknown-key", Severity.WARNING)
def unknown_key(config: Config) -> Iterator[Problem]:
    """A top-level key is none that DeepSpeed reads, and not like one: it has no effect.

    Keys of one's own are left alone when they begin with `_` or `x-`; so are `$schema` and `ds_toolkit`.

    Bad:
        {"train_batch_size": 8, "experiment": "second try"}
    Good:
        {"train_batch_size": 8, "x-experiment": "second try", "_note": "ours", "$schema": "x.json"}
    """
    for key in _unknown_keys(config):
        if not _nearest(key, TOP_LEVEL_KEYS) and not _elsewhere(key) and not _nearest(key, _DDP_ARGUMENTS):
            message = f"DeepSpeed does not know `{key}` and ignores it"
            yield Problem(json_pointer(key), message, f"remove it, or mark it as your own: `x-{key}`")


@rule("DS003", "removed-key", Severity.ERROR)
def removed_key(config: Config) -> Iterator[Problem]:
    """A feature is gone from DeepSpeed, and its key is refused at the start, even when it says `false`.

    Bad:
        {"train_batch_size": 8, "amp": {"enabled": false}}
    Bad:
        {"train_batch_size": 8, "zero_optimization": {"stage": 3, "mics_shard_size": 8}}
    Bad:
        {"train_batch_size": 8, "elasticity": {"enabled": true, "max_train_batch_size": 2000}}
    Good:
        {"train_batch_size": 8, "bf16": {"enabled": true}}
    """
    for path, removed in (((), REMOVED_TOP_LEVEL_KEYS), (("zero_optimization",), REMOVED_ZERO_KEYS)):
        for key in config.section(*path):
            if key in removed:
                yield Problem(json_pointer(*path, key), f"DeepSpeed no longer has `{key}`", removed[key])


@rule("DS004", "unknown-section-key", Severity.ERROR)
def unknown_section_key(config: Config) -> Iterator[Problem]:
    """A key inside a section is none that DeepSpeed knows there; it refuses to start.

    So do `zero_optimization`, `fp16`, `bf16`, `tensor_parallel`, `compile` and the monitors; other sections
    ignore what they do not know.

    Bad:
        {"train_batch_size": 8, "zero_optimization": {"stage": 2, "overlap_com": true}}
    Bad:
        {"train_batch_size": 8, "zero_optimization": {"stage": 3, "aio": {"block_size": 1048576}}}
    Good:
        {"train_batch_size": 8, "zero_optimization": {"stage": 2, "overlap_comm": true}}
    """
    for member in config.members:
        removed = member.path[0] == "zero_optimization" and member.key in REMOVED_ZERO_KEYS
        loss_scaling = member.path[0] in ("bf16", "bfloat16") and member.key in LOSS_SCALING
        if member.known is None and not member.section.read_raw and not removed and not loss_scaling:
            yield _stray(config, member, "refuses")


@rule("DS005", "misplaced-key", Severity.ERROR)
def misplaced_key(config: Config) -> Iterator[Problem]:
    """A key of a section stands at the top level, where DeepSpeed ignores it in silence.

    Bad:
        {"train_batch_size": 8, "offload_param": {"device": "cpu"}, "zero_optimization": {"stage": 3}}
    Bad:
        {"train_batch_size": 8, "load_universal_checkpoint": true}
    Good:
        {"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    """
    for key in _unknown_keys(config):
        place = _elsewhere(key)
        if place is None:
            continue
        message = f"DeepSpeed ignores `{key}` at the top level"
        section, _, name = place.rpartition(".")
        if name != key:
            yield Problem(json_pointer(key), message, f"write `{place}`")
        else:
            edit = Edit(json_pointer(key), section=json_pointer(*section.split(".")))
            yield Problem(json_pointer(key), message, f"move it into `{section}`", edit)


@rule("DS006", "ignored-section-key", Severity.ERROR)
def ignored_section_key(config: Config) -> Iterator[Problem]:
    """A key inside a section is none that DeepSpeed reads there, and it ignores it in silence.

    Sections such as `checkpoint`, `activation_checkpointing`, `optimizer`, `aio` and `flops_profiler` are
    read key by key. With `use_node_local` instead of `use_node_local_storage` nothing is stored on local
    disks.

    Bad:
        {"train_batch_size": 8, "checkpoint": {"use_node_local": true}}
    Bad:
        {"train_batch_size": 8, "activation_checkpointing": {"partition_activation": true}}
    Good:
        {"train_batch_size": 8, "activation_checkpointing": {"partition_activations": true, "_note": "ours"}}
    """
    for member in config.members:
        nested = len(member.path) > 1
        old = member.path in OLD_AND_IGNORED
        if member.known is None and nested and member.section.read_raw and not member.is_private and not old:
            yield _stray(config, member, "ignores")


@rule("DS007", "repeated-key", Severity.ERROR)
def repeated_key(config: Config) -> Iterator[Problem]:
    """A key stands twice in one object, and DeepSpeed refuses the file.

    Python's own JSON reader would take the last of them.

    Bad:
        {"train_batch_size": 8, "train_batch_size": 16}
    Good:
        {"train_batch_size": 8}
    """
    for pointer, _offset in config.document.repeated if config.document else ():
        key = pointer.rpartition("/")[2]
        yield Problem(pointer, f"the key `{key}` stands twice", "keep one of them")


@rule("DS020", "argument-of-ddp", Severity.WARNING)
def argument_of_ddp(config: Config) -> Iterator[Problem]:
    """An argument of torch's DistributedDataParallel stands where DeepSpeed reads, and it ignores it.

    `find_unused_parameters` makes DDP walk the graph after every forward pass to find parameters that get no
    gradient. DeepSpeed needs no such search: parameters without a gradient are tolerated unless
    `zero_optimization.ignore_unused_parameters` is false.

    Bad:
        {"train_batch_size": 8, "find_unused_parameters": true}
    Good:
        {"train_batch_size": 8, "zero_optimization": {"stage": 2, "ignore_unused_parameters": true}}
    """
    for key in _unknown_keys(config):
        meant = _nearest(key, _DDP_ARGUMENTS)
        if meant and not _nearest(key, TOP_LEVEL_KEYS) and not _elsewhere(key):
            message = f"`{meant}` is an argument of DistributedDataParallel, and DeepSpeed ignores it"
            yield Problem(json_pointer(key), message, _DDP_ARGUMENTS[meant])


def _stray(config: Config, member: Member, verb: str) -> Problem:
    known = known_keys(member.section)
    near = _nearest(member.key, known)
    if near:
        fix = f"did you mean `{near}`?"
    elif "params" in known and not member.section.model_fields.keys() & {member.key}:
        fix = "move it into `params`"
    elif member.key in TOP_LEVEL_KEYS:
        fix = f"`{member.key}` belongs at the top level"
    else:
        fix = "remove it"
    place = ".".join(member.path[:-1])
    message = f"DeepSpeed {verb} `{member.key}` in `{place}`"
    return Problem(json_pointer(*member.path), message, fix, severity=_unknown_severity(config))


def _unknown_severity(config: Config) -> Severity | None:
    return Severity.WARNING if config.newer_deepspeed else None


def _unknown_keys(config: Config) -> Iterator[str]:
    for key in config.data:
        private = key in ("$schema", SECTION) or key.startswith(PRIVATE_PREFIXES)
        if not private and key not in TOP_LEVEL_KEYS and key not in REMOVED_TOP_LEVEL_KEYS:
            yield key


@functools.cache
def _places() -> dict[str, str]:
    """Where each key of a section belongs, for keys that stand in one section only."""
    places: dict[str, set[str]] = {}

    def visit(path: str, section: type[Section]) -> None:
        for key, known in known_keys(section).items():
            if path and key not in TOP_LEVEL_KEYS:
                places.setdefault(key, set()).add(f"{path}.{key}")
            if known.subsection is not None:
                visit(f"{path}.{key}" if path else key, known.subsection)

    visit("", DsConfig)
    # The old spelling of a section holds the same keys as the new one.
    single = {
        key: {place for place in found if not place.startswith("bfloat16.")} for key, found in places.items()
    }
    return {**{key: next(iter(found)) for key, found in single.items() if len(found) == 1}, **RELOCATED_KEYS}


def _elsewhere(key: str) -> str | None:
    # Names as general as `type` or `enabled` say nothing about where they belong.
    place = _places().get(key) if key not in GENERAL_NAMES else None
    return place if place is not None and (len(key) >= 8 or key in RELOCATED_KEYS or key == "stage") else None


def _nearest(key: str, known: Iterable[str]) -> str | None:
    # Case, blanks and dashes are slips whatever the length of the key.
    plain = key.strip().lower().replace("-", "_").replace(" ", "_")
    return next(iter(difflib.get_close_matches(plain, list(known), n=1, cutoff=_SMALL_EDIT)), None)
