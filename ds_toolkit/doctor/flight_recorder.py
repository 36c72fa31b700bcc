"""Dumps of torch's Flight Recorder: which ranks did not come to a collective. Nothing in them is executed."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_toolkit.checkpoint.unpickle import unpickle
from ds_toolkit.errors import ToolkitError

MAX_DUMP_BYTES = 2**28
_MAX_DUMPS = 4096
_RANK = re.compile(r"(?:rank_?|_)(\d+)(?:\.json|\.pkl)?$")


@dataclass(frozen=True)
class Missing:
    """The collective at which ranks wait for others.

    Attributes:
        waiting: ranks that are in it.
        missing: ranks that have not come to it.
        operation: its name, as `nccl:all_reduce`.
        sequence: its number in its group.
        file: a dump that tells it.
    """

    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    operation: str
    sequence: int
    file: str

    def __str__(self) -> str:
        who = ", ".join(map(str, self.missing))
        there = ", ".join(map(str, self.waiting))
        return (
            f"rank{'s' if len(self.missing) > 1 else ''} {who} did not come to {self.operation} number"
            f" {self.sequence}, in which rank{'s' if len(self.waiting) > 1 else ''} {there} waited"
        )


def dumps_in(folder: Path) -> list[Path]:
    """Files that by their names are dumps."""
    found = [path for pattern in ("*nccl_trace_rank_*", "*fr_trace*") for path in folder.rglob(pattern)]
    return sorted(path for path in found if path.is_file())[:_MAX_DUMPS]


def missing_ranks(dumps: list[Path], notes: list[str]) -> Missing | None:
    """What the dumps of all ranks tell together; None if nobody waits. Those not readable are noted."""
    entries: dict[int, tuple[Path, list[dict[str, Any]]]] = {}
    for path in dumps:
        match = _RANK.search(path.name)
        try:
            found = _entries(path)
        except (ToolkitError, OSError, ValueError, TypeError, KeyError) as error:
            notes.append(f"{path} cannot be read as a dump of the Flight Recorder: {error}".splitlines()[0])
            continue
        if match is not None:
            entries[int(match[1])] = (path, found)
    if len(entries) < 2:
        return None
    last = {
        rank: max((_number(entry) for entry in found), default=-1) for rank, (_, found) in entries.items()
    }
    newest = max(last.values())
    waiting = tuple(sorted(rank for rank, number in last.items() if number == newest))
    missing = tuple(sorted(set(last) - set(waiting)))
    path, found = entries[waiting[0]]
    entry = next((entry for entry in found if _number(entry) == newest), {})
    if not missing or newest < 0 or entry.get("state") == "completed":
        return None
    return Missing(
        waiting, missing, str(entry.get("profiling_name", "a collective"))[:100], newest, str(path)
    )


def _entries(path: Path) -> list[dict[str, Any]]:
    if path.stat().st_size > MAX_DUMP_BYTES:
        raise ValueError(f"it is larger than {MAX_DUMP_BYTES} bytes")
    data = path.read_bytes()
    dump = json.loads(data) if data[:1] == b"{" else unpickle(data, str(path))
    # Of the default group, whose name is 0; other groups have members of their own.
    return [
        entry
        for entry in dump["entries"]
        if isinstance(entry, dict) and not entry.get("is_p2p") and _group(entry) in ("0", "default_pg", "")
    ]


def _group(entry: dict[str, Any]) -> str:
    name = entry.get("process_group", "")
    return str(name[0]) if isinstance(name, (tuple, list)) and name else str(name)


def _number(entry: dict[str, Any]) -> int:
    return int(entry.get("collective_seq_id", entry.get("seq_id", -1)))
