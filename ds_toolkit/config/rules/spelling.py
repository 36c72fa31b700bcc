"""DS0xx: old names, two names for one thing, and texts that end too late."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from ds_toolkit.config.members import Member
from ds_toolkit.config.rules.registry import rule
from ds_toolkit.config.schema.removed import OLD_AND_IGNORED
from ds_toolkit.config.subject import Config, is_true, json_pointer
from ds_toolkit.findings import UNCHANGED, Edit, Severity
from ds_toolkit.rules import Problem

_ZERO = "zero_optimization"
_GATHER = "stage3_gather_16bit_weights_on_model_save"
# Old spelling, new spelling, both at the same place.
_RENAMED = {
    ("bfloat16",): "bf16",
    (_ZERO, "stage3_gather_fp16_weights_on_model_save"): _GATHER,
    (_ZERO, "cpu_offload"): "offload_optimizer",
    (_ZERO, "cpu_offload_param"): "offload_param",
}
_PIN_MEMORY = (_ZERO, "cpu_offload_use_pin_memory")


@rule("DS010", "swallowed-line", Severity.WARNING)
def swallowed_line(config: Config) -> Iterator[Problem]:
    """A text without quotes runs to the end of its line, and takes what was meant to follow it.

    HJSON reads `device: cpu, pin_memory: true` as one key whose value is the text `cpu, pin_memory: true`.

    Bad (text=hjson):
        {
          train_batch_size: 8
          _note: first, second: third
        }
    Good (text=hjson):
        {
          train_batch_size: 8
          _note: first
        }
    """
    for pointer, value in config.document.bare_words() if config.document else ():
        if any(mark in value for mark in (",", ":", "}", "]", "#", "//")):
            message = f"the text `{value}` has no quotes and takes the rest of its line"
            yield Problem(pointer, message, "put quotes around texts")


@rule("DS011", "deprecated-key", Severity.WARNING)
def deprecated_key(config: Config) -> Iterator[Problem]:
    """A key has a new name; DeepSpeed still reads the old one.

    `cpu_offload: true` is now `offload_optimizer: {"device": "cpu"}`, `zero_optimization: true` is now
    `{"stage": 1}`. `cpu_offload_use_pin_memory` has no effect any more, and neither has `thread_count` of
    `aio`, which is now `intra_op_parallelism`. Accelerate, and the Trainer with it, write `bf16` into every
    configuration, beside which DeepSpeed does not read `bfloat16`.

    Bad:
        {"train_batch_size": 8, "bfloat16": {"enabled": true}}
    Bad:
        {"train_batch_size": 8, "zero_optimization": true}
    Bad:
        {"train_batch_size": 8, "zero_optimization": {"stage": 3, "cpu_offload_param": true}}
    Bad:
        {"train_batch_size": 8, "aio": {"thread_count": 2},
         "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}}}
    Good:
        {"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    """
    for member in config.members:
        new = _RENAMED.get(member.path)
        if new is not None and new not in config.section(*member.path[:-1]):
            problem = _renamed(member, new)
            if new == "bf16" and config.consumer.uses_accelerate:
                message = f"`bfloat16` has no effect: {config.consumer.label} writes `bf16` beside it"
                problem = dataclasses.replace(problem, message=message)
            yield problem
        elif member.path in OLD_AND_IGNORED:
            fix = f"write `{OLD_AND_IGNORED[member.path]}`"
            yield Problem(json_pointer(*member.path), f"`{member.key}` has no effect any more", fix)
        elif member.path == _PIN_MEMORY:
            fix = "write `pin_memory` inside the offload section"
            yield Problem(json_pointer(*member.path), f"`{member.key}` has no effect any more", fix)
        elif member.path == (_ZERO,) and isinstance(member.value, bool):
            stage = int(member.value)
            edit = None if "allgather_size" in config.data else Edit(f"/{_ZERO}", value={"stage": stage})
            message = f"`{_ZERO}` as a boolean is the old spelling"
            yield Problem(f"/{_ZERO}", message, f'write {{"stage": {stage}}}', edit)


@rule("DS012", "old-and-new-key", Severity.ERROR)
def old_and_new_key(config: Config) -> Iterator[Problem]:
    """A key stands under two of its names; DeepSpeed refuses that, or reads only one of them.

    Bad:
        {"train_batch_size": 8, "zero_optimization": {"stage": 3, "cpu_offload_param": true,
         "offload_param": {"device": "cpu"}}}
    Bad:
        {"train_batch_size": 8, "zero_optimization": {"stage": 3, "max_reuse_distance": 0,
         "stage3_max_reuse_distance": 0}}
    Good:
        {"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    """
    for member in config.members:
        beside = config.section(*member.path[:-1])
        new = _RENAMED.get(member.path)
        if new is None and member.known is not None and member.known.key != member.key:
            new = member.known.key
        short_names = {new: new.removeprefix("stage3_")} if new else {}
        if new and (new in beside or (member.path in _RENAMED and short_names[new] in beside)):
            message = f"`{member.key}` and `{new}` are the same key"
            yield Problem(json_pointer(*member.path), message, f"keep `{new}`, remove `{member.key}`")


def _renamed(member: Member, new: str) -> Problem:
    value: object = UNCHANGED
    fix = f"write `{new}`"
    if new.startswith("offload_"):
        device = "cpu" if is_true(member.value) else "none"
        value, fix = {"device": device}, f'write `{new}`: {{"device": "{device}"}}'
    edit = Edit(json_pointer(*member.path), key=new, value=value)
    return Problem(json_pointer(*member.path), f"`{member.key}` is the old name of `{new}`", fix, edit)
