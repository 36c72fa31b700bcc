"""The weights of one cell: the part of the model that one tensor- and pipeline-parallel rank has.

Its data-parallel ranks share it as ZeRO splits it. A model that is not split otherwise is one cell.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ds_toolkit.checkpoint.fields import Fields, not_together
from ds_toolkit.checkpoint.layout import ShardFile, ShardKind
from ds_toolkit.checkpoint.layouts.older_versions import shapes_by_group
from ds_toolkit.checkpoint.layouts.partitions import (
    Placed,
    flat_group_parameters,
    frozen_parameters,
    only_groups,
    partitioned_parameters,
)
from ds_toolkit.checkpoint.layouts.states import ModelStates, OptimizerStates, model_states, optimizer_states
from ds_toolkit.checkpoint.layouts.whole_tensors import blocks_of, whole_tensor
from ds_toolkit.checkpoint.reductions import TensorRecord
from ds_toolkit.checkpoint.shards import Shard
from ds_toolkit.checkpoint.tag_files import TagFiles
from ds_toolkit.checkpoint.tensors import (
    Part,
    Replica,
    Role,
    StoredTensor,
    UnnamedTensor,
)
from ds_toolkit.errors import ToolkitError


@dataclass(frozen=True)
class Cell:
    """What `CheckpointMap` says of a whole model, for one cell.

    `model` is the first model states file, which has more to say than the weights; `ranks` are the files of
    the optimizer. Experts are not among the weights (see experts.py).
    """

    model: ModelStates
    stage: int
    tensors: Mapping[str, StoredTensor]
    aliases: Mapping[str, str]
    names: tuple[str, ...]
    unnamed_masters: tuple[tuple[UnnamedTensor, ...], ...] = ()
    without_frozen: bool = False
    missing: Mapping[str, str] = field(default_factory=dict)
    replicas: tuple[Replica, ...] = ()
    ranks: tuple[OptimizerStates, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class CellStates:
    """The opened files of one cell: model states (one, or one a rank at stage 3) and a ZeRO optimizer's."""

    models: tuple[ModelStates, ...]
    ranks: tuple[OptimizerStates, ...]


def read_cell(tag: TagFiles, mp_rank: int = 0, shared: Mapping[str, str] | None = None) -> Cell:
    """The map of one cell's weights; see `open_cell` and `cell_of`."""
    return cell_of(open_cell(tag, mp_rank), shared)


def open_cell(tag: TagFiles, mp_rank: int = 0) -> CellStates:
    """Open the files of one cell.

    They are proven to be of one step, and their number to be the data-parallel world size.

    Raises:
        ToolkitError: a file is missing, damaged, or does not belong to the others.
    """
    files = tag.of_cell(mp_rank)
    optimizer_files = [file for file in files if file.kind is ShardKind.OPTIMIZER]
    split = any(file.kind is ShardKind.MODEL and file.dp_rank is not None for file in files)
    model_name = f"mp_rank_{mp_rank:02d}_model_states.pt"
    first = model_states(tag.open(f"zero_pp_rank_0_{model_name}" if split else model_name))
    if tag.manifest is not None and tag.manifest.step != first.step:
        raise ToolkitError(
            "a shard belongs to another checkpoint",
            where=first.shard.path,
            why=f"it is of step {first.step}, and the tag was committed at step {tag.manifest.step}",
            fix="take another tag, or bring the file back",
        )
    if not first.dp_world_size:
        # Very old files do not say it; then there are as many ranks as files.
        first = dataclasses.replace(first, dp_world_size=max(len(optimizer_files), 1))
    if not optimizer_files and not split and not first.group_shapes:
        return CellStates((first,), ())
    ranks = _optimizer_ranks(tag, first, mp_rank)
    models = [first]
    if split:
        others = range(1, first.dp_world_size)
        models += [model_states(tag.open(f"zero_pp_rank_{rank}_{model_name}")) for rank in others]
    _check_agreement(models, ranks, files)
    return CellStates(tuple(models), tuple(ranks))


