"""A command and all that comes of it: started, told to end, waited for, its guardians last.

The process that uses this adopts what loses its parent (Linux: a child subreaper), as process 1 of a
container does anyway. So a guardian, which leaves its family by two forks, becomes a child here and can be
waited for.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ds_toolkit.errors import ToolkitError
from ds_toolkit.guardian.processes import parent_of

POLL_SECONDS = 0.1
_PR_SET_CHILD_SUBREAPER = 36
_KILL_SECONDS = 10.0
_MARK = "DS_TOOLKIT_RUN"
_GUARDIAN = "ds_toolkit.guardian"


def adopt_orphans() -> None:
    """Become the parent of descendants that lose theirs; where the kernel cannot do it, nothing changes."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Descendants:
    """A running command, in a session of its own, and the processes that it leaves behind."""

    def __init__(self, command: Sequence[str], stdout: int | None = None) -> None:
        """Start the command.

        Args:
            command: program and arguments.
            stdout: descriptor that is its standard output; None for ours.

        Raises:
            ToolkitError: it cannot be started.
        """
        self._mark = uuid.uuid4().hex
        self._exit_code: int | None = None
        try:
            self._process = subprocess.Popen(
                list(command), env={**os.environ, _MARK: self._mark}, stdout=stdout, start_new_session=True
            )
        except OSError as error:
            why = error.strerror or str(error)
            raise ToolkitError("the command cannot be started", where=command[0], why=why) from error

    def signal(self, number: int) -> None:
        """Send a signal to the command and to what is in its session's first group, as a terminal does.

        DeepSpeed's launcher alone would not pass it on to the processes below it.
        """
        if self._exit_code is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def wait(self, meanwhile: Callable[[], None]) -> int:
        """Until the command itself has ended; its exit code as a shell tells it (128 + N for signal N).

        Args:
            meanwhile: called ten times a second.
        """
        while True:
            meanwhile()
            self.reap()
            if self._exit_code is not None:
                return self._exit_code
            time.sleep(POLL_SECONDS)

    def reap(self) -> None:
        """Take notice of all children that have ended, adopted ones too."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
                pid, status = ended
                if pid == self._process.pid:
                    code = os.waitstatus_to_exitcode(status)
                    self._process.returncode = code
                    self._exit_code = code if code >= 0 else 128 - code

    def end_leftovers(self, grace_seconds: float) -> int:
        """End what the command has left behind, guardians excepted: SIGTERM, SIGKILL after a while.

        What not even SIGKILL ends within another while, waiting for a device, stays.

        Returns:
            How many processes were told to end.
        """
        told: set[int] = set()
        deadline = time.monotonic() + grace_seconds
        while (left := self._leftovers()) and time.monotonic() < deadline + _KILL_SECONDS:
            is_late = time.monotonic() > deadline
            for pid in left:
                if is_late or pid not in told:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL if is_late else signal.SIGTERM)
            told.update(left)
            time.sleep(POLL_SECONDS)
            self.reap()
        return len(told)

    def guardians(self) -> list[int]:
        """Process ids of the guardians that are our children by now."""
        self.reap()
        return [pid for pid in _children() if _GUARDIAN in _words(pid, "cmdline")]

    def _leftovers(self) -> list[int]:
        # Process 1 of a container also gets orphans of others, such as of `docker exec`.
        mark = f"{_MARK}={self._mark}"
        return [pid for pid in _children() if mark in _words(pid, "environ")]


def _children() -> Iterator[int]:
    ourselves = os.getpid()
    for path in Path("/proc").iterdir():
        if path.name.isdecimal() and parent_of(int(path.name)) == ourselves:
            yield int(path.name)


def _words(pid: int, file: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
