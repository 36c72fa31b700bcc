"""DS15x: curves of the learning rate that are not what was meant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ds_toolkit.config.members import shown
from ds_toolkit.config.rules.registry import rule
from ds_toolkit.config.schema.optimization import SCHEDULER_PARAMS
from ds_toolkit.config.schema.torch_classes import TORCH_SCHEDULERS
from ds_toolkit.config.subject import Config, json_pointer
from ds_toolkit.findings import Severity
from ds_toolkit.rules import Problem

# What WarmupDecayLR rises to by itself; WarmupLR rises to the optimizer's `lr`.
_DEFAULT_PEAK = 0.001
_BOUNDS = (
    ("warmup_min_lr", "warmup_max_lr"),
    ("cycle_min_lr", "cycle_max_lr"),
    ("cycle_min_mom", "cycle_max_mom"),
    ("base_lr", "max_lr"),
    ("base_momentum", "max_momentum"),
)


@rule("DS151", "bounds-swapped", Severity.WARNING)
def bounds_swapped(config: Config) -> Iterator[Problem]:
    """The lower end of a schedule is above its upper end: a warm-up that falls, a cycle upside down.

    No scheduler complains.

    Bad:
        {"train_batch_size": 8, "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-3,
         "warmup_max_lr": 1e-4}}}
    Bad:
        {"train_batch_size": 8, "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1,
         "cycle_max_lr": 0.01}}}
    Good:
        {"train_batch_size": 8, "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0,
         "warmup_max_lr": 1e-4}}}
    """
    name, params = _scheduler(config)
    takes = SCHEDULER_PARAMS.get(name) or TORCH_SCHEDULERS.get(name, frozenset())
    for low_key, high_key in _BOUNDS:
        low, high = _number(params.get(low_key)), _number(params.get(high_key))
        if low_key in takes and high_key in takes and low is not None and high is not None and low > high:
            message = f"`{low_key}` {shown(low)} is above `{high_key}` {shown(high)}"
            yield Problem(json_pointer("scheduler", "params", low_key), message, "swap them")


@rule("DS152", "learning-rate-not-used", Severity.WARNING)
def learning_rate_not_used(config: Config) -> Iterator[Problem]:
    """WarmupDecayLR rises to `warmup_max_lr`, which is 0.001 unless set, whatever `lr` the optimizer has.

    WarmupLR alone takes the optimizer's `lr` where `warmup_max_lr` is missing, and WarmupCosineLR scales it.
    Two numbers that are both written and differ are a note: the scheduler's counts.

    Bad:
        {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
         "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 5000}}}
    Good:
        {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
         "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 5000, "warmup_max_lr": 1e-4}}}
    """
    name, params = _scheduler(config)
    rate = _number(config.section("optimizer", "params").get("lr"))
    if name not in ("WarmupLR", "WarmupDecayLR") or rate is None:
        return
    key = "warmup_max_lr"
    if key in params:
        peak = _number(params[key])
        if peak is not None and peak != rate:
            pointer = json_pointer("scheduler", "params", key)
            message = (
                f"the rate rises to `{key}` {shown(peak)}, and the optimizer's `lr` {shown(rate)} is not used"
            )
            yield Problem(pointer, message, "write the same number in both", severity=Severity.INFO)
    elif name == "WarmupDecayLR" and rate != _DEFAULT_PEAK:
        message = f"the learning rate rises to {_DEFAULT_PEAK}, not to the optimizer's `lr` {shown(rate)}"
        yield Problem("/scheduler/params", message, f'add "{key}": {shown(rate)}')


@rule("DS153", "decay-without-its-other-half", Severity.WARNING)
def decay_without_its_other_half(config: Config) -> Iterator[Problem]:
    """OneCycle decays after its cycle only with both a rate and a `decay_step_size`; one alone does nothing.

    Bad:
        {"train_batch_size": 8, "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5,
         "cycle_max_lr": 1e-3, "decay_lr_rate": 0.001}}}
    Bad:
        {"train_batch_size": 8, "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5,
         "cycle_max_lr": 1e-3, "decay_step_size": 100}}}
    Good:
        {"train_batch_size": 8, "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5,
         "cycle_max_lr": 1e-3, "decay_lr_rate": 0.001, "decay_step_size": 100}}}
    """
    name, params = _scheduler(config)
    if name != "OneCycle" or "auto" in params.values():
        return
    rates = [key for key in ("decay_lr_rate", "decay_mom_rate") if params.get(key, 0) not in (0, None)]
    interval = params.get("decay_step_size", 0) not in (0, None)
    if interval and not rates:
        pointer = json_pointer("scheduler", "params", "decay_step_size")
        yield Problem(
            pointer, "`decay_step_size` does nothing without `decay_lr_rate`", "add `decay_lr_rate`"
        )
    for key in rates if not interval else ():
        pointer = json_pointer("scheduler", "params", key)
        yield Problem(pointer, f"`{key}` does nothing without `decay_step_size`", "add `decay_step_size`")


@rule("DS154", "betas-replaced-by-the-cycle", Severity.WARNING)
def betas_replaced_by_the_cycle(config: Config) -> Iterator[Problem]:
    """OneCycle replaces the optimizer's betas unless `cycle_momentum` is false.

    The first runs between `cycle_min_mom` and `cycle_max_mom`, 0.8 and 0.9 unless set; the second is always
    0.99.

    Bad:
        {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
         "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3}}}
    Good:
        {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
         "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3,
         "cycle_momentum": false}}}
    """
    name, params = _scheduler(config)
    if (
        name == "OneCycle"
        and "betas" in config.section("optimizer", "params")
        and params.get("cycle_momentum", True)
    ):
        message = "OneCycle replaces these betas, the second by 0.99"
        fix = 'add "cycle_momentum": false to the scheduler\'s params, or remove `betas`'
        yield Problem(json_pointer("optimizer", "params", "betas"), message, fix)


def _scheduler(config: Config) -> tuple[str, Mapping[str, object]]:
    return str(config.section("scheduler").get("type")), config.section("scheduler", "params")


def _number(value: object) -> int | float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
