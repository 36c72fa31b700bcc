"""A pipeline's stages, each in files of its own, put together to the model that one stage alone would be.

DeepSpeed writes the state dict of each layer into a file named by the layer's number, and keeps the optimizer
of each stage apart (runtime/pipe/module.py, `save_state_dict`). A tied layer is called `tied_modules.<key>`
in the model, and its file says neither that it is tied nor what its key is.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds_toolkit.checkpoint.examining.headers import base_state
from ds_toolkit.checkpoint.fields import not_together
from ds_toolkit.checkpoint.layout import ShardKind
from ds_toolkit.checkpoint.layouts.cells import Cell, CellStates, agree, cell_of, open_cell
from ds_toolkit.checkpoint.layouts.samples import seem_equal
from ds_toolkit.checkpoint.layouts.states import state_dict
from ds_toolkit.checkpoint.layouts.whole_tensors import whole_tensor
from ds_toolkit.checkpoint.reductions import TensorRecord
from ds_toolkit.checkpoint.shards import Shard
from ds_toolkit.checkpoint.tag_files import TagFiles
from ds_toolkit.checkpoint.tensors import Replica, Role, StoredTensor
from ds_toolkit.errors import ToolkitError

_TIED = "tied_modules."
# States of an optimizer that have the shape of their parameter.
_SHAPED_STATES = ("exp_avg", "momentum_buffer")
_NUM_SHOWN = 5


@dataclass(frozen=True)
class _Layer:
    """A layer's file: its state dict under the layer's own names."""

    index: int
    shard: Shard
    tensors: Mapping[str, TensorRecord]
    left_out: tuple[str, ...]

    def stored(self, prefix: str, role: Role = Role.TRAINED) -> dict[str, StoredTensor]:
        """Its tensors under the model's names."""
        return {
            name: whole_tensor(self.shard, prefix + name, record, role)
            for name, record in self.tensors.items()
        }


def read_stages(
    tag: TagFiles,
    pp_degree: int,
    tp_degree: int = 1,
    tp_rank: int = 0,
    shared: Mapping[str, str] | None = None,
) -> list[Cell]:
    """The cells of one tensor-parallel rank, one a stage, with all that their layers' files hold.

    Args:
        tag: the checkpoint's files.
        pp_degree: stages of the pipeline.
        tp_degree: tensor-parallel ranks of each stage.
        tp_rank: which of them.
        shared: further names of tied weights, which DeepSpeed's global rank 0 alone lists.

    Raises:
        ToolkitError: a file is missing, damaged, or does not belong to the others.
    """
    layers = list(_layers(tag, tp_rank))
    cells = [_stage(open_cell(tag, stage * tp_degree + tp_rank), shared) for stage in range(pp_degree)]
    _check_layers(tag, layers, cells)
    _check_states(tag, layers, cells)
    tied = _TiedModules(cells)
    prefixes = {layer.index: tied.prefix(layer) for layer in layers}
    _check_shapes(layers, prefixes, cells)
    owned: list[list[_Layer]] = [[] for _ in cells]
    stage = 0
    for layer in layers:
        # A layer that no stage names follows the one before it.
        stage = next(
            (number for number, cell in enumerate(cells) if _has(cell, prefixes[layer.index])), stage
        )
        owned[stage].append(layer)
    cells = [_completed(cell, part, prefixes) for cell, part in zip(cells, owned, strict=True)]
    notes = (*cells[0].notes, *tied.notes, *_gaps(layers))
    return [dataclasses.replace(cells[0], notes=notes), *cells[1:]]


def joined(stages: Sequence[Cell]) -> Cell:
    """All stages as one cell, whose names are those of the same model on one stage.

    Of a tied module each stage that uses it has a copy; the first one is taken, and the others are listed in
    `replicas`: DeepSpeed keeps the tied weight alone equal. A cell that is no pipeline's is left as it is.

    Raises:
        ToolkitError: the stages are of different saves.
    """
    first = stages[0]
    if not first.model.in_layer_files:
        return first
    tensors: dict[str, StoredTensor] = {}
    replicas = [replica for cell in stages for replica in cell.replicas]
    for cell in stages:
        shard = cell.model.shard
        agree(shard, "step", first.model.step, cell.model.step)
        agree(shard, "ZeRO stage", first.stage, cell.stage)
        agree(shard, "data-parallel world size", first.model.dp_world_size, cell.model.dp_world_size)
        for name, tensor in cell.tensors.items():
            kept = tensors.setdefault(name, tensor)
            if kept is not tensor:
                # Only the stage to which its layer's file was counted may know its shape.
                replicas.append(Replica(kept, dataclasses.replace(tensor, shape=kept.shape)))
    aliases = {alias: name for cell in stages for alias, name in cell.aliases.items() if alias not in tensors}
    names = dict.fromkeys(name for cell in stages for name in cell.names)
    return dataclasses.replace(
        first,
        model=dataclasses.replace(
            first.model, left_out=tuple(name for cell in stages for name in cell.model.left_out)
        ),
        tensors=tensors,
        aliases=aliases,
        # `tied_modules` is the first child of a PipelineModule.
        names=tuple(sorted(names, key=lambda name: not name.startswith(_TIED))),
        unnamed_masters=tuple(group for cell in stages for group in cell.unnamed_masters),
        replicas=tuple(replicas),
        ranks=tuple(rank for cell in stages for rank in cell.ranks),
        notes=tuple(dict.fromkeys(note for cell in stages for note in cell.notes)),
    )


