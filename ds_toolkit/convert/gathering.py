"""Elements that lie scattered, put together: tensors of several ranks, and those that are not row-major."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from ds_toolkit.checkpoint.dtypes import DType
from ds_toolkit.checkpoint.tensors import Block, Part, StoredTensor
from ds_toolkit.convert.moves import Read
from ds_toolkit.errors import ToolkitError

if TYPE_CHECKING:
    import numpy as np

# Of one tensor: between elements that belong together others may lie, which are read as well.
MAX_SPANNED_BYTES = 256 * 2**20
# Numbers are moved, never looked at.
_AS_BYTES = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


@dataclass(frozen=True)
class Gather:
    """Elements [start, start + num_elements) of a tensor, where they go in the destination, and as what.

    What `moves.Move` is to one byte range, this is to a tensor whose elements lie in several places.
    """

    tensor: StoredTensor
    start: int
    num_elements: int
    destination_offset_bytes: int
    destination_dtype: DType
    member: str

    is_in_order = False

    @property
    def source_dtype(self) -> DType:
        """The type that the elements are stored as."""
        return self.tensor.dtype

    @property
    def sources(self) -> Iterator[Path]:
        """Files that are read."""
        return (place.path for place in self.tensor.slices)

    def part(self, first: int, num_elements: int) -> Gather:
        """Some of the elements, from element `first` of these on."""
        skipped_bytes = first * self.destination_dtype.size_bytes
        return replace(
            self,
            start=self.start + first,
            num_elements=num_elements,
            destination_offset_bytes=self.destination_offset_bytes + skipped_bytes,
        )

    def fill(self, buffer: memoryview, read: Read) -> memoryview:
        """The elements, in the type that they are stored as, at the front of the buffer."""
        raw = buffer[: self.num_elements * self.source_dtype.size_bytes]
        gather(self.tensor, self.start, raw, read)
        return raw


def gather(tensor: StoredTensor, start: int, out: memoryview, read: Read) -> None:
    """Put elements of a tensor into a buffer, from element `start` on, as many as it holds.

    Raises:
        ToolkitError: they lie too far apart to be read at once.
    """
    import numpy as np

    item_bytes = tensor.dtype.size_bytes
    whole = np.frombuffer(out, _AS_BYTES[item_bytes])
    stop = start + len(whole)
    for part in tensor.parts:
        blocks = part.blocks or (Block((tensor.num_elements,), 0, (1,), 0, (1,)),)
        for block in (inside for whole_block in blocks for inside in whole_block.between(start, stop)):
            spanned = _spanned(tensor, part, block, read)
            taken = np.lib.stride_tricks.as_strided(
                spanned, block.shape, [stride * item_bytes for stride in block.from_strides]
            )
            target = np.lib.stride_tricks.as_strided(
                whole[block.to_offset - start :],
                block.shape,
                [stride * item_bytes for stride in block.to_strides],
            )
            target[...] = taken


def _spanned(tensor: StoredTensor, part: Part, block: Block, read: Read) -> np.ndarray:
    """The part's elements from the block's first to its last."""
    import numpy as np

    item_bytes = tensor.dtype.size_bytes
    num_bytes = block.num_spanned * item_bytes
    if num_bytes > MAX_SPANNED_BYTES:
        raise ToolkitError(
            f"the elements of {tensor.name} lie too far apart",
            where=part.slices[0].path,
            why=f"shape {tensor.shape} in an order that would take {num_bytes:,} bytes of memory",
            fix="save the model with contiguous tensors",
        )
    data = bytearray(num_bytes)
    _read_range(part, block.from_offset * item_bytes, memoryview(data), read)
    return np.frombuffer(data, _AS_BYTES[item_bytes])


def _read_range(part: Part, offset_bytes: int, out: memoryview, read: Read) -> None:
    ends = list(accumulate(place.num_bytes for place in part.slices))
    index = bisect_right(ends, offset_bytes)
    num_read = 0
    while num_read < len(out):
        place, end = part.slices[index], ends[index]
        inside = offset_bytes + num_read - (end - place.num_bytes)
        count = min(place.num_bytes - inside, len(out) - num_read)
        read(place.path, place.offset_bytes + inside, out[num_read : num_read + count])
        num_read += count
        index += 1
