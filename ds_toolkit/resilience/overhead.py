"""Which steps a snapshot is taken of, decided the same way on every rank by what snapshots cost."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from statistics import fmean, median
from typing import NamedTuple, Protocol

from ds_toolkit.config.guard_settings import GuardSettings
from ds_toolkit.resilience import agreement
from ds_toolkit.resilience.reporting import logger
from ds_toolkit.units import format_seconds

MOST_STEPS = 1000
# Quotients such as 0.06 / 0.03 are not to become one step more than they are.
_ROUNDING = 1e-9


class Pace(Protocol):
    """Asked once after every optimizer step, on every rank."""

    def due(self, step: int) -> bool:
        """Whether to take a snapshot of this step; the same answer on every rank."""

    def observe(self, *, step_seconds: float, stall_seconds: float) -> None:
        """How long the step took that has just ended, and how long snapshots kept it waiting besides.

        Call it before `due` of that step. Not collective; what rank 0 observes counts.

        Args:
            step_seconds: from step to step, without what the guard did or waited for in between.
            stall_seconds: for the snapshot of the step before: beginning it, and waiting for its end.
        """

    def moved_to(self, step: int) -> None:
        """The run goes on from this step, which may be an earlier one than it was at."""


def pace_for(settings: GuardSettings) -> Pace:
    """The pace that `snapshot_every` asks for."""
    if isinstance(settings.snapshot_every, int):
        return FixedPace(settings.snapshot_every)
    return SnapshotPace(settings.overhead_budget, decides=agreement.rank() == 0)


def fewest_steps(cost_seconds: float, step_seconds: float, budget: float) -> int:
    """The smallest number of steps between snapshots that keeps cost / (steps x step time) within the budget.

    At least 1, and at most `MOST_STEPS`, whatever it costs.
    """
    allowed_seconds = budget * step_seconds
    if cost_seconds >= allowed_seconds * MOST_STEPS:
        return MOST_STEPS if cost_seconds > 0 else 1
    return max(1, math.ceil(cost_seconds / allowed_seconds - _ROUNDING))


class FixedPace:
    """A snapshot of the multiples of so many steps; of none if that is 0."""

    def __init__(self, snapshot_every: int) -> None:
        self.snapshot_every = snapshot_every

    def due(self, step: int) -> bool:
        return self.snapshot_every > 0 and step % self.snapshot_every == 0

    def observe(self, *, step_seconds: float, stall_seconds: float) -> None:
        pass

    def moved_to(self, step: int) -> None:
        pass


class _Cost(NamedTuple):
    """What a snapshot costs beside a step without one, in seconds."""

    stall_seconds: float
    slower_seconds: float
    step_seconds: float

    @property
    def seconds(self) -> float:
        return self.stall_seconds + self.slower_seconds


class SnapshotPace:
    """As many snapshots as the budget allows, by what they cost in this run.

    A snapshot costs its stall, and what the next step takes longer while the copy runs beside it: the
    difference of the medians of steps with and without a copy, so that a slow step now and then counts for
    nothing. Another rank's stall shows in it too, since rank 0 waits for that rank. Both kinds of steps must
    be seen: the run begins with `FIRST_EVERY`, and where every step could have its snapshot, each
    `LEFT_OUT_EVERY`th goes without.

    All ranks look at the same steps, `LOOK_EVERY` apart; rank 0 decides and tells, and logs each change.

    Attributes:
        snapshot_every: steps between snapshots at present; the multiples get one.
    """

    FIRST_EVERY = 2
    LEFT_OUT_EVERY = 50
    LOOK_EVERY = 50
    LEAST_SAMPLES = 8
    NUM_SAMPLES = 32

    def __init__(
        self,
        budget: float,
        *,
        decides: bool,
        broadcast: Callable[[tuple[int, int]], tuple[int, int]] = agreement.broadcast,
    ) -> None:
        """Begin; `decides` is true on rank 0 alone."""
        self.snapshot_every = self.FIRST_EVERY
        self._budget = budget
        self._decides = decides
        self._broadcast = broadcast
        self._look_at_step = 0
        self._is_copying = False
        self._is_measured = False
        self._plain_seconds: deque[float] = deque(maxlen=self.NUM_SAMPLES)
        self._beside_seconds: deque[float] = deque(maxlen=self.NUM_SAMPLES)
        self._stall_seconds: deque[float] = deque(maxlen=self.NUM_SAMPLES)

    @property
    def slowdown(self) -> float | None:
        """The share of time that snapshots cost at present, as measured here; None before it is known."""
        cost = self._cost()
        return None if cost is None else cost.seconds / (self.snapshot_every * cost.step_seconds)

    def observe(self, *, step_seconds: float, stall_seconds: float) -> None:
        if self._is_copying:
            self._beside_seconds.append(step_seconds)
            self._stall_seconds.append(stall_seconds)
        else:
            self._plain_seconds.append(step_seconds)

    def due(self, step: int) -> bool:
        if step >= self._look_at_step:
            every = self._best() if self._decides else self.snapshot_every
            self.snapshot_every, self._look_at_step = self._broadcast((every, step + self.LOOK_EVERY))
        left_out = self.snapshot_every == 1 and step % self.LEFT_OUT_EVERY == 0
        self._is_copying = step % self.snapshot_every == 0 and not left_out
        return self._is_copying

    def moved_to(self, step: int) -> None:
        self._look_at_step = step + 1
        self._is_copying = False

    def _cost(self) -> _Cost | None:
        if min(len(self._plain_seconds), len(self._beside_seconds)) < self.LEAST_SAMPLES:
            return None
        plain_seconds = median(self._plain_seconds)
        slower_seconds = max(0.0, median(self._beside_seconds) - plain_seconds)
        # Waiting is a cost whenever it happens: no stall is left out, however rare.
        cost = _Cost(fmean(self._stall_seconds), slower_seconds, plain_seconds)
        return cost if plain_seconds > 0 else None

    def _best(self) -> int:
        cost = self._cost()
        if cost is None:
            return self.snapshot_every
        best = fewest_steps(cost.seconds, cost.step_seconds, self._budget)
        if best != self.snapshot_every or not self._is_measured:
            self._is_measured = True
            logger.info(
                "a snapshot every %s from now on, not every %s: one costs %s (%s of waiting, %s of slower"
                " computing) beside a step of %s, so that %.1f%% of the time goes into them; the budget is"
                " %.1f%%",
                _steps(best),
                _steps(self.snapshot_every),
                *map(format_seconds, (cost.seconds, *cost)),
                100 * cost.seconds / (best * cost.step_seconds),
                100 * self._budget,
            )
        return best


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"
