"""What a plan of copying consists of: byte ranges of files, where they go, and blocks of the output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Protocol, TypeVar

from ds_toolkit.checkpoint.dtypes import DType

# Reads the bytes of a file from an offset on, as many as the buffer holds.
Read = Callable[[Path, int, memoryview], None]

Kind = TypeVar("Kind", bound="Elements")


class Elements(Protocol):
    """Elements of a tensor that stand together in the destination: a `Move`, or a `gathering.Gather`."""

    @property
    def source_dtype(self) -> DType:
        """The type that they are stored as."""
        ...

    @property
    def destination_dtype(self) -> DType:
        """The type that they are written as."""
        ...

    @property
    def destination_offset_bytes(self) -> int:
        """Where the first goes."""
        ...

    @property
    def num_elements(self) -> int:
        """How many they are."""
        ...

    @property
    def member(self) -> str:
        """What they are a part of; its CRC-32 may be wanted."""
        ...

    @property
    def is_in_order(self) -> bool:
        """Whether they lie in one range of one file, as they are to stand."""
        ...

    @property
    def sources(self) -> Iterator[Path]:
        """Files that are read."""
        ...

    def part(self: Kind, first: int, num_elements: int) -> Kind:
        """Some of them, from element `first` of these on."""
        ...

    def fill(self, buffer: memoryview, read: Read) -> memoryview:
        """Their bytes in the type that they are stored as, at the front of the buffer."""
        ...


@dataclass(frozen=True)
class Move:
    """A byte range of a source file, where it goes in the destination, and as what.

    `num_bytes` counts source bytes, whole elements of `source_dtype`. Moves with the same `member` are
    consecutive parts of one member of the destination.
    """

    source: Path
    source_offset_bytes: int
    num_bytes: int
    source_dtype: DType
    destination_offset_bytes: int
    destination_dtype: DType
    member: str

    is_in_order = True

    @property
    def num_elements(self) -> int:
        """How many are moved."""
        return self.num_bytes // self.source_dtype.size_bytes

    @property
    def sources(self) -> Iterator[Path]:
        """The file that is read."""
        yield self.source

    def part(self, first: int, num_elements: int) -> Move:
        """Some of the elements, from element `first` on."""
        item_bytes = self.source_dtype.size_bytes
        skipped_bytes = first * self.destination_dtype.size_bytes
        return replace(
            self,
            source_offset_bytes=self.source_offset_bytes + first * item_bytes,
            num_bytes=num_elements * item_bytes,
            destination_offset_bytes=self.destination_offset_bytes + skipped_bytes,
        )

    def fill(self, buffer: memoryview, read: Read) -> memoryview:
        """The bytes as they are in the source, at the front of the buffer."""
        raw = buffer[: self.num_bytes]
        read(self.source, self.source_offset_bytes, raw)
        return raw


@dataclass(frozen=True)
class Block:
    """A stretch of the destination, and the elements that go there, in the order of their places."""

    pieces: tuple[Elements, ...]
    is_whole: bool

    @property
    def start_bytes(self) -> int:
        """Where the first element goes."""
        return self.pieces[0].destination_offset_bytes

    def runs(self) -> Iterator[tuple[int, int]]:
        """First and last-but-one byte of what stands together; between runs are bytes of others."""
        start = end = self.start_bytes
        for piece in self.pieces:
            if piece.destination_offset_bytes != end:
                yield start, end
                start = piece.destination_offset_bytes
            end = piece.destination_offset_bytes + num_written_bytes(piece)
        yield start, end


def num_written_bytes(elements: Elements) -> int:
    """Bytes in the destination."""
    return elements.num_elements * elements.destination_dtype.size_bytes


def pieces(elements: Kind, piece_bytes: int) -> Iterator[Kind]:
    """The same elements in pieces of at most so many bytes of the source, but at least one element."""
    step = max(piece_bytes // elements.source_dtype.size_bytes, 1)
    for first in range(0, elements.num_elements, step):
        yield elements.part(first, min(step, elements.num_elements - first))


def blocks(plan: Iterable[Elements], block_bytes: int) -> Iterator[Block]:
    """Cut a plan where the destination's multiples of `block_bytes` are.

    An element that lies across such a place belongs to the block that it begins in. A piece takes no more of
    the source than a block either. `is_whole` says that the block's elements fill it from end to end.
    """
    cut = (piece for elements in plan for piece in _cut(elements, block_bytes))
    for number, group in groupby(cut, lambda piece: piece.destination_offset_bytes // block_bytes):
        block = Block(tuple(group), is_whole=False)
        filled = (number * block_bytes, (number + 1) * block_bytes)
        yield replace(block, is_whole=list(block.runs()) == [filled])


def _cut(elements: Elements, block_bytes: int) -> Iterator[Elements]:
    item_bytes = elements.destination_dtype.size_bytes
    first = 0
    while first < elements.num_elements:
        offset_bytes = elements.destination_offset_bytes + first * item_bytes
        room_bytes = block_bytes - offset_bytes % block_bytes
        num_elements = min(-(-room_bytes // item_bytes), elements.num_elements - first)
        yield from pieces(elements.part(first, num_elements), block_bytes)
        first += num_elements
