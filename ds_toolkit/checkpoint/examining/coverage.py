"""Whether the byte ranges of a map hold every tensor exactly once, and nothing is left over but padding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from ds_toolkit.checkpoint.examining.examined import ExaminedFile, ExaminedTag
from ds_toolkit.checkpoint.fields import Fields
from ds_toolkit.checkpoint.layout import ShardKind
from ds_toolkit.checkpoint.layouts.cells import Cell
from ds_toolkit.checkpoint.reductions import TensorRecord
from ds_toolkit.checkpoint.tensors import CheckpointMap, Part, StoredTensor
from ds_toolkit.errors import ToolkitError

_FLAT_KEYS = ("fp32_flat_groups", "single_partition_of_fp32_groups")


def coverage_problems(tag: ExaminedTag, weights: CheckpointMap) -> Iterator[tuple[Path, str]]:
    """Files, and what is wrong with the ranges of theirs that the map names."""
    for tensor in weights.tensors.values():
        yield from _of_tensor(tag.folder, tensor)
    for path, claimed in _ranges(weights.tensors.values()).items():
        yield from _outside(path, claimed)
    for mp_rank, cell in tag.cells.items():
        optimizers = [file for file in tag.of_kind(ShardKind.OPTIMIZER) if file.file.mp_rank == mp_rank]
        ranges = _ranges(cell.tensors.values())
        # Tensors of model states may be views of one another; in a flat group each has bytes of its own.
        for file in optimizers:
            yield from _overlaps(file.file.path, ranges.get(file.file.path, []))
        yield from _gaps(cell, ranges, optimizers)


def _of_tensor(folder: Path, tensor: StoredTensor) -> Iterator[tuple[Path, str]]:
    where = tensor.slices[0].path if tensor.slices else folder
    num_placed = sum(_num_placed(tensor, part) for part in tensor.parts)
    if num_placed != tensor.num_elements:
        yield where, f"{tensor.name} has {tensor.num_elements:,} elements, and {num_placed:,} are there"
    starts = [block.to_offset for part in tensor.parts for block in part.blocks or ()]
    reaches = (
        block.to_offset + sum((n - 1) * step for n, step in zip(block.shape, block.to_strides, strict=True))
        for part in tensor.parts
        for block in part.blocks or ()
        if block.num_elements
    )
    if len(set(starts)) != len(starts) or any(reach >= tensor.num_elements for reach in reaches):
        yield where, f"elements of {tensor.name} are there twice, or have no place in it"


def _num_placed(tensor: StoredTensor, part: Part) -> int:
    if part.blocks is not None:
        return sum(block.num_elements for block in part.blocks)
    return sum(place.num_bytes for place in part.slices) // tensor.dtype.size_bytes


Claimed = list[tuple[int, int, str]]


def _ranges(tensors: Iterable[StoredTensor]) -> dict[Path, Claimed]:
    """By file: begin, end and name of every tensor's byte ranges, in rising order."""
    ranges: dict[Path, Claimed] = {}
    for tensor in tensors:
        for place in tensor.slices:
            end = place.offset_bytes + place.num_bytes
            ranges.setdefault(place.path, []).append((place.offset_bytes, end, tensor.name))
    return {path: sorted(claimed) for path, claimed in ranges.items()}


def _outside(path: Path, claimed: Claimed) -> Iterator[tuple[Path, str]]:
    size_bytes = path.stat().st_size
    for _, end, name in claimed:
        if end > size_bytes:
            yield path, f"{name} reaches to byte {end:,} of a file of {size_bytes:,}"


def _overlaps(path: Path, claimed: Claimed) -> Iterator[tuple[Path, str]]:
    reached, holder = 0, ""
    for begin, end, name in claimed:
        if begin < reached:
            yield path, f"{name} and {holder} are said to lie in the same bytes"
        if end > reached:
            reached, holder = end, name


def _gaps(
    cell: Cell, ranges: dict[Path, Claimed], optimizers: list[ExaminedFile]
) -> Iterator[tuple[Path, str]]:
    if cell.stage == 3:
        # Padding follows every parameter of the last ranks: ceil(numel / ranks) elements a rank.
        trained = [tensor for tensor in cell.tensors.values() if _is_in(tensor, optimizers)]
        ranks = cell.model.dp_world_size
        padded = sum(-(-tensor.num_elements // ranks) * ranks for tensor in trained)
        allowed = padded - sum(tensor.num_elements for tensor in trained)
        found = sum(_num_uncovered(file, ranges) for file in optimizers)
        if found > allowed and optimizers:
            yield optimizers[0].file.path.parent, _gap(found, allowed)
        return
    for file in optimizers:
        padding = _num_padding(file)
        found = _num_uncovered(file, ranges)
        if padding is not None and found > padding:
            yield file.file.path, _gap(found, padding)


def _num_padding(file: ExaminedFile) -> int | None:
    """Elements of padding in the flat groups of stages 1 and 2; None where the file does not tell."""
    if file.shard is None:
        return None
    state = Fields(file.shard, file.root).mapping("optimizer_state_dict")
    try:
        at_the_end = state.numbers("group_paddings")
        between = sum(map(sum, state.rows_of_numbers("param_alignment_paddings")))
    except ToolkitError:
        return None
    if not at_the_end:
        # Versions of DeepSpeed that do not say how much it is.
        return None
    # BF16_Optimizer, which says no stage, leaves the padding of a group where it is.
    return between if "zero_stage" in state else between + sum(at_the_end)


def _is_in(tensor: StoredTensor, files: list[ExaminedFile]) -> bool:
    paths = {file.file.path for file in files}
    return any(place.path in paths for place in tensor.slices)


def _num_uncovered(file: ExaminedFile, ranges: dict[Path, Claimed]) -> int:
    """Elements of a file's flat groups that no tensor claims."""
    state = file.root["optimizer_state_dict"]
    flat = next(state[key] for key in _FLAT_KEYS if key in state)
    groups = [group for group in flat if isinstance(group, TensorRecord)]
    total = sum(group.num_elements for group in groups)
    claimed_bytes = sum(end - begin for begin, end, _ in ranges.get(file.file.path, ()))
    return total - claimed_bytes // groups[0].dtype.size_bytes if groups else 0


def _gap(found: int, allowed: int) -> str:
    return f"{found:,} fp32 weights belong to no tensor, and {allowed:,} of them can be padding"
