"""Which bytes of a tag's files belong to which tensor, for weights, buffers and states of the optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ds_toolkit.checkpoint.dtypes import DType
from ds_toolkit.checkpoint.examining.examined import ExaminedFile, ExaminedTag, tensors_in
from ds_toolkit.checkpoint.examining.headers import base_state
from ds_toolkit.checkpoint.examining.values import can_be_counted
from ds_toolkit.checkpoint.layout import ShardKind
from ds_toolkit.checkpoint.reductions import TensorRecord
from ds_toolkit.checkpoint.shards import Shard, Slice
from ds_toolkit.checkpoint.tensors import CheckpointMap
from ds_toolkit.errors import ToolkitError

_KEYS_OF_WEIGHTS = ("module.", "frozen_param_fragments.")
_FLAT_KEYS = ("fp32_flat_groups", "single_partition_of_fp32_groups")


@dataclass(frozen=True)
class NamedRange:
    """The bytes [begin, end) of a file: `what` (weight, exp_avg) of a tensor, in elements of `dtype`.

    `may_be_padding` if it is a part of a flat group that is not known to belong to a tensor.
    """

    begin: int
    end: int
    dtype: DType
    name: str
    what: str
    is_buffer: bool = False
    may_be_padding: bool = False


def named_ranges(tag: ExaminedTag) -> dict[Path, list[NamedRange]]:
    """By file: the ranges of its tensors of floating type, in rising order, none twice.

    Padding is left out where it is known: DeepSpeed saves whatever its memory held before.
    """
    tensors = [tensor for cell in tag.cells.values() for tensor in cell.tensors.values()]
    if isinstance(tag.weights, CheckpointMap):
        tensors += tag.weights.tensors.values()
    by_path: dict[Path, dict[Slice, str]] = {}
    for tensor in tensors:
        for place in tensor.slices:
            by_path.setdefault(place.path, {}).setdefault(place, tensor.name)
    ranges = {}
    for file in tag.files:
        if file.shard is not None:
            beside = dict(_beside_groups(file))
            weights = by_path.get(file.file.path, {})
            named = [*_named(file.shard, beside, weights)]
            if file.file.kind is ShardKind.PARAMETER:
                named += _of_parameter(file, file.shard)
            else:
                named += _by_key(file, file.shard, beside, bool(weights))
            ranges[file.file.path] = _swept(named)
    return ranges


def _beside_groups(file: ExaminedFile) -> Iterator[tuple[TensorRecord, tuple[TensorRecord, str]]]:
    """Flat fp32 groups, and the states of theirs: each tensor, its group, and what it is to a weight."""
    state = file.root.get("optimizer_state_dict")
    if file.file.kind is not ShardKind.OPTIMIZER or not isinstance(state, dict):
        return
    flat: list[object] = next((state[key] for key in _FLAT_KEYS if isinstance(state.get(key), list)), [])
    groups = [group for group in flat if isinstance(group, TensorRecord)]
    yield from ((group, (group, "weight")) for group in groups)
    states = base_state(state).get("state")
    # One state for each flat group, in the same order; where it is not so, the states have no names.
    if not isinstance(states, dict) or len(states) != len(groups):
        return
    for group, entry in zip(groups, states.values(), strict=True):
        for key, record in entry.items() if isinstance(entry, dict) else ():
            if isinstance(record, TensorRecord) and record.num_elements >= max(group.num_elements, 2):
                yield record, (group, str(key))


def _named(
    shard: Shard, beside: Mapping[TensorRecord, tuple[TensorRecord, str]], weights: Mapping[Slice, str]
) -> Iterator[NamedRange]:
    for record, (group, what) in beside.items():
        yield from _shifted(shard, record, what, group, weights)


def _by_key(
    file: ExaminedFile, shard: Shard, beside: Mapping[TensorRecord, object], weights_known: bool
) -> Iterator[NamedRange]:
    """Every tensor of a file, under the keys that lead to it where it has no name of its own."""
    for path, record in tensors_in(file.root):
        name = path
        for prefix in _KEYS_OF_WEIGHTS:
            name = name.removeprefix(prefix)
        place = _span(shard, record)
        if place is None or (record in beside and weights_known):
            continue
        what = "weight" if path != name or file.file.kind is ShardKind.LAYER else "value"
        yield _range(place, record.dtype, name, what, name in file.buffer_names, record in beside)


def _of_parameter(file: ExaminedFile, shard: Shard) -> Iterator[NamedRange]:
    """The tensors of a universal checkpoint's file, called after its folder."""
    path = Path(file.name)
    what = "weight" if path.stem == "fp32" else path.stem
    for _, record in tensors_in(shard.root):
        place = _span(shard, record)
        if place is not None:
            yield _range(place, record.dtype, "/".join(path.parts[1:-1]) or path.name, what)


def _shifted(
    shard: Shard, record: TensorRecord, what: str, group: TensorRecord, weights: Mapping[Slice, str]
) -> Iterator[NamedRange]:
    """The parts of a state that belong to the weights of a group: elements stand in the same order."""
    place, base = _span(shard, group), _span(shard, record)
    if place is None or base is None:
        return
    end, item_bytes = place.offset_bytes + place.num_bytes, record.dtype.size_bytes
    for part, name in weights.items():
        if place.offset_bytes <= part.offset_bytes < end:
            first = (part.offset_bytes - place.offset_bytes) // group.dtype.size_bytes
            count = part.num_bytes // group.dtype.size_bytes
            moved = Slice(shard.path, base.offset_bytes + first * item_bytes, count * item_bytes)
            yield _range(moved, record.dtype, name, what)


def _span(shard: Shard, record: TensorRecord) -> Slice | None:
    """Where a tensor of floating type lies, with what is between its elements."""
    if not record.num_elements or not can_be_counted(record.dtype):
        return None
    try:
        return shard.span(record)
    except ToolkitError:
        return None


def _range(
    place: Slice,
    dtype: DType,
    name: str,
    what: str,
    is_buffer: bool = False,
    may_be_padding: bool = False,
) -> NamedRange:
    end = place.offset_bytes + place.num_bytes
    return NamedRange(place.offset_bytes, end, dtype, name, what, is_buffer, may_be_padding)


def _swept(found: Iterable[NamedRange]) -> list[NamedRange]:
    """In rising order; of ranges that share bytes (tied weights) the one that came first has them."""
    kept: list[NamedRange] = []
    for range_ in sorted(found, key=lambda range_: range_.begin):
        reached = kept[-1].end if kept else 0
        if range_.end > reached:
            kept.append(replace(range_, begin=max(range_.begin, reached)))
    return kept