class _TiedModules:
    """The keys of tied modules that optimizers and lists of buffers name, and what is known of each."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._cells = cells
        self._numbered = {name.split(".")[0] for cell in cells for name in _recorded(cell)}
        names = [name for cell in cells for name in _recorded(cell) if name.startswith(_TIED)]
        self._keys = tuple(dict.fromkeys(name.split(".")[1] for name in names))
        self._not_named: list[int] = []

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be told of the layers that were asked for."""
        if not self._not_named:
            return ()
        return (
            "the names of some layers are not recorded, and begin with the layer's number here, which is "
            f"wrong for a tied layer ({_TIED}<key>): {', '.join(map(str, self._not_named))}",
        )

    def prefix(self, layer: _Layer) -> str:
        """What stands before the names of a layer's file in the model."""
        numbered = f"{layer.index}."
        if str(layer.index) in self._numbered or not layer.tensors:
            return numbered
        found = [key for key in self._keys if any(_is_copy(layer, key, cell) for cell in self._cells)]
        if len(found) == 1:
            return f"{_TIED}{found[0]}."
        self._not_named.append(layer.index)
        return numbered


def _is_copy(layer: _Layer, key: str, cell: Cell) -> bool:
    """Whether a layer has all that a stage says of a tied module, and the values that the optimizer has."""
    prefix = f"{_TIED}{key}."
    named = {name.removeprefix(prefix) for name in _recorded(cell) if name.startswith(prefix)}
    if not named or not named <= layer.tensors.keys():
        return False
    stored = layer.stored(prefix)
    masters = {name: cell.tensors[prefix + name] for name in named if prefix + name in cell.tensors}
    return all(seem_equal(master, stored[name]) for name, master in masters.items())


def _layers(tag: TagFiles, tp_rank: int) -> Iterator[_Layer]:
    for file in tag.names_of(ShardKind.LAYER):
        if file.mp_rank == tp_rank:
            shard = tag.open(file.path.name)
            tensors, left_out = state_dict(shard, shard.root, "the file")
            yield _Layer(int(file.path.name.split("-")[0].removeprefix("layer_")), shard, tensors, left_out)


def _stage(states: CellStates, shared: Mapping[str, str] | None) -> Cell:
    """What the optimizer of a stage has, and no more."""
    model = states.models[0]
    if not states.ranks or model.group_shapes or states.ranks[0].group_shapes:
        return cell_of(states, shared)
    # BF16_Optimizer at stage 0: no shapes are saved, but each rank names what it has of every parameter.
    shapes = []
    for group in range(len(states.ranks[0].groups)):
        counts: dict[str, int] = {}
        for rank in states.ranks:
            for name, count in (rank.fragments[group] if group < len(rank.fragments) else {}).items():
                counts[name] = counts.get(name, 0) + count
        shapes.append({name: (count,) for name, count in counts.items()})
    named = dataclasses.replace(model, group_shapes=tuple(shapes))
    cell = cell_of(CellStates((named, *states.models[1:]), states.ranks), shared)
    return dataclasses.replace(cell, model=model, stage=0)


def _recorded(cell: Cell) -> Iterator[str]:
    """Names that a stage's optimizer and model states say."""
    yield from cell.tensors
    yield from cell.model.buffer_names


def _has(cell: Cell, prefix: str) -> bool:
    return any(name.startswith(prefix) for name in _recorded(cell))


