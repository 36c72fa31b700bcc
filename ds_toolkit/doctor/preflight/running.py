"""One command that asks one host: what it prints is read while it comes, and it is ended when it is late."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ds_toolkit.doctor.preflight.carrying import Command
from ds_toolkit.doctor.preflight.fleet import Clock
from ds_toolkit.doctor.preflight.probe import MARK

_MOST_BYTES = 2**23
_NOISE_LINES = 20
# What pdsh and ssh say of their own limits, which end more politely than ours.
_TIMED_OUT = re.compile(r"command timeout|[Cc]onnection timed out|timed out during banner")
_GRACE_SECONDS = 1.0
_LOOK_UP_SECONDS = 0.2


@dataclass(frozen=True)
class Reply:
    """What came back from one command.

    Attributes:
        answers: objects behind the probe's mark, in order.
        clock: of the far side, from the first of them.
        noise: the last other lines, such as what ssh has to say.
        timed_out: whether it was ended for being late.
        exit_code: of what was started here.
    """

    answers: tuple[Mapping[str, object], ...]
    clock: Clock | None
    noise: tuple[str, ...]
    timed_out: bool
    exit_code: int


def run_command(command: Command, timeout_seconds: float, stop: threading.Event | None = None) -> Reply:
    """Run a command, and end it and its children when it is late, or when `stop` is set."""
    stop = stop or threading.Event()
    started, deadline = time.time(), time.monotonic() + timeout_seconds + _GRACE_SECONDS
    ours, theirs = os.pipe()
    try:
        process = subprocess.Popen(
            command.arguments,
            env={**os.environ, **command.environment},
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
    except OSError as error:
        os.close(ours)
        return Reply((), None, (f"{command.arguments[0]}: {error.strerror}",), False, 255)
    finally:
        os.close(theirs)
    reading = _Reading(started)
    try:
        late = not _read_until(ours, deadline, reading, stop)
    finally:
        os.close(ours)
        # If it has said all, it ends by itself. Not reaped yet, its number is nobody else's.
        while not _has_ended(process.pid) and not stop.is_set() and time.monotonic() < deadline:
            time.sleep(_LOOK_UP_SECONDS / 10)
        _kill_all(process.pid)
        exit_code = process.wait()
    late = late or any(_TIMED_OUT.search(line) for line in reading.noise)
    return Reply(tuple(reading.answers), reading.clock, tuple(reading.noise), late, exit_code)


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill_all(leader: int) -> None:
    """End a process group and what descends from it: pdsh gives each ssh a session of its own."""
    descendants, found = [], [leader]
    while found:
        pid = found.pop()
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += [int(child) for child in children.read_text().split()]
        descendants.append(pid)
    for pid in descendants[1:]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _read_until(descriptor: int, deadline: float, reading: _Reading, stop: threading.Event) -> bool:
    """Whether everything was read before the deadline."""
    rest, total_bytes = b"", 0
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while total_bytes < _MOST_BYTES:
            if stop.is_set() or time.monotonic() > deadline:
                return False
            if not selector.select(_LOOK_UP_SECONDS):
                continue
            chunk = os.read(descriptor, 2**16)
            total_bytes += len(chunk)
            *lines, rest = (rest + chunk).split(b"\n")
            for line in [*lines, rest] if not chunk else lines:
                reading.take(line.decode(errors="replace").strip())
            if not chunk:
                return True
    return True


class _Reading:
    """What is made of the lines of one command."""

    def __init__(self, started: float) -> None:
        self.answers: list[Mapping[str, object]] = []
        self.clock: Clock | None = None
        self.noise: deque[str] = deque(maxlen=_NOISE_LINES)
        self._started = started

    def take(self, line: str) -> None:
        if not line.startswith(MARK):
            if line:
                self.noise.append(line)
            return
        with contextlib.suppress(ValueError, RecursionError):
            answer = json.loads(line[len(MARK) :])
            if isinstance(answer, dict):
                self.answers.append(answer)
                told = answer.get("clock_seconds")
                if self.clock is None and isinstance(told, (int, float)):
                    # It was told after we had begun to ask, and before it came.
                    self.clock = Clock(told - time.time(), told - self._started)
