"""What the values in the params of optimizers and of DeepSpeed's schedulers may be.

optimization.py has their names, torch_values.py what torch's schedulers take.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Number:
    """A number and the range in which training with it makes sense.

    Attributes:
        low: the least value.
        low_counts: whether the least value itself is allowed.
        below: what it must stay below.
        high: the greatest value.
        whole: whether it must be written without a dot.
        dotted: whether it must be written with one.
        null: whether `null` is a value of its own.
        per_group: whether a list may give one for each parameter group.
        converted: whether DeepSpeed makes a number of a text that spells one.
    """

    low: float = -math.inf
    low_counts: bool = True
    below: float = math.inf
    high: float = math.inf
    whole: bool = False
    dotted: bool = False
    null: bool = False
    per_group: bool = False
    converted: bool = False

    @property
    def expected(self) -> str:
        """What to write, in words."""
        noun = (
            "a whole number" if self.whole else "a number with a decimal point" if self.dotted else "a number"
        )
        if self.low > -math.inf:
            noun += f", {self.low:g} or more" if self.low_counts else f" above {self.low:g}"
        if self.high < math.inf:
            noun += f", {self.high:g} or less"
        return noun if self.below == math.inf else f"{noun}, below {self.below:g}"

    def takes(self, value: object) -> bool:
        """Whether it is such a number."""
        if value is None:
            return self.null
        if isinstance(value, list):
            return self.per_group and all(self._takes_one(each) for each in value)
        if isinstance(value, str) and self.converted:
            try:
                value = float(value)
            except ValueError:
                return False
        return self._takes_one(value)

    def _takes_one(self, value: object) -> bool:
        # Python takes true for 1, and so would the arithmetic; whoever wrote it meant something else.
        kind = int if self.whole else float if self.dotted else int | float
        if isinstance(value, bool) or not isinstance(value, kind):
            return False
        in_range = self.low <= value <= self.high and value < self.below
        return in_range and (self.low_counts or value > self.low)


@dataclass(frozen=True)
class Pair:
    """Two numbers of one range."""

    each: Number

    @property
    def expected(self) -> str:
        """What to write, in words."""
        return f"a list of two, each {self.each.expected}"

    def takes(self, value: object) -> bool:
        """Whether it is a list of two such numbers."""
        return isinstance(value, list) and len(value) == 2 and all(self.each.takes(each) for each in value)


@dataclass(frozen=True)
class Switch:
    """`true` or `false`; a text counts as true, whatever it says."""

    expected: str = "true or false"

    def takes(self, value: object) -> bool:
        """Whether Python takes it for what it says; torch leaves `null` to itself."""
        return value is None or isinstance(value, bool) or value in (0, 1)


@dataclass(frozen=True)
class Choice:
    """One of a few values."""

    values: tuple[str | int | None, ...]

    @property
    def expected(self) -> str:
        """What to write, in words."""
        return " or ".join("null" if value is None else str(value) for value in self.values)

    def takes(self, value: object) -> bool:
        """Whether it is one of them; true and false are no numbers."""
        return not isinstance(value, bool) and value in self.values


@dataclass(frozen=True)
class Numbers:
    """A list of numbers of one range, as many as one likes."""

    each: Number

    @property
    def expected(self) -> str:
        """What to write, in words."""
        return f"a list, each {self.each.expected}"

    def takes(self, value: object) -> bool:
        """Whether it is a list of such numbers."""
        return isinstance(value, list) and all(self.each.takes(each) for each in value)


ParamValue = Number | Pair | Switch | Choice | Numbers

_RATE = Number(low=0)
_MOMENTUM = Number(low=0, below=1)
_STEP = Number(low=0, low_counts=False, converted=True)
_LEARNING_RATES = Number(low=0, per_group=True)
_SWITCH = Switch()

# One meaning for all optimizers, DeepSpeed's and torch's; a name that is not here may be anything.
OPTIMIZER_VALUES: dict[str, ParamValue] = {
    **dict.fromkeys(("lr", "muon_lr", "adam_lr", "weight_decay", "eps", "lr_decay"), _RATE),
    **dict.fromkeys(("initial_accumulator_value", "max_coeff", "min_coeff"), _RATE),
    "momentum": _MOMENTUM,
    "betas": Pair(_MOMENTUM),
    **dict.fromkeys(("bias_correction", "amsgrad", "set_grad_none", "torch_adam", "adam_w_mode"), _SWITCH),
    **dict.fromkeys(("fp32_optimizer_states", "foreach", "maximize", "capturable", "fused"), _SWITCH),
    **dict.fromkeys(("differentiable", "eps_inside_sqrt", "nesterov", "centered"), _SWITCH),
    # Of torch's own classes, each of which calls something else by these names.
    **dict.fromkeys(("alpha", "lambd", "momentum_decay"), _RATE),
    **dict.fromkeys(("dampening", "t0"), Number()),
    "rho": Number(low=0, high=1),
    "d": Number(low=1),
    "beta2_decay": Number(high=0),
    "step_sizes": Pair(_RATE),
}
# In these classes of torch the name means something else; None is not looked at.
OTHER_MEANINGS: dict[tuple[str, str], ParamValue | None] = {
    ("Adafactor", "eps"): None,
    ("SGD", "momentum"): _RATE,
    ("RMSprop", "momentum"): _RATE,
}

# `warmup_num_steps` and `warmup_type` have rules of their own.
SCHEDULER_VALUES: dict[str, ParamValue] = {
    "lr_range_test_min_lr": _LEARNING_RATES,
    "lr_range_test_step_size": Number(low=1, whole=True),
    "lr_range_test_step_rate": Number(),
    "lr_range_test_staircase": _SWITCH,
    "cycle_min_lr": _LEARNING_RATES,
    "cycle_max_lr": _LEARNING_RATES,
    "cycle_first_step_size": _STEP,
    "cycle_second_step_size": Number(low=0, null=True, converted=True),
    "cycle_first_stair_count": Number(low=0),
    "cycle_second_stair_count": Number(low=0, null=True),
    "decay_lr_rate": Number(),
    "decay_step_size": Number(low=0),
    "decay_mom_rate": Number(),
    "cycle_momentum": _SWITCH,
    "cycle_min_mom": Number(low=0, below=1, per_group=True),
    "cycle_max_mom": Number(low=0, below=1, per_group=True),
    "warmup_min_lr": _LEARNING_RATES,
    "warmup_max_lr": Number(low=0, null=True, per_group=True),
    "warmup_min_ratio": Number(low=0),
    "cos_min_ratio": Number(low=0),
    "total_num_steps": Number(low=1),
    "last_batch_iteration": Number(low=-1, whole=True),
}
