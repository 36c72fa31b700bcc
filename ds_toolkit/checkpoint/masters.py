"""Names for the fp32 weights that stage 0 keeps in its optimizer, found by comparing values."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ds_toolkit.checkpoint.dtypes import convert
from ds_toolkit.checkpoint.shards import Slice
from ds_toolkit.checkpoint.tensors import CheckpointMap, Role, StoredTensor, UnnamedTensor
from ds_toolkit.errors import ToolkitError

_COMPARED_ELEMENTS = 2**18


def name_masters(weights: CheckpointMap) -> CheckpointMap:
    """The same map, 16-bit weights replaced by fp32 ones where these can be told; reads both.

    DeepSpeed saves these fp32 weights by optimizer group and without names. One belongs to a parameter if it
    rounds to exactly the parameter's 16-bit values. Where two parameters have the same 16-bit values the
    model's order decides; a mistake there changes no weight by more than taking the 16-bit ones would.
    `unnamed_masters` of the result holds what was not found.
    """
    tensors = dict(weights.tensors)
    candidates = [
        tensor for tensor in tensors.values() if tensor.role is Role.TRAINED and tensor.num_elements
    ]
    not_found = []
    for group in weights.unnamed_masters:
        cursor = 0
        left = []
        for master in group:
            found = _match(master, candidates, cursor)
            for cursor, place in found:
                named = candidates[cursor]
                tensors[named.name] = named.moved_to(master.dtype, place, master.blocks)
            taken = {index for index, _ in found}
            # The cursor stays where one was found and taken out: what followed it comes first the next time.
            candidates = [tensor for index, tensor in enumerate(candidates) if index not in taken]
            if not found:
                left.append(master)
        if left:
            not_found.append(tuple(left))
    return dataclasses.replace(weights, tensors=tensors, unnamed_masters=tuple(not_found))


def _match(master: UnnamedTensor, candidates: Sequence[StoredTensor], cursor: int) -> list[tuple[int, Slice]]:
    """Indices of candidates, each with that slice of the master which is its fp32 values."""
    item_bytes = master.dtype.size_bytes
    place = master.place
    found: list[tuple[int, Slice]] = []
    consumed_bytes = 0
    while consumed_bytes < place.num_bytes:
        for index in _from(cursor, len(candidates)):
            candidate = candidates[index]
            num_bytes = candidate.num_elements * item_bytes
            part = Slice(place.path, place.offset_bytes + consumed_bytes, num_bytes)
            fits = num_bytes <= place.num_bytes - consumed_bytes
            fits = fits and (master.is_flat or candidate.shape == master.shape)
            # Values are compared as they lie there, which must be the same order.
            fits = fits and candidate.parts[0].blocks == master.blocks
            if fits and all(index != other for other, _ in found) and _rounds_to(part, master, candidate):
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


def _rounds_to(part: Slice, master: UnnamedTensor, candidate: StoredTensor) -> bool:
    import numpy as np

    if not candidate.dtype.is_convertible:
        return False
    (low,) = candidate.slices
    for start in range(0, candidate.num_elements, _COMPARED_ELEMENTS):
        count = min(_COMPARED_ELEMENTS, candidate.num_elements - start)
        full = np.frombuffer(_read(part, start, count, master.dtype.size_bytes), np.uint8)
        expected = _read(low, start, count, candidate.dtype.size_bytes)
        if convert(full, master.dtype, candidate.dtype).tobytes() != expected:
            return False
    return True


def _read(place: Slice, start: int, count: int, item_bytes: int) -> bytes:
    data = _pread(place.path, count * item_bytes, place.offset_bytes + start * item_bytes)
    if len(data) != count * item_bytes:
        raise ToolkitError("a checkpoint file became shorter while it was read", where=place.path)
    return data


def _pread(path: Path, num_bytes: int, offset_bytes: int) -> bytes:
    with path.open("rb") as file:
        return os.pread(file.fileno(), num_bytes, offset_bytes)
