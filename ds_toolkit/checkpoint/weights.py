"""From a tag's folder to the map of its weights, whatever the layout."""

from __future__ import annotations

from pathlib import Path

from ds_toolkit.checkpoint.cells import Cell, TagFiles, read_cell
from ds_toolkit.checkpoint.layout import refuse_unsupported
from ds_toolkit.checkpoint.tensor_parallel import merged
from ds_toolkit.checkpoint.tensors import CheckpointMap
from ds_toolkit.errors import ToolkitError


def read_weights(tag_folder: Path) -> CheckpointMap:
    """The map of a tag's weights; the files' structure is read, none of their tensor data.

    Trained weights are the optimizer's fp32 ones at stages 1 to 3. Every tensor's slices are proven to add up
    to its shape, all shards to be of one step, and their number to be the world size.

    Raises:
        ToolkitError: a file is missing, damaged, or does not belong to the others; or the layout is one that
            cannot be read (pipeline, experts, universal), which is named.
    """
    tag = TagFiles.of(tag_folder)
    refuse_unsupported(tag_folder, tag.files)
    cell = _tensor_parallel_cell(tag)
    return CheckpointMap(
        folder=tag_folder,
        stage=cell.stage,
        step=cell.model.step,
        dp_world_size=cell.model.dp_world_size,
        tp_world_size=cell.model.mp_world_size,
        ds_version=cell.model.ds_version,
        tensors=cell.tensors,
        aliases=cell.aliases,
        names=cell.names,
        shards=tuple(dict.fromkeys(tag.opened)),
        unnamed_masters=cell.unnamed_masters,
        replicas=cell.replicas,
        left_out=cell.model.left_out,
    )


def _tensor_parallel_cell(tag: TagFiles) -> Cell:
    """The cells of all tensor-parallel ranks, put together; a model that is not split so is one cell."""
    first = read_cell(tag, 0)
    num_ranks = first.model.mp_world_size
    for file in tag.files:
        if file.mp_rank >= num_ranks:
            raise ToolkitError(
                "a checkpoint holds more shards than its world size",
                where=file.path,
                why=f"the model-parallel world size is {num_ranks}",
                fix="if this tag was written over by a smaller run, move the files left over away",
            )
    others = [read_cell(tag, mp_rank, first.aliases) for mp_rank in range(1, num_ranks)]
    return merged([first, *others])
