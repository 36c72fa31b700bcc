"""A universal checkpoint: each trained parameter whole, in fp32, in a folder of its own.

DeepSpeed's converter (checkpoint/ds_to_universal.py) writes `zero/<parameter>/fp32.pt` and copies the model
states beside it, which have the buffers and the frozen weights. From stages 1 and 2 a file holds a mapping
with the tensor under `param`, in its shape; from stage 3 the tensor alone, flattened.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from ds_toolkit.checkpoint.layout import UNIVERSAL_FOLDER, ShardKind, unsupported
from ds_toolkit.checkpoint.layouts.cells import Cell, agree, assembled
from ds_toolkit.checkpoint.layouts.experts import num_experts_named
from ds_toolkit.checkpoint.layouts.states import ModelStates, model_states, zero_stage
from ds_toolkit.checkpoint.layouts.whole_tensors import whole_tensor
from ds_toolkit.checkpoint.reductions import TensorRecord
from ds_toolkit.checkpoint.tag_files import TagFiles
from ds_toolkit.checkpoint.tensors import CheckpointMap, Role, StoredTensor
from ds_toolkit.errors import ToolkitError


def is_universal(folder: Path) -> bool:
    """Whether a tag's folder is what DeepSpeed's converter writes."""
    return (folder / UNIVERSAL_FOLDER).is_dir()


def read_universal(tag: TagFiles) -> CheckpointMap:
    """The map of a universal checkpoint.

    Raises:
        ToolkitError: a file is missing or damaged, or the checkpoint holds parts of tensors alone.
    """
    optimizer = tag.open(f"{UNIVERSAL_FOLDER}/optimizer_state.pt")
    stage = zero_stage(optimizer)
    cells = [_cell(tag, models, stage) for models in _models(tag)]
    first = cells[0]
    for cell in cells:
        agree(cell.model.shard, "step", first.model.step, cell.model.step)
    tensors = {name: tensor for cell in reversed(cells) for name, tensor in cell.tensors.items()}
    names = dict.fromkeys(name for cell in cells for name in cell.names)
    pp_degree, tp_degree = _degrees(first.model)
    return CheckpointMap(
        folder=tag.folder,
        stage=stage,
        step=first.model.step,
        dp_world_size=first.model.dp_world_size,
        tp_world_size=tp_degree,
        pp_world_size=pp_degree,
        ds_version=first.model.ds_version,
        tensors=tensors,
        aliases={alias: name for cell in cells for alias, name in cell.aliases.items() if name in tensors},
        names=tuple(names),
        shards=tag.opened,
        left_out=first.model.left_out,
        notes=tuple(dict.fromkeys(note for cell in cells for note in cell.notes)),
    )


def _models(tag: TagFiles) -> Iterator[list[ModelStates]]:
    """The model states of each model-parallel rank; at stage 3 one a data-parallel rank."""
    files = [file for file in tag.files if file.kind is ShardKind.MODEL]
    for mp_rank in sorted({file.mp_rank for file in files}):
        yield [model_states(tag.open(file.path.name)) for file in files if file.mp_rank == mp_rank]


def _cell(tag: TagFiles, models: Sequence[ModelStates], stage: int) -> Cell:
    model = models[0]
    _, tp_degree = _degrees(model)
    _refuse_parts(model, tp_degree)
    trained = {
        name: _trained(tag, name, shape, is_split=tp_degree > 1)
        for group in model.group_shapes
        for name, shape in group.items()
    }
    stripped = [name for name, (_, is_stripped) in trained.items() if is_stripped]
    cell = assembled(models, stage, {name: tensor for name, (tensor, _) in trained.items()})
    notes = []
    if stripped:
        notes.append(f"the converter cut the padding off the vocabulary of {', '.join(stripped)}")
    if model.in_layer_files:
        notes.append(
            "the converter leaves out a pipeline's layer files: its buffers and frozen weights are missing"
        )
    return dataclasses.replace(cell, notes=(*cell.notes, *notes))


def _trained(
    tag: TagFiles, name: str, shape: tuple[int, ...], *, is_split: bool
) -> tuple[StoredTensor, bool]:
    """A parameter's fp32 tensor, and whether its vocabulary's padding was cut off.

    `shape` is that of one tensor-parallel rank's part where the model `is_split`.
    """
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ToolkitError(
            f"a parameter is called {name}, which leads out of the checkpoint", where=tag.folder
        )
    shard = tag.open(f"{UNIVERSAL_FOLDER}/{name}/fp32.pt")
    is_mapping = isinstance(shard.root, dict)
    record = shard.root.get("param") if is_mapping else shard.root
    if not isinstance(record, TensorRecord):
        raise ToolkitError("a checkpoint file does not hold what its name says", where=shard.path)
    is_stripped = is_mapping and bool(shard.root.get("vocab_tensor"))
    tensor = whole_tensor(shard, name, record, Role.TRAINED)
    if is_mapping and (is_split or is_stripped or record.shape == shape):
        return tensor, is_stripped
    if is_mapping or is_split or record.num_elements != math.prod(shape) or not record.is_contiguous:
        raise ToolkitError(
            f"the tensor {name} has not the shape that the model asks for",
            where=shard.path,
            why=f"it is {record.shape} here, and {shape} in the model states",
            fix="convert the checkpoint again, into an empty folder",
        )
    return dataclasses.replace(tensor, shape=shape), False


def _refuse_parts(model: ModelStates, tp_degree: int) -> None:
    """Frozen weights and experts that are not whole: the converter puts trained weights together alone."""
    trained = {name for group in model.group_shapes for name in group}
    if tp_degree > 1:
        frozen = [
            name for name in model.module if name not in trained | model.buffer_names | model.shared.keys()
        ]
        if frozen:
            raise unsupported(
                model.shard.path,
                f"one tensor-parallel rank's part of the frozen {frozen[0]} (a universal checkpoint)",
            )
    if sum(model.num_experts) != num_experts_named(model):
        raise unsupported(model.shard.path, "a mixture of experts converted to a universal checkpoint")


def _degrees(model: ModelStates) -> tuple[int, int]:
    if model.pp_degree and model.tp_degree:
        return model.pp_degree, model.tp_degree
    return (model.mp_world_size, 1) if model.in_layer_files else (1, model.mp_world_size)
