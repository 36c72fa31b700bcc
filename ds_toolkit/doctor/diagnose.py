"""From logs to causes: what fits the evidence, the surest first; what follows from another is left out."""

from __future__ import annotations

import gzip
import io
import os
import stat
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from ds_toolkit.doctor.evidence import ENDLESS, Evidence, Hits, read_log
from ds_toolkit.doctor.exit_codes import exit_of
from ds_toolkit.doctor.kernel import cgroup_kills, kernel_log
from ds_toolkit.doctor.ladder_advice import ladder_advice
from ds_toolkit.doctor.lines import LogLine, rank_of_file
from ds_toolkit.doctor.masking import masked
from ds_toolkit.doctor.ranking import FirstFailure, first_exception, first_failure
from ds_toolkit.doctor.run_directory import MAX_LOGS, RunDirectory
from ds_toolkit.doctor.signatures import BY_NAME, SIGNATURES, Confidence, Signature
from ds_toolkit.doctor.tracebacks import Raised
from ds_toolkit.errors import ToolkitError, printable
from ds_toolkit.findings import Finding, Severity, Where

_ORDER = {Confidence.CERTAIN: 0, Confidence.LIKELY: 1, Confidence.POSSIBLE: 2}
_KERNEL = "the kernel's log"
_MAX_QUOTE = 300
_NO_TEXT = bytes(mark for mark in range(32) if mark not in b"\b\t\n\v\f\r\x1b")


