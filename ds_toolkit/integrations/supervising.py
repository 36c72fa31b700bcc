"""A job that is started again until it is done, or until starting it again is of no use."""

from __future__ import annotations

import datetime
import itertools
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ds_toolkit.integrations.descendants import POLL_SECONDS, Descendants, adopt_orphans
from ds_toolkit.integrations.headway import Headway, Lookout
from ds_toolkit.units import counted, format_seconds

DEFAULT_MAX_RESTARTS = 10
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 60.0
_ARENA_LOOK_SECONDS = 0.5
# A guardian that is over stays while ranks are there, at most a minute, and then has its log to write.
_GUARDIAN_END_SECONDS = 90.0
# Longer than launchers wait between SIGTERM and SIGKILL.
_LEFTOVER_SECONDS = 35.0
_STOPPED_BY = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Attempt:
    """One start of the job, from its beginning until its guardians had ended.

    Attributes:
        exit_code: of the command, as a shell tells it (128 + N for signal N).
        seconds: how long all took.
        headway: where the job stood at the end.
    """

    exit_code: int
    seconds: float
    headway: Headway

    def failed_like(self, other: Attempt) -> bool:
        """Whether both failed at the same step in the same way."""
        return (self.exit_code, self.headway) == (other.exit_code, other.headway)


@dataclass(frozen=True)
class Supervised:
    """How it ended.

    Attributes:
        exit_code: for the supervisor to end with.
        attempts: the first one first.
        why: why there was no further attempt.
    """

    exit_code: int
    attempts: tuple[Attempt, ...]
    why: str


def why_not_again(attempts: Sequence[Attempt], max_restarts: int) -> str | None:
    """Why the job is not started again; None if it is."""
    last = attempts[-1]
    if last.exit_code == 0:
        return "it is done"
    if len(attempts) > 1 and last.failed_like(attempts[-2]):
        step = last.headway.failed_at if last.headway.failed_at is not None else last.headway.step
        at = "before its first checkpoint" if step is None else f"at step {step}"
        return f"it failed twice in the same way {at}, with exit code {last.exit_code}"
    if len(attempts) > max_restarts:
        return f"there are no restarts left of {max_restarts}"
    return None


def pauses(attempts: Sequence[Attempt]) -> float:
    """Seconds to wait before the next start: 1 after progress, then 2, 4 and so on up to 60."""
    pause_seconds = _FIRST_PAUSE_SECONDS
    for earlier, later in itertools.pairwise(attempts):
        progressed = later.headway.is_beyond(earlier.headway)
        pause_seconds = _FIRST_PAUSE_SECONDS if progressed else 2 * pause_seconds
    return min(pause_seconds, _LONGEST_PAUSE_SECONDS)


class Supervisor:
    """Runs a command until it ends well. For the main thread: it listens to signals."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        max_restarts: int = DEFAULT_MAX_RESTARTS,
        directories: Iterable[Path] = (),
        stdout: int | None = None,
        say: Say = print,
    ) -> None:
        """
        Args:
            command: program and arguments.
            max_restarts: how often it is started again at most.
            directories: checkpoint directories, besides those of the job's guards.
            stdout: descriptor that is the command's standard output; None for ours.
            say: hears a line for all that happens.
        """
        self._command = command
        self._max_restarts = max_restarts
        self._lookout = Lookout(directories)
        self._stdout = stdout
        self._say = say
        self._running: Descendants | None = None
        self._stopped_by: int | None = None

    def run(self) -> Supervised:
        """Start, wait, start again.

        Raises:
            ToolkitError: the command cannot be started.
        """
        adopt_orphans()
        attempts: list[Attempt] = []
        with self._listening():
            while True:
                attempts.append(self._attempt(len(attempts) + 1))
                why = self._why_to_stop(attempts)
                if why is None:
                    self._pause(attempts)
                    why = self._why_to_stop(attempts)
                if why is not None:
                    self._say(f"not started again: {why}")
                    stopped = self._stopped_by
                    exit_code = attempts[-1].exit_code if stopped is None else 128 + stopped
                    return Supervised(exit_code, tuple(attempts), why)

    def _why_to_stop(self, attempts: Sequence[Attempt]) -> str | None:
        if self._stopped_by is not None:
            return f"told to end by {signal.Signals(self._stopped_by).name}"
        return why_not_again(attempts, self._max_restarts)

    def _attempt(self, number: int) -> Attempt:
        began_at, began = datetime.datetime.now(datetime.timezone.utc), time.monotonic()
        self._running = job = Descendants(self._command, self._stdout)
        if self._stopped_by is not None:
            # It came before there was anybody to pass it on to.
            job.signal(self._stopped_by)
        exit_code = job.wait(self._looking())
        self._clear(job)
        self._running = None
        headway = self._lookout.headway(began_at)
        attempt = Attempt(exit_code, time.monotonic() - began, headway)
        step = "no checkpoint is known" if headway.step is None else f"newest checkpoint: step {headway.step}"
        after = format_seconds(attempt.seconds)
        self._say(f"attempt {number} ended with exit code {exit_code} after {after}; {step}")
        return attempt

    def _looking(self) -> Callable[[], None]:
        next_look = time.monotonic()

        def look() -> None:
            nonlocal next_look
            if time.monotonic() >= next_look:
                self._lookout.look_for_arenas()
                next_look = time.monotonic() + _ARENA_LOOK_SECONDS

        return look

    def _clear(self, job: Descendants) -> None:
        """Until nothing of the job is left on this node: processes without a launcher, then guardians."""
        self._lookout.look_for_arenas()
        num_ended = job.end_leftovers(max(_LEFTOVER_SECONDS, self._lookout.deadline_seconds + 10))
        if num_ended:
            self._say(f"processes that the command had left behind, and that were ended: {num_ended}")
        patience_seconds = self._lookout.deadline_seconds + _GUARDIAN_END_SECONDS
        deadline = time.monotonic() + patience_seconds
        told = False
        while guardians := job.guardians():
            self._lookout.look_for_arenas()
            if time.monotonic() > deadline:
                self._say(f"the guardian has not ended in {format_seconds(patience_seconds)}: {guardians}")
                return
            if not told:
                self._say("waiting for the guardian")
                told = True
            time.sleep(POLL_SECONDS)

    def _pause(self, attempts: Sequence[Attempt]) -> None:
        pause_seconds = pauses(attempts)
        left = self._max_restarts - len(attempts)
        self._say(f"starting again in {format_seconds(pause_seconds)}; {counted(left, 'restart')} left then")
        deadline = time.monotonic() + pause_seconds
        while self._stopped_by is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    @contextmanager
    def _listening(self) -> Iterator[None]:
        old = {number: signal.signal(number, self._stop) for number in _STOPPED_BY}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def _stop(self, number: int, _: object) -> None:
        self._stopped_by = self._stopped_by or number
        if self._running is not None:
            self._running.signal(number)
