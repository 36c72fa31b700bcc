"""What a rank has of the guardian: it starts it, tells it what happens, and hears what came of it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ds_toolkit
from ds_toolkit.errors import ToolkitError
from ds_toolkit.guardian.addresses import short_address
from ds_toolkit.guardian.arena import Arena

_START_SECONDS = 30.0
_LOG_LINES = 20
_RECEIVE_BYTES = 65536
# Preloaded libraries, profilers and the like belong to the training and would make the guardian heavy.
_PASSED_ON = ("PATH", "HOME", "TMPDIR", "TZ", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONHOME")
_ALSO_PASSED_ON = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")


class GuardianGoneError(ToolkitError):
    """The guardian has ended, or never listened. Training can go on; a new one can be started."""


class GuardianClient:
    """A rank's connection to the guardian of its node.

    Any thread may send and receive. A program that the rank runs does not inherit the connection, and in a
    forked child (a data loading worker) it is closed: the guardian takes its end for the end of the rank.
    """

    def __init__(self, socket_path: Path) -> None:
        """Connect.

        Raises:
            GuardianGoneError: nobody listens there.
        """
        self._path = socket_path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._received = bytearray()
        try:
            with short_address(socket_path) as address:
                self._socket.connect(address)
        except OSError as error:
            self._socket.close()
            raise self._gone(error.strerror) from error
        _clients.add(self)

    def send(self, event: Mapping[str, Any]) -> None:
        """Tell the guardian something: `{"event": "hello", "rank": 0, "pid": 4711}`.

        Raises:
            GuardianGoneError: it does not hear any more.
        """
        try:
            with self._sending:
                self._socket.sendall(json.dumps(event).encode() + b"\n")
        except OSError as error:
            raise self._gone(error.strerror) from error

    def receive(self, timeout_seconds: float) -> dict[str, Any] | None:
        """The next event that the guardian sent; None if there is none within the time.

        Raises:
            GuardianGoneError: it has ended, and all that it had said before was received.
        """
        deadline = time.monotonic() + timeout_seconds
        with self._receiving:
            while b"\n" not in self._received:
                if not self._wait(deadline - time.monotonic()):
                    return None
                self._receive_more()
            line, _, rest = bytes(self._received).partition(b"\n")
            self._received[:] = rest
        event: dict[str, Any] = json.loads(line)
        return event

    def close(self) -> None:
        """End the connection; without `goodbye` before it, the guardian goes on watching the process."""
        self._socket.close()

    def _wait(self, timeout_seconds: float) -> bool:
        # Not select(), which knows no descriptor above 1023: a training process may have many.
        poller = select.poll()
        try:
            poller.register(self._socket, select.POLLIN)
            return bool(poller.poll(max(0.0, timeout_seconds) * 1000))
        except (OSError, ValueError) as error:
            raise self._gone("the connection is closed") from error

    def _receive_more(self) -> None:
        try:
            received = self._socket.recv(_RECEIVE_BYTES)
        except OSError as error:
            raise self._gone(error.strerror) from error
        if not received:
            raise self._gone("it has ended")
        self._received += received

    def _gone(self, why: str | None) -> GuardianGoneError:
        return GuardianGoneError("the guardian is not there", where=self._path, why=why)


_clients: weakref.WeakSet[GuardianClient] = weakref.WeakSet()


def _close_in_child() -> None:
    # Only the descriptor: shutting the connection down would end it for the parent too.
    for client in list(_clients):
        client.close()


os.register_at_fork(after_in_child=_close_in_child)


def start_guardian(arena: Arena) -> None:
    """Start the guardian of an arena, or find that it has one; when this returns, it listens.

    By exec and never by a plain fork: the process that calls has threads, and perhaps a GPU.

    Raises:
        ToolkitError: it did not start, with what it said.
    """
    try:
        exit_code, said = _run_starter(arena)
    except OSError as error:
        raise ToolkitError("the guardian cannot be started", where=arena.folder, why=str(error)) from error
    if exit_code != 0:
        why = "\n".join(filter(None, [said.strip(), _tail(arena.log_path)]))
        raise ToolkitError("the guardian cannot be started", where=arena.folder, why=why)


def _run_starter(arena: Arena) -> tuple[int, str]:
    """Exit code, and what was said, of the process that leaves the guardian behind."""
    command = [sys.executable, "-S", "-m", "ds_toolkit.guardian", os.fspath(arena.folder)]
    with subprocess.Popen(
        command,
        env=_environment(),
        # The directory of a `-m` command is searched for modules: nobody's json.py may be found there.
        cwd=arena.folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            _, said = process.communicate(timeout=_START_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            _, said = process.communicate()
            said += f"not ready within {_START_SECONDS:.0f} s".encode()
    return process.returncode, said.decode(errors="replace")


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in (*_PASSED_ON, *_ALSO_PASSED_ON) if name in os.environ}
    # Also where the package is found by a search path of the training script alone.
    home = Path(ds_toolkit.__path__[0]).resolve().parent
    # One heap for all threads: each other one would keep memory of its own.
    return {**kept, "PYTHONPATH": os.fspath(home), "PYTHONSAFEPATH": "1", "MALLOC_ARENA_MAX": "1"}


def _tail(log_path: Path) -> str:
    with contextlib.suppress(OSError):
        return "\n".join(log_path.read_text(errors="replace").splitlines()[-_LOG_LINES:])
    return ""