def cell_of(states: CellStates, shared: Mapping[str, str] | None = None) -> Cell:
    """The map of one cell's weights; every tensor's slices are proven to add up to its shape.

    Args:
        states: the cell's files.
        shared: further names of tied weights, where a model states file of this cell does not list them:
            DeepSpeed's global rank 0 alone does.

    Raises:
        ToolkitError: they do not.
    """
    ranks = states.ranks
    if not ranks:
        return _stage0_cell(states.models[0])
    model = dataclasses.replace(
        states.models[0],
        group_shapes=shapes_by_group(states.models[0], ranks),
        shared=states.models[0].shared or shared or {},
    )
    dense = [index for index in range(len(model.group_shapes)) if ranks[0].expert_group(index) is None]
    if len(dense) == len(model.group_shapes):
        return dataclasses.replace(_zero_cell((model, *states.models[1:]), ranks), ranks=ranks)
    narrowed, dense_ranks = only_groups(model, ranks, dense)
    cell = _zero_cell((narrowed, *states.models[1:]), dense_ranks)
    return dataclasses.replace(cell, model=model, ranks=ranks)


def _optimizer_ranks(tag: TagFiles, model: ModelStates, mp_rank: int) -> list[OptimizerStates]:
    optimizer_files = [file for file in tag.files if file.kind is ShardKind.OPTIMIZER]
    prefix = "bf16_" if any(file.bf16 for file in optimizer_files) else ""
    # Version 0.4 wrote no underscore before `optim`.
    is_old = any(not file.path.name.endswith("_optim_states.pt") for file in optimizer_files)
    ending = f"mp_rank_{mp_rank:02d}{'' if is_old else '_'}optim_states.pt"
    # One at a time: a damaged world size may be a number of names that no memory holds.
    names = (f"{prefix}zero_pp_rank_{rank}_{ending}" for rank in range(model.dp_world_size))
    return [optimizer_states(tag.open(name)) for name in names]


def _check_agreement(
    models: Sequence[ModelStates], ranks: Sequence[OptimizerStates], files: Sequence[ShardFile]
) -> None:
    """All files are of one step, one stage and one world size."""
    states: list[ModelStates | OptimizerStates] = [*models, *ranks]
    known = {state.shard.path for state in states}
    for file in files:
        if file.path not in known:
            raise ToolkitError(
                "a checkpoint holds more shards than its world size",
                where=file.path,
                why=f"the data-parallel world size is {models[0].dp_world_size}",
                fix="if this tag was written over by a smaller run, move the files left over away",
            )
    for model in models:
        agree(model.shard, "step", models[0].step, model.step)
        if model.dp_world_size:
            agree(model.shard, "data-parallel world size", models[0].dp_world_size, model.dp_world_size)
    for rank in ranks:
        agree(rank.shard, "ZeRO stage", ranks[0].zero_stage, rank.zero_stage)
        if None not in (rank.step, ranks[0].step):
            agree(rank.shard, "optimizer step", ranks[0].step, rank.step)
        for index, count in enumerate(rank.partition_counts):
            # Experts are shared by fewer ranks.
            if rank.expert_group(index) is None:
                agree(rank.shard, "number of partitions", models[0].dp_world_size, count)
    if (ranks[0].zero_stage == 3) != (models[0].shard.path.name.startswith("zero_")):
        raise ToolkitError("files of ZeRO stage 3 and of another stage are mixed", where=ranks[0].shard.path)


def agree(shard: Shard, what: str, expected: object, found: object) -> None:
    """Stop at a file that says something else than the first one.

    Raises:
        ToolkitError: `found` in `shard` is not `expected`.
    """
    if expected != found:
        raise not_together(shard, f"{what} is {found} here and {expected} in the first file")


def _zero_cell(models: Sequence[ModelStates], ranks: Sequence[OptimizerStates]) -> Cell:
    model, stage = models[0], ranks[0].zero_stage
    split = partitioned_parameters(model, ranks) if stage == 3 else flat_group_parameters(model, ranks)
    trained = {placed[0]: _stored(model, placed, Role.TRAINED) for placed in split}
    return assembled(models, stage, trained)


def assembled(models: Sequence[ModelStates], stage: int, trained: Mapping[str, StoredTensor]) -> Cell:
    """A cell of its trained weights and of what its model states hold beside them.

    Raises:
        ToolkitError: a frozen weight is not whole.
    """
    model, tensors = models[0], dict(trained)
    for placed in frozen_parameters(models):
        tensors[placed[0]] = _stored(model, placed, Role.FROZEN)
    aliases = {
        alias: name
        for alias, name in model.shared.items()
        if name in tensors and alias not in tensors and tensors[name].num_elements
    }
    without_frozen = stage > 1 and model.lists_no_frozen
    missing = _add_the_rest(model, stage, tensors, aliases, has_all=not without_frozen)
    names = _in_order(model, tensors, aliases)
    return Cell(model, stage, tensors, aliases, names, without_frozen=without_frozen, missing=missing)


