"""The weights of one cell: the part of the model that one tensor- and pipeline-parallel rank has.

Its data-parallel ranks share it as ZeRO splits it. A model that is not split otherwise is one cell.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ds_toolkit.checkpoint.fields import Fields
from ds_toolkit.checkpoint.layout import ShardFile, ShardKind, shard_files
from ds_toolkit.checkpoint.manifest import MANIFEST_NAME, Manifest
from ds_toolkit.checkpoint.older_versions import shapes_by_group
from ds_toolkit.checkpoint.partitions import (
    Placed,
    flat_group_parameters,
    frozen_parameters,
    partitioned_parameters,
)
from ds_toolkit.checkpoint.reductions import TensorRecord
from ds_toolkit.checkpoint.shards import Shard, open_shard
from ds_toolkit.checkpoint.states import ModelStates, OptimizerStates, model_states, optimizer_states
from ds_toolkit.checkpoint.tensors import (
    Block,
    Part,
    Replica,
    Role,
    StoredTensor,
    UnnamedTensor,
    block_in_order,
    row_major_strides,
)
from ds_toolkit.errors import ToolkitError


@dataclass
class TagFiles:
    """The files of a tag, opened one by one; `opened` remembers which."""

    folder: Path
    files: tuple[ShardFile, ...]
    manifest: Manifest | None
    opened: list[Path] = field(default_factory=list)

    @classmethod
    def of(cls, folder: Path) -> TagFiles:
        """Those that lie in a tag's folder, and its manifest if it has one."""
        manifest = Manifest.read(folder) if (folder / MANIFEST_NAME).exists() else None
        return cls(folder, tuple(shard_files(folder)), manifest)

    def open(self, name: str) -> Shard:
        """Read the structure of one file.

        Raises:
            ToolkitError: it is missing, damaged, or not of the size that the manifest says.
        """
        path = self.folder / name
        if not path.exists():
            raise ToolkitError(
                "a checkpoint file is missing",
                where=path,
                why="the checkpoint was not saved completely, or a file was lost",
                fix="take another tag, or bring the file back",
            )
        self.opened.append(path)
        sizes = {file.name: file.size_bytes for file in self.manifest.files} if self.manifest else {}
        return open_shard(path, sizes.get(name))

    def of_cell(self, mp_rank: int) -> list[ShardFile]:
        """The model and optimizer states of one cell."""
        kinds = (ShardKind.MODEL, ShardKind.OPTIMIZER)
        return [file for file in self.files if file.mp_rank == mp_rank and file.kind in kinds]


@dataclass(frozen=True)
class Cell:
    """What `CheckpointMap` says of a whole model, for one cell.

    `model` is the first model states file, which has more to say than the weights.
    """

    model: ModelStates
    stage: int
    tensors: Mapping[str, StoredTensor]
    aliases: Mapping[str, str]
    names: tuple[str, ...]
    unnamed_masters: tuple[tuple[UnnamedTensor, ...], ...] = ()
    replicas: tuple[Replica, ...] = ()


