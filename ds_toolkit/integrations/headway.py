"""How far a job has come, seen from outside: its newest checkpoints, and what its guardians wrote down."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ds_toolkit.checkpoint.incident import incidents
from ds_toolkit.checkpoint.newest import survey
from ds_toolkit.errors import ToolkitError
from ds_toolkit.guardian.arenas import arenas
from ds_toolkit.guardian.processes import parent_of

_DEADLINE_SECONDS = 25.0


@dataclass(frozen=True)
class Headway:
    """A moment of a job.

    Attributes:
        steps: checkpoint directory -> step of the newest checkpoint that looks whole there.
        failed_at: newest step that all ranks had done when the last attempt failed; None if nobody knows.
    """

    steps: dict[Path, int] = field(default_factory=dict)
    failed_at: int | None = None

    @property
    def step(self) -> int | None:
        """The newest checkpoint's step; None if there is none."""
        return max(self.steps.values(), default=None)

    def is_beyond(self, earlier: Headway) -> bool:
        """Whether a directory has a newer checkpoint than it had."""
        return any(step > earlier.steps.get(directory, 0) for directory, step in self.steps.items())


class Lookout:
    """Finds out where a job writes, and looks there.

    Attributes:
        deadline_seconds: the longest time that a guardian of the job has for last words.
    """

    def __init__(self, directories: Iterable[Path] = ()) -> None:
        """
        Args:
            directories: checkpoint directories that are known; those of guards are found by themselves.
        """
        self.deadline_seconds = _DEADLINE_SECONDS
        self._directories = {directory.absolute() for directory in directories}
        self._seen: set[Path] = set()

    def look_for_arenas(self) -> None:
        """Notice where the job's guards write: arenas whose guardians this process has adopted."""
        for arena in arenas():
            guardian = arena.guardian()
            if arena.folder in self._seen or guardian is None or parent_of(guardian[0]) != os.getpid():
                continue
            try:
                job = arena.job()
            except ToolkitError:
                continue
            self._seen.add(arena.folder)
            self._directories.add(job.directory)
            self.deadline_seconds = max(self.deadline_seconds, job.deadline_seconds)

    def headway(self, since: datetime.datetime) -> Headway:
        """Where the job stands now; `since`: when the last attempt began."""
        steps: dict[Path, int] = {}
        failed_at: list[int] = []
        for directory in sorted(self._directories):
            # A file system that is away for a moment is no reason to give the job up.
            with contextlib.suppress(OSError):
                candidates, _ = survey(directory)
                if candidates:
                    steps[directory] = candidates[0].step
                failed_at += [
                    incident.last_step
                    for incident in incidents(directory)
                    if incident.last_step is not None and incident.when >= since
                ]
        return Headway(steps, max(failed_at, default=None))
