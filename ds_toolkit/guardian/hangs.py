"""When nothing moves any more on a node, and when it does again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum

from ds_toolkit.guardian.control import Phase
from ds_toolkit.guardian.ranks import LocalRank
from ds_toolkit.guardian.settling import movements

LEAST_SECONDS = 60.0
"""`auto` takes nothing shorter for a hang."""
STEPS = 10
"""Nor anything shorter than so many median steps."""
UNMEASURED_SECONDS = 600.0
"""What `auto` is before a step was timed."""

IN_A_STEP = frozenset({Phase.FORWARD, Phase.BACKWARD, Phase.STEP})
"""Where ranks wait for each other, and where no program does anything else."""
_KEPT_STEPS = 101
# One rank in it is enough: it has not begun, or says that it takes its time.
_EXCUSES = frozenset({Phase.ATTACHED, Phase.BUSY})
# All ranks are in it, and it takes as long as the disk needs.
_LONG = frozenset({Phase.SAVE, Phase.LOAD, Phase.IDLE})
# A longer time between two looks was none in which anything could have moved: the machine was asleep, or the
# whole job, the guardian included, was stopped.
_LONGEST_LOOK_SECONDS = 5.0


class Change(Enum):
    """What a look has found."""

    HANGS = "hangs"
    MOVES = "moves"


class HangWatch:
    """Looks at the pages of a node's ranks. It begins with the first one: after a rank's first step."""

    def __init__(
        self,
        ranks: Mapping[int, LocalRank],
        hang_after_seconds: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            ranks: of this node.
            hang_after_seconds: how long nothing may move; None for `auto`.
            clock: for tests.
        """
        self._ranks = ranks
        self._given_seconds = hang_after_seconds
        self._clock = clock
        self._looked = clock()
        self._seen: list[tuple[object, ...]] = []
        self._step: int | None = None
        self._step_at = 0.0
        self._step_seconds: deque[float] = deque(maxlen=_KEPT_STEPS)
        self.still_seconds = 0.0
        self.hangs = False

    @property
    def hang_after_seconds(self) -> float:
        """How long nothing may move."""
        if self._given_seconds is not None:
            return self._given_seconds
        if not self._step_seconds:
            return UNMEASURED_SECONDS
        # Not by `statistics`, which would load megabytes into the guardian.
        median_seconds = sorted(self._step_seconds)[len(self._step_seconds) // 2]
        return max(LEAST_SECONDS, STEPS * median_seconds)

    def look(self) -> Change | None:
        """Look again; what has changed since the last time.

        `still_seconds` says for how long nothing has moved; with `MOVES`, for how long nothing had.
        """
        now = self._clock()
        passed_seconds = min(now - self._looked, _LONGEST_LOOK_SECONDS)
        self._looked = now
        seen = movements(list(self._ranks.values()))
        if seen != self._seen:
            self._seen = seen
            self._time_steps(now)
            if self.hangs:
                self.hangs = False
                return Change.MOVES
            self.still_seconds = 0.0
            return None
        self.still_seconds = 0.0 if self._is_busy() else self.still_seconds + passed_seconds
        if not self.hangs and self.still_seconds > self.hang_after_seconds:
            self.hangs = True
            return Change.HANGS
        return None

    def _phases(self) -> list[Phase]:
        return [
            known.page.phase for known in self._ranks.values() if known.is_running and known.page is not None
        ]

    def _is_busy(self) -> bool:
        """Whether what takes long now may take long."""
        phases = self._phases()
        nobody_yet = len(self._seen) == 0 or any(known.page is None for known in self._ranks.values())
        return nobody_yet or not _EXCUSES.isdisjoint(phases) or all(phase in _LONG for phase in phases)

    def _time_steps(self, now: float) -> None:
        """By the step that all ranks have done, which is all that a look twice a second can see."""
        steps = [known.page.step for known in self._ranks.values() if known.page is not None]
        step = min(steps, default=None) if len(steps) == len(self._ranks) else None
        if step is None or step == self._step:
            return
        if self._step is not None and step > self._step:
            self._step_seconds.append((now - self._step_at) / (step - self._step))
        self._step, self._step_at = step, now
