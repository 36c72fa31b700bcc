"""From a tag's folder to the map of its weights, whatever the layout."""

from __future__ import annotations

from pathlib import Path

from ds_toolkit.checkpoint.layout import ShardKind, refuse_unsupported
from ds_toolkit.checkpoint.layouts.cells import Cell, read_cell
from ds_toolkit.checkpoint.layouts.experts import with_experts
from ds_toolkit.checkpoint.layouts.pipeline import joined, read_stages
from ds_toolkit.checkpoint.layouts.states import ModelStates, model_states
from ds_toolkit.checkpoint.layouts.tensor_parallel import merged
from ds_toolkit.checkpoint.layouts.universal import is_universal, read_universal
from ds_toolkit.checkpoint.tag_files import TagFiles
from ds_toolkit.checkpoint.tensors import CheckpointMap
from ds_toolkit.errors import ToolkitError


def read_weights(tag_folder: Path) -> CheckpointMap:
    """The map of a tag's weights; the files' structure is read, and of their tensor data a few kilobytes.

    Trained weights are the optimizer's fp32 ones at stages 1 to 3. Every tensor's slices are proven to add up
    to its shape, all shards to be of one step, and their number to be the world size.

    Raises:
        ToolkitError: a file is missing, damaged, or does not belong to the others; or the layout is one that
            cannot be read, which is named.
    """
    tag = TagFiles.of(tag_folder)
    refuse_unsupported(tag_folder, tag.files)
    if is_universal(tag_folder):
        return read_universal(tag)
    first = _first_model(tag)
    pp_degree, tp_degree = _degrees(tag, first)
    _check_mp_ranks(tag, pp_degree, tp_degree)
    by_tp_rank = _cells(tag, first, pp_degree, tp_degree)
    stages = [merged(cells) for cells in zip(*by_tp_rank, strict=True)]
    return _map_of(tag, with_experts(tag, joined(stages)), pp_degree, tp_degree)


def _cells(tag: TagFiles, model: ModelStates, pp_degree: int, tp_degree: int) -> list[list[Cell]]:
    """For each tensor-parallel rank the cells of its pipeline stages; a model without a pipeline has one."""
    by_tp_rank: list[list[Cell]] = []
    for tp_rank in range(tp_degree):
        # The first rank alone says which weights are tied.
        shared = by_tp_rank[0][0].aliases if by_tp_rank else None
        if model.in_layer_files:
            by_tp_rank.append(read_stages(tag, pp_degree, tp_degree, tp_rank, shared))
        else:
            # Those of weights that were left out are no aliases.
            of_model = by_tp_rank[0][0].model.shared if by_tp_rank else {}
            by_tp_rank.append([read_cell(tag, tp_rank, {**(shared or {}), **of_model})])
    return by_tp_rank


def _first_model(tag: TagFiles) -> ModelStates:
    for file in tag.files:
        if file.kind is ShardKind.MODEL:
            return model_states(tag.open(file.path.name))
    raise ToolkitError(
        "a checkpoint has no model states", where=tag.folder, why="no *_model_states.pt is there"
    )


def _degrees(tag: TagFiles, model: ModelStates) -> tuple[int, int]:
    """Stages of the pipeline, and tensor-parallel ranks of each."""
    layers = tag.names_of(ShardKind.LAYER)
    if model.in_layer_files != bool(layers):
        raise ToolkitError(
            "a pipeline's layer files are missing"
            if model.in_layer_files
            else "layer files of a pipeline are mixed in",
            where=tag.folder,
            why="its model states say that the weights lie in them"
            if model.in_layer_files
            else "its model states hold the weights themselves",
            fix="take another tag, or sort the files of different saves",
        )
    if model.pp_degree and model.tp_degree:
        return model.pp_degree, model.tp_degree
    tp_degree = len({file.mp_rank for file in layers}) if layers else model.mp_world_size
    return model.mp_world_size // tp_degree, tp_degree


def _check_mp_ranks(tag: TagFiles, pp_degree: int, tp_degree: int) -> None:
    for file in tag.files:
        limit = tp_degree if file.kind is ShardKind.LAYER else pp_degree * tp_degree
        if file.mp_rank >= limit:
            raise ToolkitError(
                "a checkpoint holds more shards than its world size",
                where=file.path,
                why=f"the model was split into {pp_degree} pipeline stages, and {tp_degree} ways in each",
                fix="if this tag was written over by a smaller run, move the files left over away",
            )


def _map_of(tag: TagFiles, cell: Cell, pp_degree: int, tp_degree: int) -> CheckpointMap:
    return CheckpointMap(
        folder=tag.folder,
        stage=cell.stage,
        step=cell.model.step,
        dp_world_size=cell.model.dp_world_size,
        tp_world_size=tp_degree,
        pp_world_size=pp_degree,
        ds_version=cell.model.ds_version,
        tensors=cell.tensors,
        aliases=cell.aliases,
        names=cell.names,
        shards=tag.opened,
        unnamed_masters=cell.unnamed_masters,
        replicas=cell.replicas,
        left_out=cell.model.left_out,
        without_frozen=cell.without_frozen,
        missing=cell.missing,
        notes=cell.notes,
    )
