"""DS110 and DS129: values in the params of optimizers and schedulers."""

from __future__ import annotations

from collections.abc import Iterator

from ds_toolkit.config.members import as_number, shown
from ds_toolkit.config.rules.registry import rule
from ds_toolkit.config.schema.optimization import SCHEDULER_PARAMS
from ds_toolkit.config.schema.param_values import (
    OPTIMIZER_VALUES,
    OTHER_MEANINGS,
    SCHEDULER_VALUES,
    ParamValue,
)
from ds_toolkit.config.schema.torch_values import TORCH_SCHEDULER_VALUES
from ds_toolkit.config.subject import Config, json_pointer
from ds_toolkit.findings import Edit, Severity
from ds_toolkit.rules import Problem


@rule("DS110", "optimizer-param-value", Severity.ERROR)
def optimizer_param_value(config: Config) -> Iterator[Problem]:
    """A value in the optimizer's params is of the wrong kind, or outside the range that makes sense.

    DeepSpeed hands params to the optimizer as they are, so that a quoted number or a bad pair of betas is
    noticed when the optimizer is made, or at the first step. Some classes check no range, and would train in
    the wrong direction with a negative `lr`.

    Bad:
        {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": "1e-4"}}}
    Bad:
        {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": -1}}}
    Bad:
        {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [1.0, 0.9]}}}
    Good:
        {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}}}
    """
    name = str(config.section("optimizer").get("type"))
    for key, value in config.section("optimizer", "params").items():
        expected = OTHER_MEANINGS.get((name, key), OPTIMIZER_VALUES.get(key))
        yield from _problems("optimizer", key, value, expected)


@rule("DS129", "scheduler-param-value", Severity.ERROR)
def scheduler_param_value(config: Config) -> Iterator[Problem]:
    """A value in the scheduler's params is of the wrong kind, or outside the range that makes sense.

    DeepSpeed's schedulers and torch's compute with params as they are: a quoted number is a TypeError, and an
    interval of no steps is refused or divides by zero. Some values pass and are wrong: torch takes a
    `step_size` below zero for an interval, and a `gamma` below zero turns the learning rate around.

    Bad:
        {"train_batch_size": 8, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "1e-4"}}}
    Bad:
        {"train_batch_size": 8,
         "scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_step_size": 0}}}
    Bad:
        {"train_batch_size": 8, "scheduler": {"type": "StepLR", "params": {"step_size": 0}}}
    Bad:
        {"train_batch_size": 8, "scheduler": {"type": "OneCycleLR", "params": {"max_lr": 0.1,
         "total_steps": 1000, "anneal_strategy": "cosine"}}}
    Good:
        {"train_batch_size": 8, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4}}}
    Good:
        {"train_batch_size": 8, "scheduler": {"type": "OneCycleLR", "params": {"max_lr": 0.1,
         "total_steps": 1000, "anneal_strategy": "cos"}}}
    """
    name = str(config.section("scheduler").get("type"))
    own = SCHEDULER_PARAMS.get(name, frozenset())
    known = {key: SCHEDULER_VALUES.get(key) for key in own} or TORCH_SCHEDULER_VALUES.get(name, {})
    for key, value in config.section("scheduler", "params").items():
        yield from _problems("scheduler", key, value, known.get(key))


def _problems(section: str, key: str, value: object, expected: ParamValue | None) -> Iterator[Problem]:
    # Whether somebody resolves "auto" is another question.
    if expected is None or value == "auto" or expected.takes(value):
        return
    pointer = json_pointer(section, "params", key)
    number = as_number(value) if isinstance(value, str) else None
    if number is not None and expected.takes(number):
        message = f"`{key}` is the text {shown(value)}, not a number"
        yield Problem(pointer, message, f"write {shown(number)}", Edit(pointer, value=number))
    else:
        yield Problem(pointer, f"`{key}` cannot be {shown(value)}", f"expected: {expected.expected}")