def read_cell(tag: TagFiles, mp_rank: int = 0, shared: Mapping[str, str] | None = None) -> Cell:
    """The map of one cell's weights.

    Every tensor's slices are proven to add up to its shape, all shards to be of one step, and their number
    to be the data-parallel world size.

    Args:
        shared: further names of tied weights, where a model states file of this cell does not list them:
            DeepSpeed's global rank 0 alone does.

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
        return _stage0_cell(first)
    ranks = _optimizer_ranks(tag, first, mp_rank, optimizer_files)
    models = [first]
    if split:
        others = range(1, first.dp_world_size)
        models += [model_states(tag.open(f"zero_pp_rank_{rank}_{model_name}")) for rank in others]
    _check_agreement(models, ranks, files)
    models[0] = dataclasses.replace(first, group_shapes=shapes_by_group(first, ranks))
    return _zero_cell(models, ranks, first.shared or shared or {})


def _optimizer_ranks(
    tag: TagFiles, model: ModelStates, mp_rank: int, files: Sequence[ShardFile]
) -> list[OptimizerStates]:
    prefix = "bf16_" if any(file.bf16 for file in files) else ""
    # Version 0.4 wrote no underscore before `optim`.
    is_old = any(not file.path.name.endswith("_optim_states.pt") for file in files)
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
        _agree(model.shard, "step", models[0].step, model.step)
        if model.dp_world_size:
            _agree(model.shard, "data-parallel world size", models[0].dp_world_size, model.dp_world_size)
    for rank in ranks:
        _agree(rank.shard, "ZeRO stage", ranks[0].zero_stage, rank.zero_stage)
        if None not in (rank.step, ranks[0].step):
            _agree(rank.shard, "optimizer step", ranks[0].step, rank.step)
        for count in rank.partition_counts:
            _agree(rank.shard, "number of partitions", models[0].dp_world_size, count)
    if (ranks[0].zero_stage == 3) != (models[0].shard.path.name.startswith("zero_")):
        raise ToolkitError("files of ZeRO stage 3 and of another stage are mixed", where=ranks[0].shard.path)


def _agree(shard: Shard, what: str, expected: object, found: object) -> None:
    if expected != found:
        raise ToolkitError(
            "the files of a checkpoint do not belong together",
            where=shard.path,
            why=f"{what} is {found} here and {expected} in the first file",
            fix="take another tag: these files are of different saves",
        )


def _zero_cell(
    models: Sequence[ModelStates], ranks: Sequence[OptimizerStates], shared: Mapping[str, str]
) -> Cell:
    model, stage = models[0], ranks[0].zero_stage
    split = partitioned_parameters(model, ranks) if stage == 3 else flat_group_parameters(model, ranks)
    tensors = {placed[0]: _stored(model, placed, Role.TRAINED) for placed in split}
    for placed in frozen_parameters(models):
        tensors[placed[0]] = _stored(model, placed, Role.FROZEN)
    aliases = {
        alias: name
        for alias, name in shared.items()
        if name in tensors and alias not in tensors and tensors[name].num_elements
    }
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
            raise ToolkitError(f"no shard holds the tensor {name}", where=model.shard.path)
        # What no group holds is frozen; stage 1 keeps such weights here only.
        tensors[name] = _whole(model.shard, name, record, role)
    return Cell(model, stage, tensors, aliases, _in_order(model, tensors, aliases))


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
        tensors[name] = _whole(model.shard, name, record, role)
    names = _in_order(model, tensors, aliases)
    return Cell(model, 0, tensors, aliases, names, _unnamed_masters(model))


def _unnamed_masters(model: ModelStates) -> tuple[tuple[UnnamedTensor, ...], ...]:
    optimizer = Fields(model.shard, dict(model.optimizer), "optimizer")
    flat = optimizer.items("fp32_groups_flat")
    groups = [[vector] for vector in flat] or [
        Fields(model.shard, {"fp32_groups": group}).items("fp32_groups")
        for group in optimizer.items("fp32_groups")
    ]
    return tuple(
        tuple(
            UnnamedTensor(
                record.shape, record.dtype, model.shard.span(record), bool(flat), _blocks_of(record)
            )
            for record in group
            if isinstance(record, TensorRecord)
        )
        for group in groups
    )


def _whole(shard: Shard, name: str, record: TensorRecord, role: Role) -> StoredTensor:
    """A tensor that lies in one file, in whatever order (convolutions in channels_last format)."""
    place = shard.span(record, name=name)
    part = Part((place,) if place.num_bytes else (), _blocks_of(record))
    return StoredTensor(name, record.shape, record.dtype, (part,), role)


def _blocks_of(record: TensorRecord) -> tuple[Block, ...] | None:
    if record.is_contiguous:
        return None
    return (block_in_order(record.shape, 0, record.strides, 0, row_major_strides(record.shape)),)


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
