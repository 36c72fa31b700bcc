"""What logs tell: lines of known failures, exceptions, ends; gathered in one pass, in bounded memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from ds_toolkit.doctor.ends import EndsSeen
from ds_toolkit.doctor.lines import LogLine, parse
from ds_toolkit.doctor.scanning import Scanner, shape_of
from ds_toolkit.doctor.signatures import GRAMS, LINE_WORDS, MARKERS, SECONDARY, SIGNATURES, Signature
from ds_toolkit.doctor.signatures.signature import WORDS
from ds_toolkit.doctor.tracebacks import Raised, Tracebacks

KEPT_LINES = 5
KEPT_EXCEPTIONS = 500
# A shape that has been looked at this often without a word of any failure is dull.
_LOOKS = 200
_KEPT_SHAPES = 50_000
# The size of a stream whose end is not known.
ENDLESS = 2**40
# Of a file with more such lines than this only the end is looked at besides: reading has to end.
MAX_LOOKS = 300_000
TAIL_BYTES = 2**25
# And one that spoke of the same failure this often has been counted enough.
_MATCHES = 20_000


@dataclass
class Hits:
    """The lines that speak for one signature or marker.

    Attributes:
        lines: the first few.
        groups: what the pattern's groups have seen in the first line.
        count: of all lines.
        ranks: that said so.
    """

    lines: list[LogLine] = field(default_factory=list)
    groups: dict[str, str] = field(default_factory=dict)
    count: int = 0
    ranks: set[int] = field(default_factory=set)

    def add(self, line: LogLine, match: re.Match[str]) -> None:
        """One more line."""
        self.count += 1
        groups = {name: value for name, value in match.groupdict().items() if value}
        if "rank" in groups:
            self.ranks.add(int(groups["rank"]))
        elif line.rank is not None:
            self.ranks.add(line.rank)
        if len(self.lines) < KEPT_LINES:
            self.lines.append(line)
            self.groups = {**groups, **self.groups}


@dataclass
class Evidence:
    """All that was found.

    Attributes:
        hits: by the name of the signature or marker.
        exceptions: in the order of the files and lines, without those that follow from another rank's end.
        secondary: those that do.
        ends: exit codes and which process ended first.
        facts: further ones, such as `incident:hang`, with the words for them.
        looked_at: files with their size in bytes.
        notes: what could not be looked at, or not wholly.
    """

    hits: dict[str, Hits] = field(default_factory=dict)
    exceptions: list[Raised] = field(default_factory=list)
    secondary: list[Raised] = field(default_factory=list)
    ends: EndsSeen = field(default_factory=EndsSeen)
    facts: dict[str, str] = field(default_factory=dict)
    looked_at: list[tuple[str, int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def has(self, name: str) -> bool:
        """Whether a signature's or marker's line, or a fact, was seen."""
        if name == "exception":
            return bool(self.exceptions)
        if name == "exit":
            return self.ends.is_failure
        if name.startswith("frame:"):
            wanted = name.removeprefix("frame:")
            return any(wanted in frame[0] for raised in self.exceptions for frame in raised.frames)
        return name in self.hits or name in self.facts or name in self.ends.facts


@dataclass(frozen=True)
class _Pattern:
    expression: re.Pattern[str]
    name: str
    signature: Signature | None


def _patterns_by_word() -> dict[str, list[_Pattern]]:
    words = tuple(WORDS)
    sources = [(signature.name, signature.patterns, signature) for signature in SIGNATURES]
    sources += [(name, patterns, None) for name, patterns in MARKERS.items()]  # type: ignore[misc]
    found: dict[str, list[_Pattern]] = {word: [] for word in words}
    for name, patterns, signature in sources:
        for text in patterns:
            pattern = _Pattern(re.compile(text), name, signature)
            for word in words:
                if word in text:
                    found[word].append(pattern)
    return found


_BY_WORD = _patterns_by_word()
_LINE_WORDS = re.compile(LINE_WORDS.pattern.decode())


def read_log(stream: BinaryIO, name: str, evidence: Evidence, file_rank: int | None, max_bytes: int) -> int:
    """Add what a log tells; how many bytes of it were read."""
    scanner = Scanner(stream, LINE_WORDS, GRAMS, max_bytes)
    tracebacks = Tracebacks()
    shapes: Counter[bytes] = Counter()
    num_looks, num_passed = 0, 0
    for found in scanner:
        num_looks += 1
        if num_looks > MAX_LOOKS and scanner.read_bytes < max_bytes - TAIL_BYTES and max_bytes < ENDLESS:
            num_passed += 1
            scanner.wants_all = False
            continue
        line = parse(found.raw, name, found.number, file_rank)
        matched = False
        if found.matters:
            matched = _match(line, evidence)
            matched = evidence.ends.take(line) or matched
        else:
            evidence.ends.take_if_table(line)
        raised = tracebacks.take(line) if line.text or tracebacks.is_open else None
        scanner.wants_all = tracebacks.is_open or evidence.ends.wants_more
        if raised is not None:
            _keep(raised, evidence)
        elif found.matters and not tracebacks.is_open and "Traceback" not in line.text:
            _get_used_to(found.raw, shapes, scanner, _MATCHES if matched else _LOOKS)
    if num_passed:
        evidence.notes.append(
            f"{name} speaks of too many errors: {num_passed} lines between its first {MAX_LOOKS} and its end"
            " were passed over"
        )
    return scanner.read_bytes


def _get_used_to(raw: bytes, shapes: Counter[bytes], scanner: Scanner, enough: int) -> None:
    shape = shape_of(raw)[:500]
    shapes[shape] += 1
    if shapes[shape] > enough:
        scanner.forget(raw)
        del shapes[shape]
    if len(shapes) > _KEPT_SHAPES:
        shapes.clear()


def _match(line: LogLine, evidence: Evidence) -> bool:
    matched = set()
    for pattern in _candidates(line.text):
        if pattern.name in matched:
            continue
        match = pattern.expression.search(line.text)
        if match is not None and _counts(match, pattern.signature):
            matched.add(pattern.name)
            evidence.hits.setdefault(pattern.name, Hits()).add(line, match)
    return bool(matched)


def _candidates(text: str) -> Iterator[_Pattern]:
    seen: set[int] = set()
    for word in dict.fromkeys(_LINE_WORDS.findall(text)):
        for pattern in _BY_WORD[word]:
            if id(pattern) not in seen:
                seen.add(id(pattern))
                yield pattern


def _counts(match: re.Match[str], signature: Signature | None) -> bool:
    if signature is None or signature.more_than_half is None:
        return True
    part, whole = (float(match[name]) for name in signature.more_than_half)
    return part > whole / 2


def _keep(raised: Raised, evidence: Evidence) -> None:
    is_secondary = raised.is_ignored or SECONDARY.search(raised.text) is not None
    kept = evidence.secondary if is_secondary else evidence.exceptions
    if len(kept) < KEPT_EXCEPTIONS:
        kept.append(raised)


def merged_ranks(hits: Iterable[Hits]) -> list[int]:
    """All ranks of several hits, in order."""
    return sorted(set().union(*(one.ranks for one in hits)))
