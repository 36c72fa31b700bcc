"""Which rank failed first: not that of the launcher's last line, but the one that the evidence points to."""

from __future__ import annotations

from dataclasses import dataclass

from ds_toolkit.doctor.evidence import Evidence
from ds_toolkit.doctor.lines import LogLine
from ds_toolkit.doctor.tracebacks import Raised


@dataclass(frozen=True)
class FirstFailure:
    """The rank that failed first, as far as that can be told.

    Attributes:
        rank: global where the log says so, else local to its node; None if nothing tells it.
        how: what tells it, in words.
        line: where that is written.
        raised: its first exception that is no consequence of another rank's end.
    """

    rank: int | None
    how: str
    line: LogLine | None = None
    raised: Raised | None = None


def first_failure(evidence: Evidence) -> FirstFailure | None:
    """The first failing rank and its first real exception; None where nothing failed."""
    raised = first_exception(evidence)
    told = _by_record(evidence)
    if told is not None:
        rank, how, line = told
        own = first_exception(evidence, rank)
        # A rank that was killed has raised nothing; the exceptions of others are no reason.
        unknown = raised if raised is not None and raised.line.rank is None else None
        return FirstFailure(rank, how, line, own or unknown)
    if raised is not None:
        how = "it raised the first exception that does not follow from another rank's end"
        return FirstFailure(raised.line.rank, how, raised.line, raised)
    return _by_elimination(evidence)


def first_exception(evidence: Evidence, rank: int | None = None) -> Raised | None:
    """The earliest exception by its time, or by its place where lines have no time."""
    found = [raised for raised in evidence.exceptions if rank is None or raised.line.rank == rank]
    if not found:
        return None
    times = [raised.line.time for raised in found]
    if all(times) and len({raised.line.file for raised in found}) > 1:
        return min(found, key=lambda raised: str(raised.line.time))
    if len({raised.line.file for raised in found}) > 1:
        # A failure has its own words; what follows from it is mostly said by several.
        alone = [raised for raised in found if sum(other.text == raised.text for other in found) == 1]
        return (alone or found)[0]
    return found[0]


def _by_record(evidence: Evidence) -> tuple[int, str, LogLine | None] | None:
    if "first-rank" in evidence.facts:
        return int(evidence.facts["first-rank"]), "the guard's incident file names it first", None
    ends = evidence.ends
    if ends.first is not None and ends.first.rank is not None:
        return ends.first.rank, "torchrun's table names it as the root cause", ends.first.line
    for pid, line in ends.killed_pids:
        if pid in ends.ranks_by_pid:
            return ends.ranks_by_pid[pid], f"the kernel killed its process {pid}", line
    for end in ends.ends:
        if end.rank is not None and end.exit.signal != "SIGTERM":
            who = {"slurm": "Slurm", "elastic": "torchrun"}.get(end.who, "the launcher")
            return end.rank, f"{who} tells of its end first", end.line
    return None


def _by_elimination(evidence: Evidence) -> FirstFailure | None:
    lost = {raised.line.rank for raised in evidence.secondary if not raised.is_ignored} - {None}
    if "marker:peer-lost" in evidence.hits:
        lost |= evidence.hits["marker:peer-lost"].ranks
    size = evidence.ends.world_size or len(evidence.ends.ranks_by_pid)
    silent = set(range(size)) - lost
    if lost and len(silent) == 1:
        rank = silent.pop()
        return FirstFailure(rank, "all other ranks lost the connection to it, and it said nothing")
    if evidence.ends.ends:
        return FirstFailure(None, "no line tells which rank", evidence.ends.ends[0].line)
    return None