@dataclass(frozen=True)
class Cause:
    """One thing that went wrong.

    Attributes:
        finding: code, message, place and fix.
        name: of the signature.
        confidence: how sure it is.
        evidence: lines that speak for it, as `file:line: text`, without secrets.
        ranks: that said so; empty where it is not known.
    """

    finding: Finding
    name: str
    confidence: Confidence
    evidence: tuple[str, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Diagnosis:
    """What was found.

    Attributes:
        causes: the surest first.
        first: the rank that failed first, and its first exception.
        looked_at: files and their sizes in bytes.
        notes: what could not be looked at.
        errors: logs that could not be read.
        set_aside: exceptions that follow from another rank's end, as text.
    """

    causes: tuple[Cause, ...]
    first: FirstFailure | None
    looked_at: tuple[tuple[str, int], ...]
    notes: tuple[str, ...]
    errors: tuple[ToolkitError, ...] = ()
    set_aside: tuple[str, ...] = field(default=())


def diagnose(
    logs: Sequence[Path], run_directory: Path | None = None, exit_code: int | None = None
) -> Diagnosis:
    """Read everything once and say what fits.

    Args:
        logs: files; `-` is standard input; of folders, what looks like a log.
        run_directory: holds logs, incident files, dumps of the Flight Recorder, the configuration.
        exit_code: of the launcher, in any spelling.

    Raises:
        ToolkitError: there was nothing to look at, or nothing of it could be read.
    """
    evidence, errors = Evidence(), []
    if exit_code is not None:
        evidence.ends.given = exit_of(exit_code)
    run = _run_directory(run_directory)
    paths = list(_files(logs, run))
    for path in paths:
        try:
            _read(path, evidence)
        except ToolkitError as error:
            errors.append(error)
    if run is not None:
        run.add_to(evidence)
    if errors and not evidence.looked_at and not evidence.facts:
        raise errors[0]
    if not evidence.looked_at and not evidence.facts and exit_code is None:
        raise ToolkitError(
            "there is nothing to look at", where=run_directory, fix="name a log, or give --exit-code"
        )
    _ask_kernel(evidence)
    first = first_failure(evidence)
    return Diagnosis(
        causes=tuple(_causes(evidence, first, run)),
        first=first,
        looked_at=tuple(evidence.looked_at),
        notes=tuple(evidence.notes),
        errors=tuple(errors),
        set_aside=tuple(dict.fromkeys(masked(raised.text)[:_MAX_QUOTE] for raised in evidence.secondary)),
    )


def quoted(line: LogLine) -> str:
    """A line with its place, without secrets and without what a terminal would obey."""
    text = printable(masked(line.prefix + line.text))
    cut = text if len(text) <= _MAX_QUOTE else text[: _MAX_QUOTE - 3] + "..."
    return f"{printable(line.file)}:{line.number}: {cut.strip()}"


def _run_directory(folder: Path | None) -> RunDirectory | None:
    if folder is None:
        return None
    if not folder.is_dir():
        raise ToolkitError("there is no such run directory", where=folder)
    return RunDirectory(folder)


def _files(logs: Sequence[Path], run: RunDirectory | None) -> Iterator[Path]:
    for path in logs:
        if path.is_dir():
            yield from RunDirectory(path).logs()
        else:
            yield path
    if run is not None:
        yield from run.logs()[:MAX_LOGS]


def _read(path: Path, evidence: Evidence) -> None:
    name = str(path)
    if name == "-":
        import sys

        size = read_log(sys.stdin.buffer, "-", evidence, None, ENDLESS)
        evidence.looked_at.append(("-", size))
        return
    try:
        # Opening a pipe that nobody writes to would wait for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise ToolkitError("a log cannot be read", where=path, why=error.strerror) from error
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise ToolkitError("this is no file", where=path, fix="name a log, or `-` for standard input")
        if state.st_size == 0:
            evidence.notes.append(f"{name} is empty")
        try:
            size = read_log(
                _opened(file, path), name, evidence, rank_of_file(name), _limit(path, state.st_size)
            )
        except (OSError, EOFError, zlib.error) as error:
            raise ToolkitError("a log cannot be read to its end", where=path, why=str(error)) from error
        _note_odd(name, os.pread(descriptor, 65536, 0), evidence)
        if os.fstat(descriptor).st_size > state.st_size:
            evidence.notes.append(f"{name} is still growing: its first {state.st_size} bytes were read")
    evidence.looked_at.append((name, size))


def _opened(file: io.FileIO, path: Path) -> BinaryIO:
    return gzip.open(file) if path.suffix == ".gz" else file  # type: ignore[return-value]


def _limit(path: Path, size_bytes: int) -> int:
    # How much an archive holds is not known; of one of zeros not more than this is read.
    return ENDLESS if path.suffix == ".gz" else size_bytes


def _note_odd(name: str, head: bytes, evidence: Evidence) -> None:
    odd = len(head) - len(head.translate(None, _NO_TEXT))
    if head and odd > len(head) // 20 and not name.endswith(".gz"):
        evidence.notes.append(f"{name} is binary: only what looks like text in it was seen")


def _ask_kernel(evidence: Evidence) -> None:
    """What this host's kernel knows of the processes in the logs; of others it is not asked."""
    if "exit:SIGKILL" not in evidence.ends.facts:
        return
    kills = cgroup_kills()
    if kills:
        evidence.notes.append(
            f"the memory limit of this host's control group has ended {kills} processes so far"
        )
    pids = set(evidence.ends.ranks_by_pid) | {end.pid for end in evidence.ends.ends}
    lines = [
        line
        for line in kernel_log().splitlines()
        if b"rocess" in line and any(f"process {pid} ".encode() in line for pid in pids if pid)
    ]
    if lines:
        read_log(io.BytesIO(b"\n".join(lines)), _KERNEL, evidence, None, 2**20)


def _causes(evidence: Evidence, first: FirstFailure | None, run: RunDirectory | None) -> list[Cause]:
    seen = {one.name for one in SIGNATURES if one.patterns and _is_seen(one, evidence)}
    fitting = [
        one
        for one in SIGNATURES
        if (not one.patterns or one.name in seen) and _has_needs(one, evidence, seen)
    ]
    # What fits may rule out what fits less well.
    names = {one.name for one in fitting}
    fitting = [one for one in fitting if names.isdisjoint(one.unless)]
    found = [one for one in fitting if not one.is_fallback]
    if not any(one.severity is Severity.ERROR for one in found):
        found += _fallbacks([one for one in fitting if one.is_fallback])
    causes = [_cause(signature, evidence, first, run) for signature in found]
    return sorted(causes, key=lambda cause: _rank_of_cause(cause, first))


def _fallbacks(fitting: list[Signature]) -> list[Signature]:
    """Of what is told in want of something better, the best: an exception nobody knows before a bare code."""
    weakest = ("unknown-end", "peers-lost", "unknown-exception")
    strong = [one for one in fitting if one.name not in weakest]
    unknown = [one for one in fitting if one.name == "unknown-exception"]
    return [*strong, *unknown] or [one for one in fitting if one.name == "peers-lost"] or fitting


def _is_seen(signature: Signature, evidence: Evidence) -> bool:
    hits = evidence.hits.get(signature.name)
    return hits is not None and hits.count >= signature.at_least


def _has_needs(signature: Signature, evidence: Evidence, seen: set[str]) -> bool:
    return all(
        any(name in seen if name in BY_NAME else evidence.has(name) for name in need.split("|"))
        for need in signature.needs
    )


def _rank_of_cause(cause: Cause, first: FirstFailure | None) -> tuple[int, int, int]:
    of_first = first is not None and first.rank is not None and first.rank in cause.ranks
    severity = (Severity.ERROR, Severity.WARNING, Severity.INFO).index(cause.finding.severity)
    return severity, _ORDER[cause.confidence], 0 if of_first else 1


def _cause(
    signature: Signature, evidence: Evidence, first: FirstFailure | None, run: RunDirectory | None
) -> Cause:
    hits = evidence.hits.get(signature.name, Hits())
    words: defaultdict[str, str] = defaultdict(lambda: "?", hits.groups)
    words["count"] = str(hits.count)
    lines = list(hits.lines)
    where = Where(lines[0].file, line=lines[0].number) if lines else Where()
    if not lines:
        lines, what, where = _of_needs(signature, evidence, first)
        words["what"] = what
    message = _filled(signature.cause, words)
    ranks = sorted(hits.ranks) or ([first.rank] if first is not None and first.rank is not None else [])
    if ranks and "rank" not in message:
        message += f" (rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:16]))})"
    fix = _filled(signature.fix, words)
    if signature.name == "gpu-out-of-memory":
        advice = ladder_advice(run, evidence)
        fix = f"{fix}; {advice}" if advice else fix
    finding = Finding(signature.code, signature.severity, printable(masked(message)), where, printable(fix))
    return Cause(finding, signature.name, signature.confidence, tuple(map(quoted, lines)), tuple(ranks))


def _filled(text: str, words: defaultdict[str, str]) -> str:
    return text.format_map(words)


def _of_needs(
    signature: Signature, evidence: Evidence, first: FirstFailure | None
) -> tuple[list[LogLine], str, Where]:
    """Evidence of a signature without patterns: the lines, the words and the place of what it needs."""
    lines: list[LogLine] = []
    what, where = "", Where()
    for need in (name for needed in signature.needs for name in needed.split("|")):
        if need in evidence.facts:
            what = evidence.facts[need]
            where = Where(evidence.facts.get(f"file:{need}"))
        elif need == "exception":
            raised = (first.raised if first else None) or first_exception(evidence)
            if raised is not None:
                what = _told(raised)
                lines.append(raised.line)
        elif need in evidence.hits:
            lines += evidence.hits[need].lines[:2]
        elif need.startswith("exit"):
            ends = [evidence.ends.first] if evidence.ends.first else evidence.ends.ends
            fitting = [end for end in ends if end and need in ("exit", end.exit.fact)]
            lines += [end.line for end in fitting[:2]]
            what = str(fitting[0].exit) if fitting else str(evidence.ends.given)
    if lines and where.file is None:
        where = Where(lines[0].file, line=lines[0].number)
    return lines, what, where


def _told(raised: Raised) -> str:
    place = f" at {raised.place}" if raised.place else ""
    return f"{raised.text[:_MAX_QUOTE]}{place}"
