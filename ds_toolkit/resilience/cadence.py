"""When the next periodic checkpoint is due, decided the same way on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from ds_toolkit.config.guard_settings import GuardSettings
from ds_toolkit.resilience import agreement


class Cadence(Protocol):
    """Asked once after every optimizer step, on every rank."""

    def due(self, step: int) -> bool:
        """Whether to save now; the same answer on every rank."""

    def saved(self, step: int) -> None:
        """A checkpoint of this step was committed or given up, on schedule or not."""

    def moved_to(self, step: int) -> None:
        """The run goes on from this step, which may be an earlier one than it was at."""


def cadence_for(settings: GuardSettings) -> Cadence:
    """The cadence that `save_every` asks for."""
    if settings.save_every_steps is not None:
        return EverySteps(settings.save_every_steps)
    assert settings.save_every_seconds is not None  # noqa: S101  (one of the two is always set)
    return EverySeconds(settings.save_every_seconds)


class EverySteps:
    """Due at the multiples of `interval_steps`, so that a resumed run saves at the same steps."""

    def __init__(self, interval_steps: int) -> None:
        self.interval_steps = interval_steps

    def due(self, step: int) -> bool:
        return step % self.interval_steps == 0

    def saved(self, step: int) -> None:
        pass

    def moved_to(self, step: int) -> None:
        pass


class EverySeconds:
    """Due when `interval_seconds` have passed since the last checkpoint, by rank 0's clock.

    Clocks differ between ranks, so rank 0 decides and tells; asking at every step would cost a collective a
    step. Instead all ranks agree on the step at which they look again: half of the steps that the rest of
    the interval should hold, judged by the steps since the last look, and never more than
    `LONGEST_LOOK_AHEAD` of them, so that a run that becomes slow is late by so many steps at most.
    """

    LONGEST_LOOK_AHEAD = 32

    def __init__(
        self,
        interval_seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        broadcast: Callable[[tuple[bool, int]], tuple[bool, int]] = agreement.broadcast,
    ) -> None:
        self.interval_seconds = interval_seconds
        self._clock = clock
        self._broadcast = broadcast
        self._saved_at_seconds = clock()
        self._looked_at_seconds = self._saved_at_seconds
        self._looked_at_step: int | None = None
        self._look_at_step = 0

    def due(self, step: int) -> bool:
        if step < self._look_at_step:
            return False
        due, self._look_at_step = self._broadcast(self._outlook(step))
        return due

    def saved(self, step: int) -> None:
        self._saved_at_seconds = self._clock()
        self.moved_to(step)

    def moved_to(self, step: int) -> None:
        self._looked_at_seconds = self._clock()
        self._looked_at_step = step
        self._look_at_step = step + 1

    def _outlook(self, step: int) -> tuple[bool, int]:
        """Whether a checkpoint is due at `step`, and the step to look at next; counts on rank 0 only."""
        now_seconds = self._clock()
        # The first step that is seen is taken for the first of the run.
        num_steps = 1 if self._looked_at_step is None else max(1, step - self._looked_at_step)
        step_seconds = (now_seconds - self._looked_at_seconds) / num_steps
        self._looked_at_seconds, self._looked_at_step = now_seconds, step
        rest_seconds = self.interval_seconds - (now_seconds - self._saved_at_seconds)
        if rest_seconds <= step_seconds / 2:
            return True, step + 1
        steps_ahead = int(rest_seconds / step_seconds / 2) if step_seconds > 0 else self.LONGEST_LOOK_AHEAD
        return False, step + min(max(1, steps_ahead), self.LONGEST_LOOK_AHEAD)
