"""Boxes of elements in a tensor, and the proof that some of them are the whole tensor, each element once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from ds_toolkit.checkpoint.tensors import row_major_strides

# Each box is compared with each other one; what splits a tensor in practice makes a few for each rank.
MAX_BOXES = 2000


@dataclass(frozen=True)
class Box:
    """The elements whose index is in [start, start + size) along each dimension of a tensor."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Elements that it holds."""
        return math.prod(self.size)

    def offset(self, shape: Sequence[int]) -> int:
        """The number of its first element among those of a tensor of this shape, in row-major order."""
        strides = row_major_strides(shape)
        return sum(first * stride for first, stride in zip(self.start, strides, strict=True))

    def overlaps(self, other: Box) -> bool:
        """Whether an element is in both."""
        sides = zip(self.start, self.size, other.start, other.size, strict=True)
        return all(
            max(first, second) < min(first + first_size, second + second_size)
            for first, first_size, second, second_size in sides
        )

    def lies_in(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape has all its elements."""
        return len(shape) == len(self.start) and all(
            0 <= first <= first + size <= end
            for first, size, end in zip(self.start, self.size, shape, strict=True)
        )


def whole(shape: Sequence[int]) -> Box:
    """All elements of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def strided_box(shape: Sequence[int], size: Sequence[int], offset: int, strides: Sequence[int]) -> Box | None:
    """The box that a strided view of a row-major tensor is; None if the view is no box of that tensor.

    Args:
        shape: the tensor's.
        size, offset, strides: the view's, as `torch.as_strided` takes them; it has an element at least.
    """
    if len(size) != len(shape) or len(strides) != len(shape) or offset < 0 or math.prod(shape) == 0:
        return None
    start = []
    for dimension, stride in enumerate(row_major_strides(shape)):
        if size[dimension] != 1 and strides[dimension] != stride:
            return None
        start.append(offset // stride)
        offset %= stride
    box = Box(tuple(start), tuple(size))
    return box if offset == 0 and box.lies_in(shape) else None


def why_not_covered(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """What keeps the boxes from being the whole tensor, each element once; None if they are.

    Boxes inside the tensor that do not overlap and have as many elements as the tensor leave none out.
    """
    if len(boxes) > MAX_BOXES:
        return f"{len(boxes)} pieces are absurdly many"
    for box in boxes:
        if not box.lies_in(shape):
            return f"the piece from {box.start} of size {box.size} reaches out of the shape {tuple(shape)}"
    for one, other in combinations(boxes, 2):
        if one.overlaps(other):
            return f"two pieces, from {one.start} and from {other.start}, overlap"
    num_covered = sum(box.num_elements for box in boxes)
    if num_covered != math.prod(shape):
        return f"the pieces have {num_covered} of the {math.prod(shape)} elements of the shape {tuple(shape)}"
    return None
