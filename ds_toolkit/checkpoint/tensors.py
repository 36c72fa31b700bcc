"""A checkpoint as a map: every weight's name, shape and dtype, and the byte ranges that hold it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from ds_toolkit.checkpoint.dtypes import DType
from ds_toolkit.checkpoint.layout import ShardFile, ShardKind, refuse_unsupported, shard_files, unsupported
from ds_toolkit.checkpoint.manifest import MANIFEST_NAME, Manifest
from ds_toolkit.checkpoint.partitions import (
    Placed,
    flat_group_parameters,
    frozen_parameters,
    partitioned_parameters,
)
from ds_toolkit.checkpoint.reductions import TensorRecord
from ds_toolkit.checkpoint.shards import Shard, Slice, open_shard
from ds_toolkit.checkpoint.states import ModelStates, OptimizerStates, model_states, optimizer_states
from ds_toolkit.errors import ToolkitError


class Role(Enum):
    """What a tensor is to the model."""

    TRAINED = "trained"
    FROZEN = "frozen"
    BUFFER = "buffer"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in row-major order: its elements, of type `dtype`, are those of `slices` end to end."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    slices: tuple[Slice, ...]
    role: Role

    @property
    def num_elements(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class UnnamedTensor:
    """fp32 weights that stage 0 keeps in its optimizer, where they have no name.

    `is_flat` if they are those of several parameters, one after the other.
    """

    shape: tuple[int, ...]
    dtype: DType
    place: Slice
    is_flat: bool


@dataclass(frozen=True)
class CheckpointMap:
    """What a tag holds, without its data.

    Attributes:
        tensors: by name, each tensor once.
        aliases: further names of tied weights, and which tensor they stand for.
        names: all names in the order of the model's state dict, aliases included.
        shards: the files that were read.
        unnamed_masters: stage 0 in 16 bits only: fp32 weights by optimizer group. `tensors` then holds the
            16-bit weights.
        left_out: entries of the model's state dict that are no tensors (`_extra_state` of some modules).
    """

    folder: Path
    stage: int
    step: int
    dp_world_size: int
    ds_version: str | None
    tensors: Mapping[str, StoredTensor]
    aliases: Mapping[str, str]
    names: tuple[str, ...]
    shards: tuple[Path, ...]
    unnamed_masters: tuple[tuple[UnnamedTensor, ...], ...] = ()
    left_out: tuple[str, ...] = ()


@dataclass
class _Tag:
    """The files of a tag, opened one by one."""

    folder: Path
    expected_sizes: Mapping[str, int]
    opened: list[Path] = field(default_factory=list)

    def open(self, name: str) -> Shard:
        path = self.folder / name
        if not path.exists():
            raise ToolkitError(
                "a checkpoint file is missing",
                where=path,
                why="the checkpoint was not saved completely, or a file was lost",
                fix="take another tag, or bring the file back",
            )
        self.opened.append(path)
        return open_shard(path, self.expected_sizes.get(name))


def read_weights(tag_folder: Path) -> CheckpointMap:
    """The map of a tag's weights; the files' structure is read, none of their tensor data.

    Trained weights are the optimizer's fp32 ones at stages 1 to 3. Every tensor's slices are proven to add up
    to its shape, all shards to be of one step, and their number to be the world size.

    Raises:
        ToolkitError: a file is missing, damaged, or does not belong to the others; or the layout is one that
            cannot be read (pipeline, experts, tensor parallelism, universal, BF16_Optimizer), which is named.
    """
    files = shard_files(tag_folder)
    refuse_unsupported(tag_folder, files)
    manifest = Manifest.read(tag_folder) if (tag_folder / MANIFEST_NAME).exists() else None
    tag = _Tag(tag_folder, {file.name: file.size_bytes for file in manifest.files} if manifest else {})
    optimizer_files = [file for file in files if file.kind is ShardKind.OPTIMIZER]
    split = any(file.kind is ShardKind.MODEL and file.dp_rank is not None for file in files)
    first_name = "zero_pp_rank_0_mp_rank_00_model_states.pt" if split else "mp_rank_00_model_states.pt"
    first = model_states(tag.open(first_name))
    if manifest is not None and manifest.step != first.step:
        raise ToolkitError(
            "a shard belongs to another checkpoint",
            where=tag_folder / first_name,
            why=f"it is of step {first.step}, and the tag was committed at step {manifest.step}",
            fix="take another tag, or bring the file back",
        )
    if first.mp_world_size != 1:
        raise unsupported(tag_folder, f"a model split {first.mp_world_size} ways by tensor parallelism")
    if not optimizer_files and not split and not first.group_shapes:
        return _stage0_map(tag, first)
    ranks = _optimizer_ranks(tag, first, optimizer_files)
    models = [first]
    if split:
        models += [
            model_states(tag.open(f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"))
            for rank in range(1, first.dp_world_size)
        ]
    _check_agreement(models, ranks, files)
    return _zero_map(tag, models, ranks)


def _optimizer_ranks(tag: _Tag, model: ModelStates, files: Sequence[ShardFile]) -> list[OptimizerStates]:
    prefix = "bf16_" if any(file.bf16 for file in files) else ""
    names = [f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(model.dp_world_size)]
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


def _zero_map(tag: _Tag, models: Sequence[ModelStates], ranks: Sequence[OptimizerStates]) -> CheckpointMap:
    model, stage = models[0], ranks[0].zero_stage
    split = partitioned_parameters(model, ranks) if stage == 3 else flat_group_parameters(model, ranks)
    tensors = {placed[0]: _stored(model, placed, Role.TRAINED) for placed in split}
    for placed in frozen_parameters(models):
        tensors[placed[0]] = _stored(model, placed, Role.FROZEN)
    aliases = {
        alias: name
        for alias, name in model.shared.items()
        if name in tensors and alias not in tensors and tensors[name].num_elements
    }
    for name, record in model.module.items():
        if name in tensors or name in aliases:
            continue
        role = Role.BUFFER if name in model.buffer_names else Role.FROZEN
        if stage == 3 and role is Role.FROZEN:
            raise ToolkitError(f"no shard holds the tensor {name}", where=model.shard.path)
        # What no group holds is frozen; stage 1 keeps such weights here only.
        tensors[name] = _stored(model, _whole(model, name, record), role)
    return _finished(tag, model, stage, tensors, aliases)


def _stage0_map(tag: _Tag, model: ModelStates) -> CheckpointMap:
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
        tensors[name] = _stored(model, _whole(model, name, record), role)
    return _finished(tag, model, 0, tensors, aliases, _unnamed_masters(model))


def _unnamed_masters(model: ModelStates) -> tuple[tuple[UnnamedTensor, ...], ...]:
    flat = model.optimizer.get("fp32_groups_flat")
    groups = [[vector] for vector in flat] if flat else model.optimizer.get("fp32_groups", ())
    return tuple(
        tuple(
            UnnamedTensor(record.shape, record.dtype, model.shard.locate(record), is_flat=bool(flat))
            for record in group
            if isinstance(record, TensorRecord)
        )
        for group in groups
    )


def _whole(model: ModelStates, name: str, record: TensorRecord) -> Placed:
    place = model.shard.locate(record, name=name)
    return name, record.shape, record.dtype, [place] if place.num_bytes else []


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
    return StoredTensor(name, shape, dtype, tuple(slices), role)


def _finished(
    tag: _Tag,
    model: ModelStates,
    stage: int,
    tensors: Mapping[str, StoredTensor],
    aliases: Mapping[str, str],
    masters: tuple[tuple[UnnamedTensor, ...], ...] = (),
) -> CheckpointMap:
    ordered = [name for name in model.module if name in tensors or name in aliases]
    names = tuple(dict.fromkeys([*ordered, *tensors, *aliases]))
    return CheckpointMap(
        folder=tag.folder,
        stage=stage,
        step=model.step,
        dp_world_size=model.dp_world_size,
        ds_version=model.ds_version,
        tensors=tensors,
        aliases=aliases,
        names=names,
        shards=_unique(tag.opened),
        unnamed_masters=masters,
        left_out=model.left_out,
    )


def _unique(paths: Iterable[Path]) -> tuple[Path, ...]:
    return tuple(dict.fromkeys(paths))
