"""The Python stacks of a rank, asked for from outside, also while its main thread is stuck in a collective.

A handler of Python's own does not run while the main thread waits in C. faulthandler's is plain C and runs at
once; it is put on a real-time signal that nobody listens to, and writes to a file in memory that only the
rank holds open. What the program itself has told faulthandler stays as it is.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import re
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ds_toolkit.guardian.control import StacksOffer
from ds_toolkit.guardian.processes import is_alive, process_state

# Low ones are what programs take first.
_SIGNALS = range(signal.SIGRTMIN + 21, signal.SIGRTMAX - 4)
_PATIENCE_SECONDS = 2.0
_QUIET_SECONDS = 0.1
_LOOK_SECONDS = 0.01
_MAX_BYTES = 256 * 1024
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-fA-F]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?+) in (.*)$')
_STOPPED = {"T": "it is stopped by a signal", "t": "it is stopped by a debugger"}


@dataclass(frozen=True)
class Frame:
    """A line of a stack."""

    file: str
    line: str
    function: str

    def __str__(self) -> str:
        return f'File "{self.file}", line {self.line}, in {self.function}'


@dataclass(frozen=True)
class Stacks:
    """What came of asking a process.

    Attributes:
        text: of all threads, as faulthandler writes it; empty if there is none.
        main: frames of the main thread, the innermost first.
        why_none: why there is no text; empty if there is.
        state: of the process, as `process_state` has it.
    """

    text: str = ""
    main: tuple[Frame, ...] = ()
    why_none: str = ""
    state: str = ""

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped the process."""
        return self.state in _STOPPED


_offer: StacksOffer | None = None


def offer_stacks() -> StacksOffer | None:
    """Let this process write its stacks when it is asked to; None if it cannot be asked.

    Once a process, and for as long as it lives: with the handler gone the signal would end it.
    """
    global _offer
    if _offer is None:
        number = _free_signal()
        if number is None:
            return None
        try:
            descriptor = os.memfd_create("ds_toolkit-stacks")
            # Each writes where the last one has ended, whoever reads meanwhile.
            fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
            faulthandler.register(number, file=descriptor, all_threads=True, chain=False)
        except (OSError, AttributeError, RuntimeError):
            return None
        _offer = StacksOffer(number, descriptor, threading.main_thread().ident or 0)
    return _offer


def stacks_of(processes: Mapping[int, tuple[int, int, StacksOffer | None]]) -> dict[int, Stacks]:
    """Ask processes for their stacks, all at once; takes two seconds at most.

    Args:
        processes: by any key: process id, its start (`start_ticks`), and what it offers.
    """
    asked = {key: _Asked(*process) for key, process in processes.items()}
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while any(not one.is_over for one in asked.values()) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        for one in asked.values():
            one.look()
    return {key: one.stacks() for key, one in asked.items()}


class _Asked:
    """One process that has been asked."""

    def __init__(self, pid: int, ticks: int, offer: StacksOffer | None) -> None:
        self._state = process_state(pid)
        self._main_thread = offer.main_thread if offer else 0
        self._file: int | None = None
        self._begin = self._size = 0
        self._since = time.monotonic()
        self._why = self._why_not(pid, offer)
        if not self._why and offer is not None:
            try:
                self._file = os.open(f"/proc/{pid}/fd/{offer.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
                self._begin = self._size = os.fstat(self._file).st_size
                if is_alive(pid, ticks):
                    os.kill(pid, offer.signal)
            except OSError as error:
                self._why = f"it could not be asked: {error.strerror}"

    def _why_not(self, pid: int, offer: StacksOffer | None) -> str:
        if self._state in _STOPPED:
            return _STOPPED[self._state]
        if offer is None:
            return "it had no signal to spare"
        # The default action of such a signal is the end of the process.
        if not _signals(pid, "SigCgt") >> (offer.signal - 1) & 1:
            return "it does not listen to the signal any more"
        return ""

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to come."""
        if self._why:
            return True
        return self._size > self._begin and time.monotonic() - self._since > _QUIET_SECONDS

    def look(self) -> None:
        if self._file is not None:
            size = os.fstat(self._file).st_size
            if size != self._size:
                self._size, self._since = size, time.monotonic()

    def stacks(self) -> Stacks:
        text = ""
        if self._file is not None:
            with contextlib.suppress(OSError):
                text = os.pread(self._file, _MAX_BYTES, self._begin).decode(errors="replace")
            os.close(self._file)
        if not text:
            why = self._why or f"it gave no answer within {_PATIENCE_SECONDS:.0f} s"
            return Stacks(why_none=why, state=self._state)
        threads = _threads(text)
        return Stacks(text, threads.get(self._main_thread, ()), state=self._state)


def _threads(text: str) -> dict[int, tuple[Frame, ...]]:
    """Frames by thread, of the first time that each is named: two guardians may have asked at once."""
    found: dict[int, list[Frame]] = {}
    frames: list[Frame] = []
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            frames = []
            found.setdefault(int(thread[1], 16), frames)
        elif frame := _FRAME.match(line):
            frames.append(Frame(*frame.groups()))
    return {thread: tuple(frames) for thread, frames in found.items()}


def _free_signal() -> int | None:
    """One that is neither caught, ignored nor blocked in this process, whoever did it."""
    pid = os.getpid()
    taken = _signals(pid, "SigCgt") | _signals(pid, "SigIgn") | _signals(pid, "SigBlk")
    return next((number for number in _SIGNALS if not taken >> (number - 1) & 1), None)


def _signals(pid: int, name: str) -> int:
    """A set of signals of a process; none if that cannot be read. Source: proc(5), /proc/<pid>/status."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1], 16)
    return 0
