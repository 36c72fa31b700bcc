"""Where a parameter's elements lie when ZeRO has split them over the data-parallel ranks.

Stages 1 and 2 flatten a group of parameters into one vector, pad it, and give each rank an equal part of it
(runtime/zero/stage_1_and_2.py, `get_data_parallel_partitions`). Stage 3 gives each rank an equal part of each
parameter, ceil(numel / ranks) elements, the last one padded (runtime/zero/partition_parameters.py), and keeps
the parts of one rank one after the other, cut into sub-groups.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import TypeVar

from ds_toolkit.checkpoint.dtypes import DType
from ds_toolkit.checkpoint.layout import unsupported
from ds_toolkit.checkpoint.layouts.states import ModelStates, OptimizerStates
from ds_toolkit.checkpoint.reductions import TensorRecord
from ds_toolkit.checkpoint.shards import Shard, Slice
from ds_toolkit.errors import ToolkitError

T = TypeVar("T")
# Where DeepSpeed copies the swap files of its NVMe offloading (runtime/engine.py, `save_checkpoint`).
OFFLOADED = "offloaded_tensors"


class FlatVector:
    """A long vector whose parts lie in several tensors, perhaps in several files."""

    def __init__(self, dtype: DType) -> None:
        self.dtype = dtype
        self._starts: list[int] = []
        self._places: list[Slice] = []

    def add(self, start: int, shard: Shard, part: TensorRecord, name: str) -> None:
        """Put the elements of `part` at `start` and after; parts come in rising order.

        Raises:
            ToolkitError: the part is of another dtype than the vector.
        """
        if part.dtype != self.dtype:
            raise ToolkitError(
                "the shards of a checkpoint differ in dtype",
                where=shard.path,
                why=f"{name} is {part.dtype} here and {self.dtype} elsewhere",
            )
        if part.num_elements:
            self._starts.append(start)
            self._places.append(shard.locate(part, name=name))

    def slices(self, start: int, num_elements: int) -> Iterator[Slice]:
        """The byte ranges of elements [start, start + num_elements), as far as there are any."""
        item_bytes = self.dtype.size_bytes
        index = max(bisect_right(self._starts, start) - 1, 0)
        end = start + num_elements
        while index < len(self._starts) and self._starts[index] < end:
            place, part_start = self._places[index], self._starts[index]
            first = max(start, part_start)
            last = min(end, part_start + place.num_bytes // item_bytes)
            if last > first:
                offset_bytes = place.offset_bytes + (first - part_start) * item_bytes
                yield Slice(place.path, offset_bytes, (last - first) * item_bytes)
            index += 1


Placed = tuple[str, tuple[int, ...], DType, list[Slice]]


def flat_group_parameters(model: ModelStates, ranks: Sequence[OptimizerStates]) -> Iterator[Placed]:
    """Name, shape, dtype and slices of every optimized parameter of stages 1 and 2.

    Raises:
        ToolkitError: a rank's part of a group has not the size that the parameters' shapes ask for.
    """
    _check_group_counts(model, ranks)
    for index, shapes in enumerate(model.group_shapes):
        paddings = _alignment_paddings(ranks[0], index, len(shapes))
        num_needed = sum(map(math.prod, shapes.values())) + sum(paddings)
        vector = _joined_group(ranks, index, num_needed)
        start = 0
        for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
            num_elements = math.prod(shape)
            yield name, shape, vector.dtype, list(vector.slices(start, num_elements))
            start += num_elements + padding


def only_groups(
    model: ModelStates, ranks: Sequence[OptimizerStates], indices: Sequence[int]
) -> tuple[ModelStates, list[OptimizerStates]]:
    """The same states as if the optimizer had some of its groups alone."""

    def picked(values: Sequence[T]) -> tuple[T, ...]:
        return tuple(values[index] for index in indices if index < len(values))

    narrowed = [
        dataclasses.replace(
            rank,
            partition_counts=picked(rank.partition_counts),
            groups=picked(rank.groups),
            group_paddings=picked(rank.group_paddings),
            alignment_paddings=None if rank.alignment_paddings is None else picked(rank.alignment_paddings),
            fragments=picked(rank.fragments),
            expert_groups=picked(rank.expert_groups),
        )
        for rank in ranks
    ]
    return dataclasses.replace(model, group_shapes=picked(model.group_shapes)), narrowed


def partitioned_parameters(model: ModelStates, ranks: Sequence[OptimizerStates]) -> Iterator[Placed]:
    """Name, shape, dtype and slices of every optimized parameter of stage 3.

    Raises:
        ToolkitError: a rank's elements are more or fewer than the parameters' shapes ask for.
    """
    shapes = {name: shape for group in model.group_shapes for name, shape in group.items()}
    num_ranks = len(ranks)
    num_needed = sum(_ceil_divide(math.prod(shape), num_ranks) for shape in shapes.values())
    vectors = []
    for rank in ranks:
        vector = FlatVector(ranks[0].groups[0].dtype)
        start = 0
        for group in rank.groups:
            vector.add(start, rank.shard, group, "a flat fp32 sub-group")
            start += group.num_elements
        if start < num_needed and (rank.shard.path.parent / OFFLOADED).is_dir():
            # Sub-groups that were offloaded have no elements in the shard, and their files tell no names.
            raise unsupported(
                rank.shard.path, f"fp32 weights offloaded to NVMe, as swap files in {OFFLOADED}"
            )
        if start != num_needed:
            raise wrong_count(rank.shard, f"{start} fp32 weights", num_needed)
        vectors.append(vector)
    start = 0
    for name, shape in shapes.items():
        num_part = _ceil_divide(math.prod(shape), num_ranks)
        yield name, shape, vectors[0].dtype, list(_gather(vectors, start, num_part, math.prod(shape)))
        start += num_part


def frozen_parameters(models: Sequence[ModelStates]) -> Iterator[Placed]:
    """Name, shape, dtype and slices of every frozen parameter of stages 2 (whole) and 3 (split over ranks).

    Raises:
        ToolkitError: a rank has no part of a parameter, or one of another dtype.
    """
    for name, shape in models[0].frozen_shapes.items():
        vectors = []
        num_part = _ceil_divide(math.prod(shape), len(models))
        for model in models:
            fragment = model.frozen_fragments.get(name)
            if fragment is None:
                raise ToolkitError(f"a part of the frozen tensor {name} is missing", where=model.shard.path)
            vector = FlatVector(models[0].frozen_fragments[name].dtype)
            vector.add(0, model.shard, fragment, name)
            vectors.append(vector)
        yield name, shape, vectors[0].dtype, list(_gather(vectors, 0, num_part, math.prod(shape)))


def wrong_count(shard: Shard, found: str, num_needed: int) -> ToolkitError:
    """A shard and the model's shapes do not belong together."""
    return ToolkitError(
        "a shard does not hold as much as the model's shapes ask for",
        where=shard.path,
        why=f"it holds {found}, and {num_needed} are needed",
        fix="the files are of different runs, or one is damaged: take another tag",
    )