def _check_layers(tag: TagFiles, layers: Sequence[_Layer], cells: Sequence[Cell]) -> None:
    """Every layer whose weights an optimizer or a list of buffers names has a file with these weights."""
    by_index = {str(layer.index): layer for layer in layers}
    for cell in cells:
        for name in _recorded(cell):
            number, _, rest = name.partition(".")
            if number.isdecimal() and number not in by_index:
                raise ToolkitError(
                    f"the file of layer {number} is missing, which holds {name}",
                    where=tag.folder,
                    fix="take another tag, or bring the file back",
                )
            if number.isdecimal() and rest not in by_index[number].tensors:
                raise not_together(by_index[number].shard, f"it has no {name}")


def _check_states(tag: TagFiles, layers: Sequence[_Layer], cells: Sequence[Cell]) -> None:
    """Stage 0 in fp32 names no weights: at least there is one for each state of a stage's optimizer."""
    there = Counter(record.shape for layer in layers for record in layer.tensors.values())
    for stage, cell in enumerate(cells):
        # A tied weight has states in each stage, and one file.
        for shape in () if cell.ranks else Counter(_shapes_of_states(cell.model.optimizer)) - there:
            raise ToolkitError(
                "the file of a layer is missing",
                where=tag.folder,
                why=f"the optimizer of stage {stage} has more states of shape {shape} than there are weights",
                fix="take another tag, or bring the file back",
            )


def _shapes_of_states(optimizer: Mapping[str, Any]) -> Iterator[tuple[int, ...]]:
    states = (base_state(optimizer) or optimizer).get("state")
    # Flat groups tell no shapes.
    if not isinstance(states, dict) or "fp32_groups_flat" in optimizer:
        return
    for entry in states.values():
        found = [entry.get(key) for key in _SHAPED_STATES] if isinstance(entry, dict) else []
        yield from [record.shape for record in found if isinstance(record, TensorRecord)][:1]


def _gaps(layers: Sequence[_Layer]) -> Iterator[str]:
    """Nothing counts a pipeline's layers, and those that are functions have no file."""
    there = {layer.index for layer in layers}
    absent = sorted(set(range(max(there, default=0))) - there)
    if absent:
        shown = ", ".join(map(str, absent[:_NUM_SHOWN])) + (", ..." if len(absent) > _NUM_SHOWN else "")
        yield f"there is no file of the layers {shown}: they are functions without weights, or it was lost"


def _check_shapes(layers: Sequence[_Layer], prefixes: Mapping[int, str], cells: Sequence[Cell]) -> None:
    """Where an optimizer says no shapes, the layers' files do."""
    shaped = {prefixes[layer.index] + name for layer in layers for name in layer.tensors}
    for cell in cells:
        for name in cell.tensors:
            if not cell.model.group_shapes and name not in shaped:
                raise ToolkitError(
                    f"the shape of the tensor {name} is not known",
                    where=cell.model.shard.path,
                    why="DeepSpeed saved no shapes at stage 0, and no layer's file could be told to hold it",
                    fix="set ZeRO stage 1 for this pipeline and save it again",
                )


def _completed(cell: Cell, layers: Sequence[_Layer], prefixes: Mapping[int, str]) -> Cell:
    """A stage with what its layers' files hold: 16-bit and frozen weights, buffers, and the shapes of all."""
    tensors = dict(cell.tensors)
    names = []
    left_out = []
    for layer in layers:
        prefix = prefixes[layer.index]
        left_out += [prefix + name for name in layer.left_out]
        for name, record in layer.tensors.items():
            full = prefix + name
            names.append(full)
            if full in cell.tensors:
                tensors[full] = _shaped(cell, cell.tensors[full], layer.shard, record)
            elif full not in tensors and full not in cell.aliases:
                tensors[full] = whole_tensor(layer.shard, full, record, _role(cell, full))
    return dataclasses.replace(
        cell,
        model=dataclasses.replace(cell.model, left_out=tuple(left_out)),
        tensors=tensors,
        names=tuple(dict.fromkeys([*names, *cell.names, *tensors])),
    )


def _role(cell: Cell, name: str) -> Role:
    if name in cell.model.buffer_names:
        return Role.BUFFER
    return Role.FROZEN if cell.ranks else Role.TRAINED


def _shaped(cell: Cell, tensor: StoredTensor, shard: Shard, record: TensorRecord) -> StoredTensor:
    """The optimizer's tensor in the shape that the layer's file has."""
    is_known = bool(cell.model.group_shapes)
    if tensor.num_elements != math.prod(record.shape) or (is_known and tensor.shape != record.shape):
        raise not_together(
            shard, f"{tensor.name} has the shape {record.shape} here and {tensor.shape} in the optimizer"
        )
    return dataclasses.replace(tensor, shape=record.shape)
