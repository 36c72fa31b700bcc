"""From a tag's folder to the map of its weights, whatever the layout."""

from __future__ import annotations

from pathlib import Path

from ds_toolkit.checkpoint.cells import TagFiles, read_cell
from ds_toolkit.checkpoint.layout import refuse_unsupported, unsupported
from ds_toolkit.checkpoint.tensors import CheckpointMap


def read_weights(tag_folder: Path) -> CheckpointMap:
    """The map of a tag's weights; the files' structure is read, none of their tensor data.

    Trained weights are the optimizer's fp32 ones at stages 1 to 3. Every tensor's slices are proven to add up
    to its shape, all shards to be of one step, and their number to be the world size.

    Raises:
        ToolkitError: a file is missing, damaged, or does not belong to the others; or the layout is one that
            cannot be read (pipeline, experts, tensor parallelism, universal), which is named.
    """
    tag = TagFiles.of(tag_folder)
    refuse_unsupported(tag_folder, tag.files)
    cell = read_cell(tag)
    if cell.model.mp_world_size != 1:
        ways = cell.model.mp_world_size
        raise unsupported(tag_folder, f"a model split {ways} ways by tensor parallelism")
    return CheckpointMap(
        folder=tag_folder,
        stage=cell.stage,
        step=cell.model.step,
        dp_world_size=cell.model.dp_world_size,
        ds_version=cell.model.ds_version,
        tensors=cell.tensors,
        aliases=cell.aliases,
        names=cell.names,
        shards=tuple(dict.fromkeys(tag.opened)),
        unnamed_masters=cell.unnamed_masters,
        left_out=cell.model.left_out,
    )
