"""Whether the fp32 weights of the optimizer states are those that the model states hold in fewer bits.

Stages 1 and 2 save every trained weight twice, and after each step the one is the other rounded. No other
trace tells two runs apart that have the same settings and the same step.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ds_toolkit.checkpoint.dtypes import DType, convert
from ds_toolkit.checkpoint.examining.examined import ExaminedTag
from ds_toolkit.checkpoint.examining.values import are_finite
from ds_toolkit.checkpoint.layouts.cells import Cell
from ds_toolkit.checkpoint.reading import read_elements
from ds_toolkit.checkpoint.reductions import TensorRecord
from ds_toolkit.checkpoint.shards import Slice
from ds_toolkit.checkpoint.tensors import StoredTensor

_COMPARED_ELEMENTS = 2**19


def differing_masters(tag: ExaminedTag, doubtful: Iterable[Path] = ()) -> dict[Path, str]:
    """Optimizer states, and how much of the model they contradict; `doubtful` files are left out."""
    left_out = set(doubtful)
    found: dict[Path, str] = {}
    for cell in tag.cells.values():
        if cell.stage in (1, 2) and cell.model.shard.path not in left_out:
            found |= _of_cell(cell, left_out)
    return found


def _of_cell(cell: Cell, left_out: set[Path]) -> dict[Path, str]:
    compared: dict[Path, int] = {}
    differing: dict[Path, int] = {}
    for name, tensor in cell.tensors.items():
        record = cell.model.module.get(name)
        if record is None or not _comparable(tensor, record, cell):
            continue
        copy = cell.model.shard.locate(record)
        position = 0
        for place in tensor.slices:
            count = place.num_bytes // tensor.dtype.size_bytes
            if place.path not in left_out:
                compared[place.path] = compared.get(place.path, 0) + 1
                same = _num_differing(place, tensor.dtype, copy, record.dtype, position, count) == 0
                differing[place.path] = differing.get(place.path, 0) + (not same)
            position += count
    model = cell.model.shard.path
    if differing and all(differing.values()) and len(differing) > 1:
        # It is the model that stands alone.
        return {model: f"its weights are not those of the optimizer states, of any of {len(differing)} ranks"}
    return {
        path: f"its fp32 weights are not those of {model.name}: {count} of {compared[path]} tensors differ"
        for path, count in differing.items()
        if count
    }


def _comparable(tensor: StoredTensor, record: TensorRecord, cell: Cell) -> bool:
    return (
        tensor.is_plain
        and record.is_contiguous
        and record.shape == tensor.shape
        and tensor.dtype.is_convertible
        and record.dtype.is_convertible
        and any(place.path != cell.model.shard.path for place in tensor.slices)
    )


def _num_differing(
    full: Slice, dtype: DType, copy: Slice, copy_dtype: DType, position: int, count: int
) -> int:
    """Elements of a slice that, rounded, are not those of the copy from `position` on."""
    import numpy as np

    unsigned = f"<u{copy_dtype.size_bytes}"
    num_differing = 0
    for start in range(0, count, _COMPARED_ELEMENTS):
        length = min(_COMPARED_ELEMENTS, count - start)
        raw = np.frombuffer(read_elements(full, start, length, dtype.size_bytes), np.uint8)
        rounded = convert(raw, dtype, copy_dtype).view(unsigned)
        expected = np.frombuffer(
            read_elements(copy, position + start, length, copy_dtype.size_bytes), unsigned
        )
        unlike = rounded != expected
        if unlike.any():
            # What is no number has a rule of its own, and any NaN stands for every other.
            unlike &= are_finite(rounded, copy_dtype) & are_finite(expected, copy_dtype)
            num_differing += int(np.count_nonzero(unlike))
    return num_differing
