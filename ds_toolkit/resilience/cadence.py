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
        """A checkpoint of this step was committed, on schedule or not."""


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


class EverySeconds:
    """Due when `interval_seconds` have passed since the last checkpoint, by rank 0's clock.

    Clocks differ between ranks, so rank 0 decides and tells; asking at every step would cost a collective a
    step. Instead all ranks agree on the step at which they look again: half of the steps that the rest of
    the interval should hold, so that a run whose steps become up to twice as slow is still on time.
    """

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
        self._saved_at_step: int | None = None
        self._look_at_step = 0

    def due(self, step: int) -> bool:
        if self._saved_at_step is None:
            # Where this run began: the step before the first one it has seen.
            self._saved_at_step = step - 1
        if step < self._look_at_step:
            return False
        due, self._look_at_step = self._broadcast(self._outlook(step))
        return due

    def saved(self, step: int) -> None:
        self._saved_at_seconds = self._clock()
        self._saved_at_step = step
        self._look_at_step = step + 1

    def _outlook(self, step: int) -> tuple[bool, int]:
        """Whether a checkpoint is due at `step`, and the step to look at next; counts on rank 0 only."""
        assert self._saved_at_step is not None  # noqa: S101  (set by `due`)
        elapsed_seconds = self._clock() - self._saved_at_seconds
        step_seconds = elapsed_seconds / (step - self._saved_at_step)
        rest_seconds = self.interval_seconds - elapsed_seconds
        if rest_seconds < step_seconds / 2:
            return True, step + 1
        return False, step + max(1, int(rest_seconds / step_seconds / 2))
