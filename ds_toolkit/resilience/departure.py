"""No rank ends unheard: signals, exceptions and the interpreter's own end pass by here first.

A Python signal handler does not run while the main thread waits in a collective. But the interpreter writes
the signal's number to a descriptor at once (`signal.set_wakeup_fd`), and a thread reads it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from ds_toolkit.guardian.control import Leaving

HEARD_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What schedulers send before they kill."""

Leave = Callable[[Leaving, str], None]


class Departure:
    """Calls `leave` before this process ends, whatever ends it, short of SIGKILL and a crash.

    Signals that the program itself listens to are left to it.
    """

    def __init__(self, leave: Leave) -> None:
        """Listen from now on. Signals can be heard only if this is called in the main thread."""
        self.leave = leave
        self._failure: str | None = None
        self._excepthook = sys.excepthook
        sys.excepthook = self._note_failure
        atexit.register(self._at_exit)
        _ears.open(self)

    @property
    def heard(self) -> tuple[str, ...]:
        """Names of the signals that are listened to."""
        return _ears.heard

    def close(self) -> None:
        """Listen no more."""
        self.disown()
        _ears.close(self)

    def disown(self) -> None:
        """Let the end of the program be as it was; signals are another matter."""
        atexit.unregister(self._at_exit)
        if sys.excepthook == self._note_failure:
            sys.excepthook = self._excepthook

    def _note_failure(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        self._failure = f"{kind.__name__}: {error}".partition("\n")[0]
        self._excepthook(kind, error, traceback)

    def _at_exit(self) -> None:
        if self._failure is None:
            self.leave(Leaving.END, "")
        else:
            self.leave(Leaving.EXCEPTION, self._failure)


class _Ears:
    """Hears signals for all departures of the process, in whatever order they are opened and closed.

    One pair of ears for a process: there is one handler of a signal, and one descriptor to wake up.
    """

    def __init__(self) -> None:
        self._departures: list[Departure] = []
        self._old_handlers: dict[signal.Signals, object] = {}
        self._old_wakeup = -1
        self._writer: socket.socket | None = None
        self._pid = 0
        self._mask: set[int] | None = None

    @property
    def heard(self) -> tuple[str, ...]:
        return tuple(heard.name for heard in self._old_handlers)

    def open(self, departure: Departure) -> None:
        self._departures.append(departure)
        if self._writer is None and threading.current_thread() is threading.main_thread():
            self._listen()

    def close(self, departure: Departure) -> None:
        if departure in self._departures:
            self._departures.remove(departure)
        # Handlers can be put back by the main thread alone; until it does, a signal ends the process as ever.
        if not self._departures and threading.current_thread() is threading.main_thread():
            self._unlisten()

    def _listen(self) -> None:
        for heard in HEARD_SIGNALS:
            if signal.getsignal(heard) is signal.SIG_DFL and not _is_caught(heard):
                self._old_handlers[heard] = signal.signal(heard, _leave_it_to_the_thread)
        reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._pid = os.getpid()
        self._old_wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._hear, args=(reader,), name="ds_toolkit-signals", daemon=True).start()

    def _unlisten(self) -> None:
        for heard, handler in self._old_handlers.items():
            if signal.getsignal(heard) is _leave_it_to_the_thread:
                signal.signal(heard, handler)  # type: ignore[arg-type]
        self._old_handlers.clear()
        if self._writer is not None:
            current = signal.set_wakeup_fd(-1)
            # Somebody who has come after us keeps it.
            signal.set_wakeup_fd(self._old_wakeup if current == self._writer.fileno() else current)
            # The thread ends by this; in a forked child there is none, and the rank's must not end.
            if os.getpid() == self._pid:
                with contextlib.suppress(OSError):
                    self._writer.shutdown(socket.SHUT_RDWR)
            self._writer.close()
            self._writer = None

    def forget(self) -> None:
        """In a forked child: it is no rank, and its end and its signals are its own.

        Otherwise a signal to a data loading worker would be written to the descriptor of the rank.
        """
        for departure in self._departures:
            departure.disown()
        self._departures.clear()
        self._unlisten()
        self.release_signals()

    def hold_signals(self) -> None:
        """Before a fork: none arrives in the child before it has forgotten."""
        if self._departures:
            self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, HEARD_SIGNALS)

    def release_signals(self) -> None:
        """After the fork, on both sides."""
        if self._mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
            self._mask = None

    def _hear(self, reader: socket.socket) -> None:
        while number := reader.recv(1):
            if self._old_wakeup >= 0:
                with contextlib.suppress(OSError):
                    os.write(self._old_wakeup, number)
            if number[0] in self._old_handlers:
                try:
                    self._leave_all(signal.Signals(number[0]).name)
                finally:
                    _flush()
                    # The main thread may never come back from where it is.
                    os._exit(128 + number[0])
        reader.close()

    def _leave_all(self, name: str) -> None:
        leaving = [
            threading.Thread(target=departure.leave, args=(Leaving.SIGNAL, name), daemon=True)
            for departure in self._departures
        ]
        for thread in leaving:
            thread.start()
        for thread in leaving:
            thread.join()


def _is_caught(number: signal.Signals) -> bool:
    """Whether a handler that Python does not know of is there, such as faulthandler's. Source: proc(5)."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _leave_it_to_the_thread(number: int, frame: object) -> None:
    """Python needs a handler of its own to write to the descriptor."""


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


_ears = _Ears()
os.register_at_fork(
    before=_ears.hold_signals, after_in_parent=_ears.release_signals, after_in_child=_ears.forget
)