def _gather(vectors: Sequence[FlatVector], start: int, num_part: int, num_elements: int) -> Iterator[Slice]:
    """Each rank's part in turn; the last one's padding is left out."""
    for rank, vector in enumerate(vectors):
        num_wanted = min(num_part, num_elements - rank * num_part)
        if num_wanted > 0:
            yield from vector.slices(start, num_wanted)


def _check_group_counts(model: ModelStates, ranks: Sequence[OptimizerStates]) -> None:
    for rank in ranks:
        if rank.num_groups != len(model.group_shapes):
            found = f"{rank.num_groups} groups of parameters"
            raise wrong_count(rank.shard, found, len(model.group_shapes))


def _alignment_paddings(rank: OptimizerStates, index: int, num_parameters: int) -> Sequence[int]:
    if rank.alignment_paddings is None:
        return [0] * num_parameters
    if index >= len(rank.alignment_paddings) or len(rank.alignment_paddings[index]) != num_parameters:
        raise wrong_count(rank.shard, "another number of alignment paddings", num_parameters)
    return rank.alignment_paddings[index]


def _joined_group(ranks: Sequence[OptimizerStates], index: int, num_needed: int) -> FlatVector:
    """The ranks' parts of one group end to end; padding is cut off its end, which can empty several ranks."""
    first = ranks[0]
    if first.sub_partitions:
        return _joined_sub_partitions(ranks, index, num_needed)
    num_part = first.groups[index].num_elements + _padding(first, index)
    vector = FlatVector(first.groups[index].dtype)
    for position, rank in enumerate(ranks):
        start = position * num_part
        part = rank.groups[index]
        num_expected = min(max(num_needed - start, 0), num_part)
        # Versions of DeepSpeed that do not say how much padding they cut off cut off all or none.
        allowed = (num_expected,) if rank.group_paddings else (num_part, num_expected)
        if part.num_elements not in allowed:
            found = f"{part.num_elements} fp32 weights of group {index}"
            raise wrong_count(rank.shard, found, num_expected)
        vector.add(start, rank.shard, part, f"flat fp32 group {index}")
    if num_part * len(ranks) < num_needed:
        found = f"parts of {num_part} fp32 weights of group {index} for {len(ranks)} ranks"
        raise wrong_count(first.shard, found, num_needed)
    return vector


def _joined_sub_partitions(ranks: Sequence[OptimizerStates], index: int, num_needed: int) -> FlatVector:
    """A group as stage 1 split it in DeepSpeed 0.4 (runtime/zero/stage1.py).

    The group was cut into equal pieces, which went to the ranks in turn; padding may be cut off its end.
    """
    first = ranks[0].sub_partitions[index]
    num_part = max(part.num_elements for part in first)
    vector = FlatVector(first[0].dtype)
    for turn in range(len(first)):
        for position, rank in enumerate(ranks):
            start = (turn * len(ranks) + position) * num_part
            num_expected = min(max(num_needed - start, 0), num_part)
            parts = rank.sub_partitions[index] if index < len(rank.sub_partitions) else ()
            if len(parts) != len(first) or parts[turn].num_elements not in (num_expected, num_part):
                found = f"another number of fp32 weights in sub-partition {turn} of group {index}"
                raise wrong_count(rank.shard, found, num_expected)
            vector.add(start, rank.shard, parts[turn], f"sub-partition {turn} of fp32 group {index}")
    if num_part * len(first) * len(ranks) < num_needed:
        found = f"{len(first)} parts of {num_part} fp32 weights of group {index} for {len(ranks)} ranks"
        raise wrong_count(ranks[0].shard, found, num_needed)
    return vector


def _padding(rank: OptimizerStates, index: int) -> int:
    return rank.group_paddings[index] if index < len(rank.group_paddings) else 0


def _ceil_divide(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
