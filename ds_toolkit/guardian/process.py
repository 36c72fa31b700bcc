"""Becoming a process that outlives the ranks and their launchers, and ending without a trace."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import sys
from pathlib import Path

from ds_toolkit.checkpoint.ownership import GUARDIAN_LOCK_NAME, Ownership
from ds_toolkit.errors import ToolkitError
from ds_toolkit.guardian.arena import Arena, Job
from ds_toolkit.guardian.journal import note, note_failure
from ds_toolkit.guardian.processes import start_ticks
from ds_toolkit.guardian.server import Server
from ds_toolkit.guardian.serving import Guardian

_READY = b"ready"
_READY_SECONDS = 25.0
# The guardian of an earlier run ends its last words first; the run has waited for it already.
_LOCK_SECONDS = 10.0
# What launchers and schedulers send to all processes of a job, to end them or to warn them of the end.
_DEAF_TO = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


def main(arguments: list[str]) -> int:
    """Start the guardian of the arena that is named; 0 when it, or one that was there, listens."""
    if len(arguments) != 1:
        print("usage: python -m ds_toolkit.guardian ARENA_FOLDER", file=sys.stderr)
        return 2
    arena = Arena(Path(arguments[0]).resolve())
    try:
        job = arena.job()
    except ToolkitError as error:
        print(error, file=sys.stderr)
        return 2
    return _daemonize(arena, job)


def _daemonize(arena: Arena, job: Job) -> int:
    """Leave the family by two forks and a session of its own; only the first process returns from here.

    A launcher that ends the descendants of its ranks finds a child whose parent has ended no more, and one
    that ends process groups or sessions finds another one.
    """
    ours, theirs = os.pipe()
    child = os.fork()
    if child:
        os.close(theirs)
        return _first_word(ours, child)
    os.close(ours)
    os.setsid()
    if os.fork():
        os._exit(0)
    exit_code = 1
    try:
        _detach(arena, keep=theirs)
        _live(arena, job, theirs)
        exit_code = 0
    except BaseException:
        note_failure("the guardian has ended by a mistake")
    os._exit(exit_code)


def _first_word(descriptor: int, child: int) -> int:
    """What the guardian says when it listens, or why it does not."""
    os.waitpid(child, 0)
    said = b""
    while select.select([descriptor], [], [], _READY_SECONDS)[0]:
        more = os.read(descriptor, 65536)
        if not more:
            break
        said += more
    if said == _READY:
        return 0
    print(said.decode(errors="replace") or "the guardian has ended before it listened", file=sys.stderr)
    return 1


def _detach(arena: Arena, keep: int) -> None:
    for number in _DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    log = os.open(arena.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # What the starter had open (sockets of a process group, GPUs) would live as long as we do.
    for path in list(Path("/proc/self/fd").iterdir()):
        if int(path.name) > 2 and int(path.name) != keep:
            with contextlib.suppress(OSError):
                os.close(int(path.name))


def _live(arena: Arena, job: Job, starter: int) -> None:
    lock = _lock(arena)
    if lock is None:
        _tell(starter, _READY)
        return
    try:
        ownership = None
        if job.node == job.nodes[0]:
            ownership = Ownership.acquire(job.directory, _LOCK_SECONDS, GUARDIAN_LOCK_NAME)
        server = Server(arena.socket_path)
    except (ToolkitError, OSError) as error:
        note(str(error))
        _tell(starter, str(error).encode())
        return
    arena.sign(os.getpid(), start_ticks(os.getpid()) or 0)
    guardian = Guardian(arena, job, server, ownership)
    note(f"serving job {job.job_id}, node {job.node}")
    _tell(starter, _READY)
    guardian.serve()
    note("nothing is left to do")
    server.close()
    # The right to the directory last: a run that gets it finds no arena of this one.
    arena.remove()
    if ownership is not None:
        ownership.release()


def _lock(arena: Arena) -> int | None:
    """The right to serve an arena, which ends with the process; None if a guardian has it."""
    descriptor = os.open(arena.folder / "guardian.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _tell(descriptor: int, word: bytes) -> None:
    with contextlib.suppress(OSError):
        # The starter may have lost its patience.
        os.write(descriptor, word)
    os.close(descriptor)
