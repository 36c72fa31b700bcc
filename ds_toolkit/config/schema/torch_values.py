"""What the values in the params of torch's schedulers may be; torch_classes.py has their names."""

from __future__ import annotations

from ds_toolkit.config.schema.param_values import Choice, Number, Numbers, ParamValue, Switch

_FACTOR = Number(low=0)
_STEPS = Number(low=1, whole=True)
_COUNT = Number(low=0, whole=True)
_RATE = Number(low=0)
_RATES = Number(low=0, per_group=True)
_MOMENTUM = Number(low=0, below=1, per_group=True)
# Another start is for resuming by hand, and torch misses what only a resumed optimizer has.
_FRESH = Choice((-1,))

# Classes that are given other objects or a function, which no configuration can hold.
NEEDS_OBJECTS = {
    "LRScheduler": "it is the base class of the others",
    "LambdaLR": "`lr_lambda` must be a function",
    "MultiplicativeLR": "`lr_lambda` must be a function",
    "ChainedScheduler": "`schedulers` must be objects",
    "SequentialLR": "`schedulers` must be objects",
}

TORCH_SCHEDULER_VALUES: dict[str, dict[str, ParamValue]] = {
    "ConstantLR": {
        "factor": Number(low=0, low_counts=False, high=1),
        "total_iters": _STEPS,
    },
    "CosineAnnealingLR": {"T_max": _STEPS, "eta_min": _RATE},
    "CosineAnnealingWarmRestarts": {"T_0": _STEPS, "T_mult": _STEPS, "eta_min": _RATE},
    "CyclicLR": {
        "base_lr": _RATES,
        "max_lr": _RATES,
        "step_size_up": Number(low=0, low_counts=False, converted=True),
        "step_size_down": Number(low=0, null=True, converted=True),
        "mode": Choice(("triangular", "triangular2", "exp_range")),
        "gamma": _FACTOR,
        "scale_fn": Choice((None,)),
        "scale_mode": Choice(("cycle", "iterations")),
        "cycle_momentum": Switch(),
        "base_momentum": _MOMENTUM,
        "max_momentum": _MOMENTUM,
    },
    "ExponentialLR": {"gamma": _FACTOR},
    "LinearLR": {
        "start_factor": Number(low=0, low_counts=False, high=1),
        "end_factor": Number(low=0, high=1),
        "total_iters": _STEPS,
    },
    "MultiStepLR": {"milestones": Numbers(_RATE), "gamma": _FACTOR},
    "OneCycleLR": {
        "max_lr": _RATES,
        "total_steps": Number(low=1, whole=True, null=True),
        "epochs": Number(low=1, whole=True, null=True),
        "steps_per_epoch": Number(low=1, whole=True, null=True),
        "pct_start": Number(low=0, high=1, dotted=True),
        "anneal_strategy": Choice(("cos", "linear")),
        "cycle_momentum": Switch(),
        "base_momentum": _MOMENTUM,
        "max_momentum": _MOMENTUM,
        "div_factor": Number(low=0, low_counts=False),
        "final_div_factor": Number(low=0, low_counts=False),
        "three_phase": Switch(),
    },
    "PolynomialLR": {"total_iters": _STEPS, "power": _FACTOR},
    "ReduceLROnPlateau": {
        "mode": Choice(("min", "max")),
        "factor": Number(low=0, below=1),
        "patience": _COUNT,
        "threshold": Number(),
        "threshold_mode": Choice(("rel", "abs")),
        "cooldown": _COUNT,
        "min_lr": _RATES,
        "eps": _RATE,
    },
    "StepLR": {"step_size": _STEPS, "gamma": _FACTOR},
}
for _name in TORCH_SCHEDULER_VALUES.keys() - {"ReduceLROnPlateau"}:
    TORCH_SCHEDULER_VALUES[_name]["last_epoch"] = _FRESH
