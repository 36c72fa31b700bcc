"""One run at a time writes into a checkpoint directory.

The writer holds a POSIX lock on `<dir>/.ds_toolkit.lock`. The kernel, or the server of a network file system,
lets go of it when the process dies, however it dies, and a child of the process does not inherit it.

The guardian outlives the writer and holds `<dir>/.ds_toolkit.guardian.lock` until its last words are over: a
run that has taken the directory waits for it (`wait_for_guardian`) before it looks for checkpoints.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import ClassVar

from ds_toolkit.errors import ToolkitError
from ds_toolkit.files import make_directory

LOCK_NAME = ".ds_toolkit.lock"
GUARDIAN_LOCK_NAME = ".ds_toolkit.guardian.lock"


class Ownership:
    """The right to write into a directory, held until `release` or the end of the process."""

    _held: ClassVar[set[Path]] = set()

    def __init__(self, path: Path, descriptor: int | None) -> None:
        self._path = path
        self._descriptor = descriptor
        # POSIX locks never stand between two threads or objects of one process.
        self._held.add(path)

    @classmethod
    def acquire(
        cls, directory: Path, patience_seconds: float = 10.0, lock_name: str = LOCK_NAME
    ) -> Ownership:
        """Take the directory, which is made if it does not exist.

        Args:
            directory: the checkpoint directory.
            patience_seconds: how long to wait for a run that is about to end.
            lock_name: which right: that of the run, or of its guardian (`GUARDIAN_LOCK_NAME`).

        Raises:
            ToolkitError: another run holds it.
        """
        make_directory(directory)
        path = directory.resolve() / lock_name
        if path in cls._held:
            raise _taken(directory, "another guard of this very process; close it first")
        deadline = time.monotonic() + patience_seconds
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                holder = _holder(descriptor)
                os.close(descriptor)
                if time.monotonic() > deadline:
                    raise _taken(directory, holder) from None
                time.sleep(0.2)
                continue
            except OSError:
                # A file system without locks: all that is known there is what this process does.
                os.close(descriptor)
                return cls(path, None)
            if _is_still_there(path, descriptor):
                _sign(descriptor)
                return cls(path, descriptor)
            # The last holder removed the file between our opening and our locking it.
            os.close(descriptor)

    def release(self) -> None:
        """Let others write; doing it twice does nothing."""
        self._held.discard(self._path)
        if self._descriptor is None:
            return
        with contextlib.suppress(OSError):
            # Before the lock is gone, so that nobody can hold a file that is about to vanish.
            self._path.unlink()
        os.close(self._descriptor)
        self._descriptor = None


def wait_for_guardian(directory: Path, patience_seconds: float) -> None:
    """Return when no guardian of an earlier run writes into a directory; for the run that has just taken it.

    Raises:
        ToolkitError: one still does.
    """
    try:
        guardian = Ownership.acquire(directory, patience_seconds, GUARDIAN_LOCK_NAME)
    except ToolkitError as error:
        raise ToolkitError(
            "the guardian of an earlier run is still writing its last checkpoint",
            where=directory,
            why=error.why,
            fix="wait until it has ended; what it writes may be the newest checkpoint",
        ) from error
    guardian.release()


def _sign(descriptor: int) -> None:
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(owner).encode(), 0)


def _holder(descriptor: int) -> str:
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {owner['pid']} on {owner['host']}, since {owner['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "a process that has not signed yet"


def _is_still_there(path: Path, descriptor: int) -> bool:
    try:
        return path.stat().st_ino == os.fstat(descriptor).st_ino
    except OSError:
        return False


def _taken(directory: Path, holder: str) -> ToolkitError:
    return ToolkitError(
        "another run writes into this checkpoint directory",
        where=directory,
        why=holder,
        fix="end that run, or give another directory",
    )
