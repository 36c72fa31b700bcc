"""When the next periodic checkpoint is due, decided the same way on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from ds_toolkit.config.guard_settings import AUTO, GuardSettings
from ds_toolkit.errors import ToolkitError
from ds_toolkit.plan.failures import Expectation, Failure, expected_failures
from ds_toolkit.plan.interval import Interval, Saving, plan_interval
from ds_toolkit.resilience import agreement
from ds_toolkit.resilience.reporting import logger
from ds_toolkit.units import format_seconds


class Cadence(Protocol):
    """Asked once after every optimizer step, on every rank."""

    def due(self, step: int) -> bool:
        """Whether to save now; the same answer on every rank."""

    def saved(self, step: int) -> None:
        """A checkpoint of this step was committed or given up, on schedule or not."""

    def moved_to(self, step: int) -> None:
        """The run goes on from this step, which may be an earlier one than it was at."""

    def observe(self, *, stall_seconds: float, write_seconds: float) -> None:
        """A save kept the loop waiting for so long, and went on being written behind it for so long.

        Of a save that was all waiting, `write_seconds` is 0. Not collective; what rank 0 observes counts.
        """


def no_failures() -> Sequence[Failure]:
    """The failures of a directory that keeps no record of them."""
    return ()


def cadence_for(
    settings: GuardSettings,
    *,
    failures: Callable[[], Sequence[Failure]] = no_failures,
    since_seconds: float | None = None,
) -> Cadence:
    """The cadence that `save_every` asks for.

    Args:
        settings: of the guard.
        failures: gives those that the directory has a record of; called on rank 0, for `auto` alone.
        since_seconds: when the record begins, in seconds since 1970; None for now.
    """
    if settings.save_every == AUTO:
        return AutoInterval(
            settings,
            num_gpus=agreement.world_size(),
            decides=agreement.rank() == 0,
            failures=failures,
            since_seconds=since_seconds,
        )
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

    def observe(self, *, stall_seconds: float, write_seconds: float) -> None:
        pass


class Outlook(NamedTuple):
    """What rank 0 tells the others at a look.

    Attributes:
        due: whether a checkpoint is due at this step.
        look_at_step: the step to look at next.
        interval_seconds: the interval that holds from now on.
    """

    due: bool
    look_at_step: int
    interval_seconds: float


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
        broadcast: Callable[[Outlook], Outlook] = agreement.broadcast,
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
        due, self._look_at_step, self.interval_seconds = self._broadcast(self._outlook(step))
        return due

    def saved(self, step: int) -> None:
        self._saved_at_seconds = self._clock()
        self.moved_to(step)

    def moved_to(self, step: int) -> None:
        self._looked_at_seconds = self._clock()
        self._looked_at_step = step
        self._look_at_step = step + 1

    def observe(self, *, stall_seconds: float, write_seconds: float) -> None:
        pass

    def _interval(self, step_seconds: float) -> float:  # noqa: ARG002  (for cadences that reconsider)
        """The interval that holds from now on, in seconds; counts on rank 0 only."""
        return self.interval_seconds

    def _outlook(self, step: int) -> Outlook:
        """What is to be told at `step`; counts on rank 0 only."""
        now_seconds = self._clock()
        # The first step that is seen is taken for the first of the run.
        num_steps = 1 if self._looked_at_step is None else max(1, step - self._looked_at_step)
        step_seconds = (now_seconds - self._looked_at_seconds) / num_steps
        self._looked_at_seconds, self._looked_at_step = now_seconds, step
        interval_seconds = self._interval(step_seconds)
        rest_seconds = interval_seconds - (now_seconds - self._saved_at_seconds)
        if rest_seconds <= step_seconds / 2:
            return Outlook(True, step + 1, interval_seconds)
        steps_ahead = int(rest_seconds / step_seconds / 2) if step_seconds > 0 else self.LONGEST_LOOK_AHEAD
        look_at_step = step + min(max(1, steps_ahead), self.LONGEST_LOOK_AHEAD)
        return Outlook(False, look_at_step, interval_seconds)


class AutoInterval(EverySeconds):
    """The interval that costs the least, by what saves and failures cost in this run.

    `FIRST_SECONDS` until a save has been measured. Then rank 0 reconsiders at the first look after each
    save and tells the others with the look: no collective is added. The optimum is flat, so the interval
    stays what it is until another is better by more than `WORTH_CHANGING`; each change is logged with its
    reason.

    The cost of a save is its stall, and `SLOWDOWN` of the time that it is written behind the loop; both are
    averages in which the newest save counts for `NEWEST_WEIGHT`. Failures are those of the directory, with
    the assumption for this number of GPUs as one failure more (`plan.failures`); `mttf` overrules them.
    Nothing above `LONGEST_SECONDS` is chosen, however rare failures are: last words may fail too.
    """

    FIRST_SECONDS = 600.0
    LONGEST_SECONDS = 7200.0
    WORTH_CHANGING = 0.1
    NEWEST_WEIGHT = 0.25
    # An assumption: where every step runs beside a write, nothing is left to compare with.
    SLOWDOWN = 0.05
    # Below the resolution of what a step takes; an interval of nothing has no optimum.
    _LEAST_STALL_SECONDS = 1e-3

    def __init__(
        self,
        settings: GuardSettings,
        *,
        num_gpus: int,
        decides: bool,
        failures: Callable[[], Sequence[Failure]] = no_failures,
        since_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        broadcast: Callable[[Outlook], Outlook] = agreement.broadcast,
    ) -> None:
        """Begin; `decides` is true on rank 0 alone."""
        super().__init__(self.FIRST_SECONDS, clock=clock, broadcast=broadcast)
        self._settings = settings
        self._num_gpus = num_gpus
        self._decides = decides
        self._failures = failures
        self._seen: Sequence[Failure] = ()
        self._wall_clock = wall_clock
        self._since_seconds = wall_clock() if since_seconds is None else since_seconds
        self._stall_seconds: float | None = None
        self._write_seconds = 0.0
        self._is_reconsidered = True
        self._is_measured = False

    def observe(self, *, stall_seconds: float, write_seconds: float) -> None:
        if self._stall_seconds is None:
            self._stall_seconds, self._write_seconds = stall_seconds, write_seconds
        else:
            self._stall_seconds += self.NEWEST_WEIGHT * (stall_seconds - self._stall_seconds)
            self._write_seconds += self.NEWEST_WEIGHT * (write_seconds - self._write_seconds)
        self._is_reconsidered = False

    def _interval(self, step_seconds: float) -> float:
        if not self._decides or self._is_reconsidered or self._stall_seconds is None:
            return self.interval_seconds
        self._is_reconsidered = True
        expected = self._expected()
        saving = Saving(
            stall_seconds=max(self._stall_seconds, self._LEAST_STALL_SECONDS),
            mttf_seconds=expected.mttf_seconds,
            write_seconds=self._write_seconds,
            slowdown=self.SLOWDOWN,
            step_seconds=max(0.0, step_seconds),
            caught_share=expected.caught_share,
            last_words_seconds=self._write_seconds,
            budget=self._settings.overhead_budget,
            longest_seconds=self.LONGEST_SECONDS,
        )
        best = plan_interval(saving)
        change = abs(best.seconds / self.interval_seconds - 1)
        if self._is_measured and change <= self.WORTH_CHANGING:
            return self.interval_seconds
        self._is_measured = True
        logger.info("%s", self._in_words(best, saving, expected))
        return best.seconds

    def _expected(self) -> Expectation:
        try:
            self._seen = self._failures()
        except (ToolkitError, OSError) as error:
            # The other ranks wait for the word of this one; an old list is near enough.
            logger.warning("the failures of this directory cannot be read: %s", error)
        return expected_failures(
            self._seen,
            num_gpus=self._num_gpus,
            since_seconds=self._since_seconds,
            now_seconds=self._wall_clock(),
            mttf_seconds=self._settings.mttf_seconds,
            last_words=self._settings.takes_snapshots,
        )

    def _in_words(self, best: Interval, saving: Saving, expected: Expectation) -> str:
        text = (
            f"a checkpoint every {format_seconds(best.seconds)} from now on, not"
            f" {format_seconds(self.interval_seconds)}: a save costs {format_seconds(saving.cost_seconds)}"
        )
        if saving.write_seconds:
            waiting, writing = format_seconds(saving.stall_seconds), format_seconds(saving.write_seconds)
            text += f" ({waiting} of waiting, and {self.SLOWDOWN:.0%} of {writing} of writing)"
        text += f"; {expected.why}"
        if best.bound:
            text += f"; {format_seconds(best.unbounded_seconds)} would be best, but {best.bound}"
        return text if best.warning is None else f"{text}; {best.warning}"