def _add_the_rest(
    model: ModelStates,
    stage: int,
    tensors: dict[str, StoredTensor],
    aliases: dict[str, str],
    *,
    has_all: bool,
) -> dict[str, str]:
    """Add what the model's state dict holds and no group does: buffers, and frozen weights below stage 3.

    Returns:
        Names of tied frozen weights that nothing holds, and the names that they share their tensors with.
    """
    missing: dict[str, str] = {}
    by_place = {
        model.module[name]: name
        for name in tensors
        if name in model.module and model.module[name].num_elements
    }
    for name, record in model.module.items():
        if name in tensors or name in aliases:
            continue
        if record in by_place:
            # Versions that list no tied weights, and all files but the first rank's.
            aliases[name] = by_place[record]
            continue
        role = Role.BUFFER if name in model.buffer_names else Role.FROZEN
        if stage == 3 and role is Role.FROZEN:
            # Of tied frozen weights DeepSpeed leaves out one name, and keeps a placeholder under the other.
            if has_all or name not in model.shared:
                raise ToolkitError(f"no shard holds the tensor {name}", where=model.shard.path)
            missing[name] = model.shared[name]
            continue
        tied = model.shared.get(name) if record.num_elements else None
        known = aliases.get(tied, tied) if tied else None
        if known in tensors and tensors[known].shape == record.shape:
            aliases[name] = known
            continue
        tensors[name] = whole_tensor(model.shard, name, record, role)
        if tied and known not in tensors:
            aliases[tied] = name
    return missing


def _stage0_cell(model: ModelStates) -> Cell:
    tensors: dict[str, StoredTensor] = {}
    aliases: dict[str, str] = {}
    by_place: dict[TensorRecord, str] = {}
    for name, record in model.module.items():
        is_buffer = name in model.buffer_names
        # Stage 0 lists no tied weights; they are the same elements of the same storage.
        if not is_buffer and record.num_elements and by_place.setdefault(record, name) != name:
            aliases[name] = by_place[record]
            continue
        role = Role.BUFFER if is_buffer else Role.TRAINED
        tensors[name] = whole_tensor(model.shard, name, record, role)
    names = _in_order(model, tensors, aliases)
    return Cell(model, 0, tensors, aliases, names, unnamed_masters(model.shard, model.optimizer))


def unnamed_masters(shard: Shard, state: Mapping[str, Any]) -> tuple[tuple[UnnamedTensor, ...], ...]:
    """The fp32 weights, by group, of an optimizer that stage 0 wraps in DeepSpeed's fp16 ones."""
    optimizer = Fields(shard, dict(state), "optimizer")
    flat = optimizer.items("fp32_groups_flat")
    groups = [[vector] for vector in flat] or [
        Fields(shard, {"fp32_groups": group}).items("fp32_groups") for group in optimizer.items("fp32_groups")
    ]
    return tuple(
        tuple(
            UnnamedTensor(record.shape, record.dtype, shard.span(record), bool(flat), blocks_of(record))
            for record in group
            if isinstance(record, TensorRecord)
        )
        for group in groups
    )


def _stored(model: ModelStates, placed: Placed, role: Role) -> StoredTensor:
    """The tensor, if its slices add up to its shape."""
    name, shape, dtype, slices = placed
    num_bytes = sum(slice_.num_bytes for slice_ in slices)
    if num_bytes != math.prod(shape) * dtype.size_bytes:
        where = slices[-1].path if slices else model.shard.path
        raise ToolkitError(
            f"the tensor {name} is not covered by the shards",
            where=where,
            why=f"shape {shape} needs {math.prod(shape) * dtype.size_bytes} bytes, and {num_bytes} are there",
        )
    return StoredTensor(name, shape, dtype, (Part(tuple(slices)),), role)


def _in_order(
    model: ModelStates, tensors: Mapping[str, StoredTensor], aliases: Mapping[str, str]
) -> tuple[str, ...]:
    ordered = [name for name in model.module if name in tensors or name in aliases]
    return tuple(dict.fromkeys([*ordered, *tensors, *aliases]))
