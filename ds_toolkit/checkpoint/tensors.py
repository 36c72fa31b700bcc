"""A checkpoint as a map: every weight's name, shape and dtype, and the byte ranges that hold it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from ds_toolkit.checkpoint.dtypes import DType
from ds_toolkit.checkpoint.shards import Slice


class Role(Enum):
    """What a tensor is to the model."""

    TRAINED = "trained"
    FROZEN = "frozen"
    BUFFER = "buffer"


@dataclass(frozen=True)
class Block:
    """A box of elements: where they are in a part, and where they go in the tensor; see `block_in_order`.

    The element at `(i, j, ...)`, below `shape`, is number `from_offset + i * from_strides[0] + ...` of the
    part's elements and number `to_offset + i * to_strides[0] + ...` of the tensor's, both in row-major order.
    """

    shape: tuple[int, ...]
    from_offset: int
    from_strides: tuple[int, ...]
    to_offset: int
    to_strides: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Elements that the box holds."""
        return math.prod(self.shape)

    @property
    def num_spanned(self) -> int:
        """Elements of the part from the first that is needed to the last, whatever lies between included."""
        steps = ((size - 1) * stride for size, stride in zip(self.shape, self.from_strides, strict=True))
        return 1 + sum(steps)

    def between(self, start: int, stop: int) -> Iterator[Block]:
        """The boxes that hold what goes to the tensor's elements [start, stop)."""
        reach = self._reach(0)
        if self.num_elements == 0 or self.to_offset >= stop or self.to_offset + reach < start:
            return
        if self.to_offset >= start and self.to_offset + reach < stop:
            yield self
            return
        size, step, inner = self.shape[0], self.to_strides[0], self._reach(1)
        # Of the outermost index, those that go there wholly are a range; beside it some may go there in part.
        first, last = (start - self.to_offset - inner) // step, (stop - 1 - self.to_offset) // step
        first_whole = max(-(-(start - self.to_offset) // step), 0)
        end_whole = min((stop - 1 - self.to_offset - inner) // step + 1, size)
        if first_whole < end_whole:
            yield self._narrowed(first_whole, end_whole)
        for index in range(max(first, 0), min(last + 1, size)):
            if not first_whole <= index < end_whole:
                yield from self._narrowed(index, index + 1)._without_first().between(start, stop)

    def _reach(self, first_dimension: int) -> int:
        sizes, strides = self.shape[first_dimension:], self.to_strides[first_dimension:]
        return sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))

    def _narrowed(self, first: int, end: int) -> Block:
        return dataclasses.replace(
            self,
            shape=(end - first, *self.shape[1:]),
            from_offset=self.from_offset + first * self.from_strides[0],
            to_offset=self.to_offset + first * self.to_strides[0],
        )

    def _without_first(self) -> Block:
        return dataclasses.replace(
            self, shape=self.shape[1:], from_strides=self.from_strides[1:], to_strides=self.to_strides[1:]
        )


@dataclass(frozen=True)
class Part:
    """Elements of a tensor that lie end to end in `slices`, and where they go.

    Without blocks they are the whole tensor, one element after the other.
    """

    slices: tuple[Slice, ...]
    blocks: tuple[Block, ...] | None = None


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Elements between neighbours along each dimension of a tensor without gaps, the last one fastest."""
    return tuple(math.prod(shape[dimension + 1 :]) for dimension in range(len(shape)))


def block_in_order(
    shape: Sequence[int],
    from_offset: int,
    from_strides: Sequence[int],
    to_offset: int,
    to_strides: Sequence[int],
) -> Block:
    """A block whose dimensions stand in the order of the tensor that it goes to, the slowest first."""
    wanted = [
        (to_stride, size, from_stride)
        for size, from_stride, to_stride in zip(shape, from_strides, to_strides, strict=True)
        if size != 1
    ]
    wanted.sort(key=lambda dimension: -dimension[0])
    return Block(
        tuple(size for _, size, _ in wanted),
        from_offset,
        tuple(stride for _, _, stride in wanted),
        to_offset,
        tuple(stride for stride, _, _ in wanted),
    )


@dataclass(frozen=True)
class StoredTensor:
    """A tensor whose elements, of type `dtype`, lie in its parts, each of them once."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    parts: tuple[Part, ...]
    role: Role

    @property
    def num_elements(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[Slice, ...]:
        """The byte ranges that hold it, with what lies between its elements."""
        return tuple(place for part in self.parts for place in part.slices)

    @property
    def is_plain(self) -> bool:
        """Whether its elements are those of `slices` end to end, in row-major order."""
        return all(part.blocks is None for part in self.parts)


@dataclass(frozen=True)
class Replica:
    """What another rank has of elements that were taken from `kept`; both should be equal, bit for bit.

    `if_different` says why the checkpoint cannot be read if they are not; without it `kept` is taken.
    """

    kept: StoredTensor
    other: StoredTensor
    if_different: str | None = None


@dataclass(frozen=True)
class UnnamedTensor:
    """fp32 weights that stage 0 keeps in its optimizer, where they have no name.

    `is_flat` if they are those of several parameters, one after the other; `blocks` as those of a `Part`.
    """

    shape: tuple[int, ...]
    dtype: DType
    place: Slice
    is_flat: bool
    blocks: tuple[Block, ...] | None = None


@dataclass(frozen=True)
class CheckpointMap:
    """What a tag holds, without its data.

    Attributes:
        tensors: by name, each tensor once.
        aliases: further names of tied weights, and which tensor they stand for.
        names: all names in the order of the model's state dict, aliases included.
        shards: the files that were read.
        dp_world_size, tp_world_size, pp_world_size: ranks that share a batch, a tensor, the layers.
        unnamed_masters: stage 0 in 16 bits only: fp32 weights by optimizer group. `tensors` then holds the
            16-bit weights.
        replicas: what further ranks have of the same weights.
        left_out: entries of the model's state dict that are no tensors (`_extra_state` of some modules).
        without_frozen: the files say that they were saved with `exclude_frozen_parameters`. Below stage 2
            they cannot say it. Which weights were left out is not recorded, but for tied ones.
        missing: tied weights that were left out: a name, and the name that it shares its tensor with.
        notes: what a reader should know of how the map was made.
    """

    folder: Path
    stage: int
    step: int
    dp_world_size: int
    ds_version: str | None
    tensors: Mapping[str, StoredTensor]
    aliases: Mapping[str, str]
    names: tuple[str, ...]
    shards: tuple[Path, ...]
    tp_world_size: int = 1
    pp_world_size: int = 1
    unnamed_masters: tuple[tuple[UnnamedTensor, ...], ...] = ()
    replicas: tuple[Replica, ...] = ()
    left_out: tuple[str, ...] = ()
    without_frozen: bool = False
    missing: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
