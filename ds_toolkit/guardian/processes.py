"""Whether a process is the one that it was, and what it does, by proc(5)."""

from __future__ import annotations

from pathlib import Path


def start_ticks(pid: int) -> int | None:
    """When a process began, in clock ticks since boot; None if there is no such process.

    Source: proc(5), field 22 of /proc/<pid>/stat.
    """
    fields = _stat_fields(pid)
    # A process that has ended and that nobody has waited for is as good as gone.
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def process_state(pid: int) -> str:
    """One letter: R runs, S sleeps, D waits for a device, T is stopped, t is traced; empty if it is gone.

    Source: proc(5), field 3 of /proc/<pid>/stat.
    """
    fields = _stat_fields(pid)
    return "" if fields is None else fields[0]


def parent_of(pid: int) -> int | None:
    """Process id of a process's parent; None if it has ended.

    Source: proc(5), field 4 of /proc/<pid>/stat.
    """
    fields = _stat_fields(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[1])


def _stat_fields(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat behind the name, which may hold blanks."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def is_alive(pid: int, ticks: int) -> bool:
    """Whether the very process that began at these ticks is still there."""
    return start_ticks(pid) == ticks
