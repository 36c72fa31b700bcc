"""Names for the fp32 weights that stage 0 keeps in its optimizer, found by comparing values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_toolkit.checkpoint.dtypes import DType, convert
from ds_toolkit.checkpoint.reading import read_elements
from ds_toolkit.checkpoint.shards import Slice
from ds_toolkit.checkpoint.tensors import Block, CheckpointMap, Part, Role, StoredTensor, UnnamedTensor

if TYPE_CHECKING:
    from ds_toolkit.checkpoint.dtypes import Array

_COMPARED_ELEMENTS = 2**18

# Tensors whose two copies lie in different orders (convolutions) are compared whole, up to this size.
_REORDERED_BYTES = 64 * 2**20

# Elements that lie end to end, their type, and in which order they are if it is not the row-major one.
_Candidate = tuple[Slice, DType, tuple[Block, ...] | None]


@dataclass(frozen=True)
class _Named:
    """Where the fp32 values of a candidate lie, and in which order if that is not the candidate's."""

    dtype: DType
    place: Slice
    order: tuple[Block, ...] | None
    is_reordered: bool


def name_masters(weights: CheckpointMap) -> CheckpointMap:
    """The same map, 16-bit weights replaced by fp32 ones where these can be told; reads both.

    DeepSpeed saves these fp32 weights by optimizer group and without names. One belongs to a parameter (or to
    what one tensor-parallel rank has of it) if it rounds to exactly the 16-bit values there. Where two have
    the same 16-bit values the model's order decides; a mistake there changes no weight by more than taking
    the 16-bit ones would. `unnamed_masters` of the result holds what was not found.
    """
    candidates = list(_candidates(weights))
    named: dict[Slice, _Named] = {}
    not_found = []
    for group in weights.unnamed_masters:
        cursor = 0
        left = []
        for master in group:
            found = _match(master, candidates, cursor)
            for cursor, place in found:
                low, _, order = candidates[cursor]
                named[low] = _Named(master.dtype, place, master.blocks, is_reordered=order != master.blocks)
            taken = {index for index, _ in found}
            # The cursor stays where one was found and taken out: what followed it comes first the next time.
            candidates = [candidate for index, candidate in enumerate(candidates) if index not in taken]
            if not found:
                left.append(master)
        if left:
            not_found.append(tuple(left))
    tensors = {name: _moved(tensor, named) for name, tensor in weights.tensors.items()}
    return dataclasses.replace(weights, tensors=tensors, unnamed_masters=tuple(not_found))


def _candidates(weights: CheckpointMap) -> Iterator[_Candidate]:
    """What may have an fp32 master, each range once.

    Other ranks have masters of what they share with the first one too; these are found and not used.
    """
    if not weights.unnamed_masters:
        return
    seen: set[Slice] = set()
    shared = (replica.other for replica in weights.replicas)
    for tensor in (*weights.tensors.values(), *shared):
        for place in tensor.slices if tensor.role is Role.TRAINED else ():
            if place not in seen:
                seen.add(place)
                is_whole = place.num_bytes == tensor.num_elements * tensor.dtype.size_bytes
                yield place, tensor.dtype, tensor.parts[0].blocks if is_whole else None


def _moved(tensor: StoredTensor, named: Mapping[Slice, _Named]) -> StoredTensor:
    """The tensor with its fp32 values, if all of them were found."""
    dtypes = {named[place].dtype if place in named else tensor.dtype for place in tensor.slices}
    if len(dtypes) != 1 or tensor.dtype in dtypes:
        return tensor
    first = named[tensor.slices[0]]
    if first.is_reordered:
        part = Part((first.place,), first.order)
        return dataclasses.replace(tensor, dtype=first.dtype, parts=(part,))
    parts = tuple(
        dataclasses.replace(part, slices=tuple(named[place].place for place in part.slices))
        for part in tensor.parts
    )
    return dataclasses.replace(tensor, dtype=dtypes.pop(), parts=parts)


def _match(master: UnnamedTensor, candidates: Sequence[_Candidate], cursor: int) -> list[tuple[int, Slice]]:
    """Indices of candidates, each with that slice of the master which is its fp32 values."""
    item_bytes = master.dtype.size_bytes
    place = master.place
    found: list[tuple[int, Slice]] = []
    consumed_bytes = 0
    while consumed_bytes < place.num_bytes:
        left_bytes = place.num_bytes - consumed_bytes
        for index in _from(cursor, len(candidates)):
            low, dtype, _ = candidates[index]
            num_bytes = low.num_bytes // dtype.size_bytes * item_bytes
            part = Slice(place.path, place.offset_bytes + consumed_bytes, num_bytes)
            fits = num_bytes <= left_bytes if master.is_flat else num_bytes == left_bytes
            if (
                fits
                and all(index != other for other, _ in found)
                and _rounds_to(part, master, candidates[index])
            ):
                found.append((index, part))
                consumed_bytes += num_bytes
                cursor = index
                break
        else:
            return []
    return found


def _from(cursor: int, count: int) -> Iterator[int]:
    yield from range(cursor, count)
    yield from range(min(cursor, count))


def _rounds_to(part: Slice, master: UnnamedTensor, candidate: _Candidate) -> bool:
    low, dtype, order = candidate
    num_elements = low.num_bytes // dtype.size_bytes
    if not dtype.is_convertible or (order != master.blocks and part.num_bytes > _REORDERED_BYTES):
        return False
    orders = (None, None) if order == master.blocks else (master.blocks, order)
    step = _COMPARED_ELEMENTS if order == master.blocks else num_elements
    for start in range(0, num_elements, step):
        count = min(step, num_elements - start)
        full = _row_major(read_elements(part, start, count, master.dtype.size_bytes), master.dtype, orders[0])
        expected = _row_major(read_elements(low, start, count, dtype.size_bytes), dtype, orders[1])
        if convert(full, master.dtype, dtype).tobytes() != expected.tobytes():
            return False
    return True


def _row_major(raw: bytes, dtype: DType, order: tuple[Block, ...] | None) -> Array:
    """Bytes of elements, put from the order in which they lie into the row-major one."""
    import numpy as np

    if order is None:
        return np.frombuffer(raw, np.uint8)
    (block,) = order
    elements = np.frombuffer(raw, f"u{dtype.size_bytes}")
    ordered = np.empty_like(elements)
    views = (
        np.lib.stride_tricks.as_strided(array, block.shape, [stride * dtype.size_bytes for stride in strides])
        for array, strides in ((ordered, block.to_strides), (elements, block.from_strides))
    )
    target, source = views
    target[...] = source
    return ordered.view(np.uint8)
