"""The guardian's ears: connections of ranks over a Unix socket, and the ends of their processes."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_toolkit.guardian.addresses import short_address
from ds_toolkit.guardian.journal import note
from ds_toolkit.guardian.processes import is_alive

_RECEIVE_BYTES = 65536
_MAX_LINE_BYTES = 2**20
# Where the kernel has no pidfds, how often to look whether processes live.
_LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class Said:
    """A rank has sent an event."""

    rank: int
    event: Mapping[str, Any]


@dataclass(frozen=True)
class Ended:
    """The process of a rank has ended."""

    rank: int


@dataclass
class _Connection:
    socket: socket.socket
    rank: int | None = None
    received: bytearray = field(default_factory=bytearray)


class Server:
    """Listens from the moment that it is made. `poll` is for one thread; `send` and `wake` are for any."""

    def __init__(self, socket_path: Path) -> None:
        """Take the place of whatever lies at the path.

        Raises:
            OSError: it cannot.
        """
        self._path = socket_path
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, _Connection] = {}
        self._listeners: dict[int, _Connection] = {}
        self._without_pidfd: dict[int, tuple[int, int]] = {}
        self._listener = _listening(socket_path)
        self._woken, self._waker = socket.socketpair()
        for end in (self._listener, self._woken, self._waker):
            end.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._woken, selectors.EVENT_READ, self._wake_up)

    def watch(self, rank: int, pid: int, ticks: int) -> None:
        """Tell when this process ends, also if it has by now.

        The end of its connection tells nothing: what a rank forked or ran may hold it open, and a rank may
        close it and go on.
        """
        self._without_pidfd[rank] = (pid, ticks)
        with contextlib.suppress(OSError, AttributeError):
            descriptor = os.pidfd_open(pid)
            # The id may be another process's by now: then this end is seen at the next look.
            if not is_alive(pid, ticks):
                os.close(descriptor)
                return
            self._selector.register(descriptor, selectors.EVENT_READ, lambda: self._end(rank, descriptor))
            del self._without_pidfd[rank]

    def poll(self, timeout_seconds: float) -> list[Said | Ended]:
        """What has happened since the last call; waits for it as long as this."""
        if self._without_pidfd:
            timeout_seconds = min(timeout_seconds, _LOOK_SECONDS)
        events: list[Said | Ended] = []
        for key, _ in self._selector.select(timeout_seconds):
            react: Callable[[], list[Said | Ended]] = key.data
            events += react()
        for rank, (pid, ticks) in list(self._without_pidfd.items()):
            if not is_alive(pid, ticks):
                del self._without_pidfd[rank]
                events.append(Ended(rank))
        # What the others said before a death counts, such as that a checkpoint is to be written.
        return sorted(events, key=lambda event: isinstance(event, Ended))

    def send(self, event: Mapping[str, Any], rank: int | None = None) -> None:
        """Tell all ranks that are connected, or one."""
        line = json.dumps(event).encode() + b"\n"
        for of_rank, connection in list(self._connections.items()):
            if rank in (None, of_rank):
                try:
                    connection.socket.sendall(line)
                except OSError as error:
                    note(f"rank {of_rank} does not listen: {error}")

    def tell_a_listener(self, event: Mapping[str, Any], in_order: Iterable[int]) -> None:
        """Tell a thread of one rank that does nothing but listen, whatever the main thread does.

        Args:
            event: what there is to say.
            in_order: ranks; the first that listens is told.
        """
        line = json.dumps(event).encode() + b"\n"
        for rank in in_order:
            listener = self._listeners.get(rank)
            if listener is not None:
                with contextlib.suppress(OSError):
                    listener.socket.sendall(line)
                    return

    def wake(self) -> None:
        """Let `poll` return."""
        with contextlib.suppress(OSError):
            self._waker.send(b"!")

    def close(self) -> None:
        """Stop listening and end all connections."""
        with contextlib.suppress(OSError):
            self._path.unlink()
        for key in list(self._selector.get_map().values()):
            self._selector.unregister(key.fileobj)
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            else:
                os.close(key.fd)
        self._selector.close()
        self._waker.close()

    def _accept(self) -> list[Said | Ended]:
        with contextlib.suppress(OSError):
            accepted, _ = self._listener.accept()
            accepted.setblocking(False)
            connection = _Connection(accepted)
            self._selector.register(accepted, selectors.EVENT_READ, lambda: self._hear(connection))
        return []

    def _wake_up(self) -> list[Said | Ended]:
        with contextlib.suppress(OSError):
            self._woken.recv(_RECEIVE_BYTES)
        return []

    def _end(self, rank: int, descriptor: int) -> list[Said | Ended]:
        self._selector.unregister(descriptor)
        os.close(descriptor)
        # What it said last is heard first.
        last = self._connections.get(rank)
        return [*(self._hear(last) if last else []), Ended(rank)]

    def _hear(self, connection: _Connection) -> list[Said | Ended]:
        try:
            received = connection.socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            received = b""
        connection.received += received
        events = self._events(connection)
        if not received or len(connection.received) > _MAX_LINE_BYTES:
            self._forget(connection)
        return events

    def _events(self, connection: _Connection) -> list[Said | Ended]:
        *lines, rest = bytes(connection.received).split(b"\n")
        connection.received[:] = rest
        events: list[Said | Ended] = []
        for line in lines:
            try:
                event = json.loads(line)
                if event["event"] == "hello":
                    connection.rank = int(event["rank"])
                    self._connections[connection.rank] = connection
                elif event["event"] == "listen":
                    self._listeners[int(event["rank"])] = connection
                if connection.rank is not None:
                    events.append(Said(connection.rank, event))
            except (ValueError, KeyError, TypeError):
                note(f"not understood: {line[:200]!r}")
        return events

    def _forget(self, connection: _Connection) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.socket.close()
        rank = connection.rank
        if rank is not None and self._connections.get(rank) is connection:
            del self._connections[rank]
        for rank, listener in list(self._listeners.items()):
            if listener is connection:
                del self._listeners[rank]


def _listening(path: Path) -> socket.socket:
    # Under another name first: whoever sees the socket can connect to it, and nobody else's user ever could.
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    with short_address(partial) as address:
        listener.bind(address)
    partial.chmod(0o600)
    listener.listen(256)
    partial.replace(path)
    return listener
