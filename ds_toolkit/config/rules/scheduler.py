"""DS12x: the learning-rate scheduler that DeepSpeed makes."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from ds_toolkit.config.members import as_number, shown
from ds_toolkit.config.rules.registry import rule
from ds_toolkit.config.schema.optimization import (
    NEEDED_SCHEDULER_PARAMS,
    SCHEDULER_PARAMS,
)
from ds_toolkit.config.schema.torch_classes import NEEDED_TORCH_PARAMS, TORCH_SCHEDULERS
from ds_toolkit.config.schema.torch_values import NEEDS_OBJECTS
from ds_toolkit.config.subject import Config, json_pointer, whole_number
from ds_toolkit.findings import Edit, Severity
from ds_toolkit.rules import Problem

_TYPE = json_pointer("scheduler", "type")
_WARMUP_TYPES = ("log", "linear")


@rule("DS121", "unknown-scheduler", Severity.ERROR)
def unknown_scheduler(config: Config) -> Iterator[Problem]:
    """The scheduler is none of DeepSpeed's, and no class of torch.optim.lr_scheduler; case matters.

    Bad:
        {"train_batch_size": 8, "scheduler": {"type": "WarmUpLR", "params": {"warmup_num_steps": 100}}}
    Good:
        {"train_batch_size": 8, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}}}
    """
    name = config.section("scheduler").get("type")
    known_names = SCHEDULER_PARAMS.keys() | TORCH_SCHEDULERS.keys() | NEEDS_OBJECTS.keys()
    if isinstance(name, str) and name not in known_names:
        known = {known.lower(): known for known in (*SCHEDULER_PARAMS, *TORCH_SCHEDULERS)}
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.7)
        fix = f"did you mean `{known[near[0]]}`?" if near else f"use one of {', '.join(SCHEDULER_PARAMS)}"
        yield Problem(_TYPE, f"there is no scheduler `{name}`", fix)


@rule("DS122", "scheduler-without-params", Severity.ERROR)
def scheduler_without_params(config: Config) -> Iterator[Problem]:
    """A scheduler has no params, and DeepSpeed stops with `argument after ** must be a mapping`.

    Bad:
        {"train_batch_size": 8, "scheduler": {"type": "WarmupLR"}}
    Good:
        {"train_batch_size": 8, "scheduler": {"type": "WarmupLR", "params": {}}}
    """
    scheduler = config.section("scheduler")
    if isinstance(scheduler.get("type"), str) and scheduler.get("params") is None:
        yield Problem("/scheduler", "the scheduler has no `params`", 'add "params": {}')


@rule("DS123", "unknown-scheduler-param", Severity.ERROR)
def unknown_scheduler_param(config: Config) -> Iterator[Problem]:
    """A scheduler's argument is none that it takes: a TypeError when it is made.

    Bad:
        {"train_batch_size": 8, "scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 1000}}}
    Good:
        {"train_batch_size": 8, "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 1000,
         "warmup_num_steps": 100}}}
    """
    name = config.section("scheduler").get("type")
    known = {**SCHEDULER_PARAMS, **TORCH_SCHEDULERS}.get(name) if isinstance(name, str) else None
    for key in config.section("scheduler", "params") if known else ():
        if known and key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            fix = f"did you mean `{near[0]}`?" if near else "remove it"
            yield Problem(json_pointer("scheduler", "params", key), f"`{name}` takes no `{key}`", fix)


@rule("DS124", "missing-scheduler-param", Severity.ERROR)
def missing_scheduler_param(config: Config) -> Iterator[Problem]:
    """A scheduler lacks an argument that it cannot do without: `total_num_steps`, or the ends of a cycle.

    Bad:
        {"train_batch_size": 8, "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 100}}}
    Bad:
        {"train_batch_size": 8, "scheduler": {"type": "StepLR", "params": {"gamma": 0.5}}}
    Good:
        {"train_batch_size": 8, "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 1000,
         "warmup_num_steps": 100}}}
    """
    scheduler, params = config.section("scheduler"), config.section("scheduler", "params")
    if not isinstance(scheduler.get("params"), dict):
        return
    for key in {**NEEDED_SCHEDULER_PARAMS, **NEEDED_TORCH_PARAMS}.get(str(scheduler.get("type")), ()):
        if key not in params:
            yield Problem("/scheduler/params", f"`{scheduler['type']}` needs `{key}`", f'add "{key}"')


@rule("DS125", "warmup-longer-than-training", Severity.WARNING)
def warmup_longer_than_training(config: Config) -> Iterator[Problem]:
    """The learning rate is still rising when the training ends: `warmup_num_steps` exceeds `total_num_steps`.

    Unless set, `warmup_num_steps` is 1000.

    Bad:
        {"train_batch_size": 8, "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 500}}}
    Good:
        {"train_batch_size": 8, "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 500,
         "warmup_num_steps": 50}}}
    """
    params = config.section("scheduler", "params")
    total = whole_number(params.get("total_num_steps"))
    warmup = whole_number(params.get("warmup_num_steps", 1000))
    if total is not None and warmup is not None and warmup > total:
        key = "warmup_num_steps" if "warmup_num_steps" in params else "total_num_steps"
        message = f"warming up takes {warmup} of {total} steps"
        yield Problem(json_pointer("scheduler", "params", key), message, "write fewer `warmup_num_steps`")


@rule("DS126", "no-warmup-steps", Severity.ERROR)
def no_warmup_steps(config: Config) -> Iterator[Problem]:
    """`warmup_num_steps` must be a positive whole number; DeepSpeed once took 0 for 2 and now refuses it.

    The Trainer, Accelerate and Lightning read 1e3 as 1000.0, which is refused too; DeepSpeed's own reader
    makes 1000 of it.

    Bad:
        {"train_batch_size": 8, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}
    Good:
        {"train_batch_size": 8, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1}}}
    """
    params, name = config.section("scheduler", "params"), str(config.section("scheduler").get("type"))
    if "warmup_num_steps" not in SCHEDULER_PARAMS.get(name, ()):
        return
    pointer = json_pointer("scheduler", "params", "warmup_num_steps")
    steps = params.get("warmup_num_steps", 1)
    if config.consumer.reads_json_only and config.document is not None:
        read = config.document.float_in_json(pointer)
        steps = steps if read is None else read
    if steps != "auto" and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        number = whole_number(as_number(steps) if isinstance(steps, str) else steps)
        edit = Edit(pointer, value=number) if number is not None and number >= 1 else None
        message = f"`warmup_num_steps` cannot be {shown(steps)}"
        yield Problem(pointer, message, "write 1 or more" if edit is None else f"write {number}", edit)


@rule("DS127", "unknown-warmup-type", Severity.WARNING)
def unknown_warmup_type(config: Config) -> Iterator[Problem]:
    """`warmup_type` is neither `log` nor `linear`; DeepSpeed takes `log` then.

    Bad:
        {"train_batch_size": 8, "scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cosine"}}}
    Good:
        {"train_batch_size": 8, "scheduler": {"type": "WarmupLR", "params": {"warmup_type": "linear"}}}
    """
    kind = config.section("scheduler", "params").get("warmup_type", "log")
    if kind not in (*_WARMUP_TYPES, "auto"):
        pointer = json_pointer("scheduler", "params", "warmup_type")
        yield Problem(pointer, f"there is no `warmup_type` `{kind}`: log is used", "write log or linear")


@rule("DS128", "scheduler-without-type", Severity.ERROR)
def scheduler_without_type(config: Config) -> Iterator[Problem]:
    """A scheduler has params but no type, and DeepSpeed ignores the section.

    Bad:
        {"train_batch_size": 8, "scheduler": {"params": {"warmup_num_steps": 100}}}
    Good:
        {"train_batch_size": 8, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}}}
    """
    if isinstance(config.data.get("scheduler"), dict) and config.section("scheduler").get("type") is None:
        yield Problem("/scheduler", "a scheduler without `type` is ignored", 'add "type": "WarmupLR"')
