"""DS14x: schedulers of torch that DeepSpeed makes by name."""

from __future__ import annotations

from collections.abc import Iterator

from ds_toolkit.config.rules.registry import rule
from ds_toolkit.config.schema.torch_classes import TORCH_SCHEDULERS
from ds_toolkit.config.schema.torch_values import NEEDS_OBJECTS
from ds_toolkit.config.subject import Config, json_pointer
from ds_toolkit.findings import Severity
from ds_toolkit.rules import Problem

_TYPE = json_pointer("scheduler", "type")


@rule("DS141", "torch-scheduler-on-a-wrapped-optimizer", Severity.ERROR)
def torch_scheduler_on_a_wrapped_optimizer(config: Config) -> Iterator[Problem]:
    """torch's schedulers take only torch's optimizers, and the engine wraps them for ZeRO, fp16 and bf16.

    It stops with `DeepSpeedZeroOptimizer is not an Optimizer`. DeepSpeed's own schedulers look inside.

    Bad:
        {"train_batch_size": 8, "zero_optimization": {"stage": 1},
         "scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 1000}}}
    Bad:
        {"train_batch_size": 8, "bf16": {"enabled": true},
         "scheduler": {"type": "StepLR", "params": {"step_size": 1000}}}
    Good:
        {"train_batch_size": 8, "scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 1000}}}
    Good:
        {"train_batch_size": 8, "zero_optimization": {"stage": 1},
         "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 1000, "warmup_num_steps": 10}}}
    """
    name, stage = str(config.section("scheduler").get("type")), config.zero_stage or 0
    if name not in TORCH_SCHEDULERS or (stage == 0 and config.precision == "fp32"):
        return
    wrapped_by = f"ZeRO stage {stage}" if stage else config.precision
    own = "WarmupCosineLR" if name.startswith("Cosine") else "WarmupDecayLR"
    message = f"torch's `{name}` refuses the optimizer that {wrapped_by} wraps"
    yield Problem(_TYPE, message, f"use {own}, or make the scheduler in the script")


@rule("DS142", "scheduler-made-of-objects", Severity.ERROR)
def scheduler_made_of_objects(config: Config) -> Iterator[Problem]:
    """The scheduler wants a function or other schedulers, which no configuration can hold.

    Bad:
        {"train_batch_size": 8, "scheduler": {"type": "LambdaLR", "params": {"lr_lambda": 0.95}}}
    Bad:
        {"train_batch_size": 8, "scheduler": {"type": "SequentialLR", "params": {"milestones": [10]}}}
    Good:
        {"train_batch_size": 8, "scheduler": {"type": "ExponentialLR", "params": {"gamma": 0.95}}}
    """
    name = config.section("scheduler").get("type")
    if isinstance(name, str) and name in NEEDS_OBJECTS:
        message = f"`{name}` cannot be made from a configuration: {NEEDS_OBJECTS[name]}"
        yield Problem(_TYPE, message, "pass `lr_scheduler` to deepspeed.initialize")


@rule("DS143", "plateau-without-a-metric", Severity.WARNING)
def plateau_without_a_metric(config: Config) -> Iterator[Problem]:
    """ReduceLROnPlateau needs a metric at every step; without one DeepSpeed gives it the batch size.

    That never improves, so that the learning rate falls to a tenth every eleven steps (`factor`, `patience`).
    A script that calls `engine.step(lr_kwargs={"metrics": loss})` can ignore this.

    Bad:
        {"train_batch_size": 8, "scheduler": {"type": "ReduceLROnPlateau", "params": {"patience": 10}}}
    Good:
        {"train_batch_size": 8, "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 5000}}}
    """
    if config.section("scheduler").get("type") == "ReduceLROnPlateau":
        message = "without a metric at each step the batch size is taken for one, and the learning rate falls"
        yield Problem(_TYPE, message, 'call `engine.step(lr_kwargs={"metrics": loss})`, or use WarmupDecayLR')


@rule("DS144", "one-cycle-without-a-length", Severity.ERROR)
def one_cycle_without_a_length(config: Config) -> Iterator[Problem]:
    """OneCycleLR needs `total_steps`, or `epochs` and `steps_per_epoch`, and stops without them.

    Where all three stand, `total_steps` counts. One step more than the total is a ValueError in the midst of
    training.

    Bad:
        {"train_batch_size": 8, "scheduler": {"type": "OneCycleLR", "params": {"max_lr": 0.1}}}
    Bad:
        {"train_batch_size": 8, "scheduler": {"type": "OneCycleLR", "params": {"max_lr": 0.1, "epochs": 3}}}
    Good:
        {"train_batch_size": 8, "scheduler": {"type": "OneCycleLR", "params": {"max_lr": 0.1,
         "total_steps": 1000}}}
    Good:
        {"train_batch_size": 8, "scheduler": {"type": "OneCycleLR", "params": {"max_lr": 0.1, "epochs": 3,
         "steps_per_epoch": 500}}}
    """
    scheduler, params = config.section("scheduler"), config.section("scheduler", "params")
    if scheduler.get("type") != "OneCycleLR" or not isinstance(scheduler.get("params"), dict):
        return
    total, epochs, steps = (params.get(key) for key in ("total_steps", "epochs", "steps_per_epoch"))
    if total is None and (epochs is None or steps is None):
        missing = [key for key, value in (("epochs", epochs), ("steps_per_epoch", steps)) if value is None]
        fix = 'add "total_steps"' if len(missing) == 2 else f'add "{missing[0]}", or "total_steps"'
        message = "`OneCycleLR` needs `total_steps`, or `epochs` and `steps_per_epoch`"
        yield Problem("/scheduler/params", message, fix)
    elif total is not None and (epochs is not None or steps is not None):
        key = "epochs" if epochs is not None else "steps_per_epoch"
        message = f"`{key}` is not used beside `total_steps`"
        pointer = json_pointer("scheduler", "params", key)
        yield Problem(pointer, message, "remove it", severity=Severity.WARNING)
