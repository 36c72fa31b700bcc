"""Finding the few lines that matter in gigabytes.

Numbers made of four bytes each are compared with those of the words that matter, by numpy over whole pieces
of the file. Lines that are hit are told apart by their shape, which is the line without digits; shapes that
turned out to be dull are passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

PIECE_BYTES = 2**22
# Longer lines are cut into parts of this size, which share a number.
MAX_LINE_BYTES = 2**16
GRAM_BYTES = 4
_MAX_DULL_BYTES = 2**24
_FACTOR = np.uint32(2654435761)
_SHIFT = np.uint32(16)


class RawLine(NamedTuple):
    """A line that may matter, or follows one while its reader asked for that."""

    number: int
    raw: bytes
    matters: bool


class _Piece(NamedTuple):
    """Part of a file with the ends of its lines, and how many line feeds stand before each end."""

    data: bytes
    ends: npt.NDArray[np.int64]
    feeds: npt.NDArray[np.int64]

    def line(self, place: int) -> bytes:
        begin = 0 if place == 0 else int(self.ends[place - 1]) + 1
        end = int(self.ends[place]) if place < len(self.ends) else len(self.data)
        return self.data[begin:end]

    def number(self, place: int) -> int:
        return int(self.feeds[place - 1]) if place else 0


class Scanner:
    """Lines of a stream that hold a word of a list; `wants_all` makes it hand out every line that follows."""

    def __init__(
        self, stream: BinaryIO, words: re.Pattern[bytes], grams: Sequence[bytes], max_bytes: int
    ) -> None:
        self._stream = stream
        self._words = words
        self._grams = np.unique(np.frombuffer(b"".join(grams), dtype="<u4"))
        self._table = np.zeros(2**16, dtype=bool)
        self._table[(self._grams * _FACTOR) >> _SHIFT] = True
        self._left_bytes = max_bytes
        self._dull: set[bytes] = set()
        self._dull_bytes = 0
        self._number = 1
        self.wants_all = False
        self.read_bytes = 0

    def __iter__(self) -> Iterator[RawLine]:
        rest = b""
        while read := self._read():
            # A carriage return begins a new state of the same line, as progress bars draw them.
            data = rest + read
            cut = max(data.rfind(b"\n"), data.rfind(b"\r", 0, len(data) - 1)) + 1
            if cut == 0:
                cut = len(data) - len(data) % MAX_LINE_BYTES
            rest = data[cut:]
            yield from self._lines(data[:cut])
        yield from self._lines(rest)

    def forget(self, raw: bytes) -> None:
        """Lines of this shape do not matter after all."""
        if self._dull_bytes > _MAX_DULL_BYTES:
            self._dull.clear()
            self._dull_bytes = 0
        self._dull.add(shape_of(raw))
        self._dull_bytes += len(raw) + 100

    def _read(self) -> bytes:
        read = self._stream.read(min(PIECE_BYTES, self._left_bytes))
        self._left_bytes -= len(read)
        self.read_bytes += len(read)
        return read

    def _lines(self, data: bytes) -> Iterator[RawLine]:
        first = self._number
        self._number += data.count(b"\n")
        hits = self._hits(data)
        if not len(hits) and not self.wants_all:
            return
        marks = np.frombuffer(data, dtype=np.uint8)
        ends = np.flatnonzero((marks == ord("\n")) | (marks == ord("\r")))
        piece = _Piece(data, ends, np.cumsum(marks[ends] == ord("\n")))
        places = np.unique(np.searchsorted(ends, hits)).tolist()
        wanted = 0 if self.wants_all else -1
        for place in [*places, None]:
            while self.wants_all and wanted <= len(ends) and (place is None or wanted < place):
                line = piece.line(wanted)
                yield RawLine(first + piece.number(wanted), line[:MAX_LINE_BYTES], False)
                wanted += 1
            if place is not None:
                yield from self._hit(piece, place, first)
                wanted = place + 1

    def _hit(self, piece: _Piece, place: int, first: int) -> Iterator[RawLine]:
        line = piece.line(place)
        if len(line) <= MAX_LINE_BYTES:
            matters = shape_of(line) not in self._dull and self._words.search(line) is not None
            if matters or self.wants_all:
                yield RawLine(first + piece.number(place), line, matters)
            return
        end = -1
        for match in self._words.finditer(line):
            if match.start() > end:
                # Some of what stands before the word, and more of what follows.
                begin = max(0, match.start() - 1000)
                end = begin + 4000
                yield RawLine(first + piece.number(place), line[begin:end], True)

    def _hits(self, data: bytes) -> npt.NDArray[np.int64]:
        """Where a gram begins, in no order."""
        found = []
        for offset in range(GRAM_BYTES):
            count = (len(data) - offset) // GRAM_BYTES
            if count > 0:
                numbers = np.frombuffer(data, dtype="<u4", count=count, offset=offset)
                likely = np.flatnonzero(self._table.take((numbers * _FACTOR) >> _SHIFT))
                sure = likely[np.isin(numbers[likely], self._grams)]
                found.append(sure * GRAM_BYTES + offset)
        return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)


def shape_of(raw: bytes) -> bytes:
    """A line without what differs from step to step."""
    return raw[:MAX_LINE_BYTES].translate(None, b"0123456789.-+")
