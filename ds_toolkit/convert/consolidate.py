"""A checkpoint's weights as one file that plain PyTorch, or any reader of safetensors, loads."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ds_toolkit.checkpoint.dtypes import DTYPES, DType
from ds_toolkit.checkpoint.layout import find_tag_folder
from ds_toolkit.checkpoint.masters import name_masters
from ds_toolkit.checkpoint.tensors import CheckpointMap, Role, StoredTensor
from ds_toolkit.checkpoint.weights import read_weights
from ds_toolkit.convert.copying import (
    Move,
    Progress,
    copy_ranges,
    default_num_threads,
    disk_full,
    free_space_bytes,
)
from ds_toolkit.convert.gathering import Gather
from ds_toolkit.convert.integrity import SourceCrcs, num_without_checksums
from ds_toolkit.convert.replicas import check_replicas
from ds_toolkit.convert.writers import Layout, OutputTensor, Writer
from ds_toolkit.convert.writers.bin import BinWriter
from ds_toolkit.convert.writers.safetensors import SafetensorsWriter
from ds_toolkit.errors import ToolkitError
from ds_toolkit.files import whole_output

OUTPUT_DTYPES = {"fp32": DTYPES["float32"], "bf16": DTYPES["bfloat16"], "fp16": DTYPES["float16"]}
_WRITERS: dict[str, type[BinWriter] | type[SafetensorsWriter]] = {
    ".bin": BinWriter,
    ".pt": BinWriter,
    ".pth": BinWriter,
    ".safetensors": SafetensorsWriter,
}


@dataclass(frozen=True)
class Consolidated:
    """What was read and written.

    Attributes:
        num_shards: checkpoint files that were read.
        num_tensors: entries of the output, buffers included and aliases of tied weights left out.
        num_parameters: elements of weights, buffers left out.
        num_bytes: size of the output file.
        notes: what the reader of a summary should know about the weights.
    """

    output: Path
    tag: str
    stage: int
    step: int
    dp_world_size: int
    ds_version: str | None
    dtype: str
    num_shards: int
    num_tensors: int
    num_parameters: int
    num_bytes: int
    seconds: float
    aliases: dict[str, str]
    notes: tuple[str, ...]

    @property
    def bytes_per_second(self) -> float:
        """Output bytes over wall-clock time, everything included."""
        return self.num_bytes / self.seconds


def consolidate(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tag: str | None = None,
    dtype: str = "fp32",
    force: bool = False,
    progress: Progress | None = None,
) -> Consolidated:
    """Write the weights of a DeepSpeed checkpoint of ZeRO stage 0, 1, 2 or 3 into one file.

    Nothing in the checkpoint is executed, and memory does not grow with the model. Every storage that is read
    is compared with the CRC-32 that was saved beside it. The file appears under its name only when it is
    complete and on the disk.

    Args:
        checkpoint: the save directory, or the folder of a tag in it.
        out: a `.bin`, `.pt` or `.pth` file (a state dict by `torch.save`), or a `.safetensors` file.
        tag: which checkpoint; by default the one that `latest` names.
        dtype: `fp32`, `bf16` or `fp16`, of all floating tensors; others, and 8-bit floats, are kept exactly.
        force: whether to replace `out` if it exists.
        progress: called with bytes written so far and bytes in all, perhaps from other threads.

    Raises:
        ToolkitError: nothing was written, for the reason that it gives.
    """
    started = time.perf_counter()
    out = Path(out)
    target = _output_dtype(dtype)
    writer = _writer_for(out, force=force)
    folder = find_tag_folder(Path(checkpoint), tag)
    weights = name_masters(read_weights(folder))
    _keep_clear_of(out, folder)
    outputs = [_output_tensor(tensor, target) for tensor in weights.tensors.values()]
    needed_bytes = sum(output.num_bytes for output in outputs)
    if needed_bytes > free_space_bytes(out.resolve().parent):
        raise disk_full(out, needed_bytes)
    notes = (*weights.notes, *check_replicas(weights.replicas), *_notes(weights))
    num_bytes = _write(out, writer, weights, outputs, progress)
    return Consolidated(
        output=out,
        tag=folder.resolve().name,
        stage=weights.stage,
        step=weights.step,
        dp_world_size=weights.dp_world_size,
        ds_version=weights.ds_version,
        dtype=dtype,
        num_shards=len(weights.shards),
        num_tensors=len(weights.tensors),
        num_parameters=sum(
            tensor.num_elements for tensor in weights.tensors.values() if tensor.role is not Role.BUFFER
        ),
        num_bytes=num_bytes,
        seconds=time.perf_counter() - started,
        aliases=dict(weights.aliases),
        notes=notes,
    )


def _output_dtype(dtype: str) -> DType:
    if dtype not in OUTPUT_DTYPES:
        raise ToolkitError(f"`{dtype}` is no output dtype", fix=f"choose one of {', '.join(OUTPUT_DTYPES)}")
    return OUTPUT_DTYPES[dtype]


def _writer_for(out: Path, *, force: bool) -> Writer:
    suffixes = ", ".join(_WRITERS)
    if out.is_dir():
        raise ToolkitError(
            "the output is a directory", where=out, fix=f"name a file in it that ends in one of {suffixes}"
        )
    writer = _WRITERS.get(out.suffix)
    if writer is None:
        raise ToolkitError(
            f"the output's format is not known: its name ends in `{out.suffix}`"
            if out.suffix
            else "the output's format is not known: its name has no ending",
            where=out,
            fix=f"name a file that ends in one of {suffixes}",
        )
    # Of a link, the folder that it leads to.
    folder = out.resolve().parent
    if not folder.is_dir():
        raise ToolkitError(
            "the output's folder does not exist",
            where=folder if out.is_symlink() else out.parent,
            fix="make it first",
        )
    if out.exists() and not force:
        raise ToolkitError(
            "the output exists", where=out, fix="name another file, or replace it with --force"
        )
    return writer()


def _keep_clear_of(out: Path, folder: Path) -> None:
    if out.resolve().is_relative_to(folder.resolve()):
        raise ToolkitError(
            "the output lies inside the checkpoint", where=out, fix="name a file outside the tag's folder"
        )


def _output_tensor(tensor: StoredTensor, target: DType) -> OutputTensor:
    dtype = target if tensor.dtype.is_convertible else tensor.dtype
    return OutputTensor(tensor.name, tensor.shape, dtype, tensor.num_elements * dtype.size_bytes)


def _write(
    out: Path, writer: Writer, weights: CheckpointMap, outputs: list[OutputTensor], progress: Progress | None
) -> int:
    """Size of the file in bytes."""
    needed_bytes = sum(output.num_bytes for output in outputs)
    read = [place for tensor in weights.tensors.values() for place in tensor.slices]
    # A master without a parameter may be one that was damaged.
    source_crcs = SourceCrcs(read + [master.place for group in weights.unnamed_masters for master in group])
    try:
        with whole_output(out) as partial:
            layout = writer.lay_out(partial, outputs, weights.names, weights.aliases)
            moves = sorted(_moves(weights, outputs, layout), key=lambda move: move.destination_offset_bytes)
            checksums = copy_ranges(
                moves, partial, checksums=writer.needs_checksums, source_crcs=source_crcs, progress=progress
            )
            source_crcs.check(default_num_threads())
            writer.finish(partial, checksums)
    except OSError as error:
        raise ToolkitError(
            "the output cannot be written",
            where=out,
            why=f"{error.strerror or error}; it needs {needed_bytes:,} bytes, "
            f"and {free_space_bytes(out.resolve().parent):,} are free",
        ) from error
    return layout.size_bytes


def _moves(weights: CheckpointMap, outputs: list[OutputTensor], layout: Layout) -> Iterator[Move | Gather]:
    for output in outputs:
        tensor = weights.tensors[output.name]
        position = layout.offsets_bytes[output.name]
        if not tensor.is_plain:
            yield Gather(tensor, 0, tensor.num_elements, position, output.dtype, output.name)
            continue
        for place in tensor.slices:
            move = Move(
                source=place.path,
                source_offset_bytes=place.offset_bytes,
                num_bytes=place.num_bytes,
                source_dtype=tensor.dtype,
                destination_offset_bytes=position,
                destination_dtype=output.dtype,
                member=output.name,
            )
            yield move
            position += move.num_written_bytes


def _notes(weights: CheckpointMap) -> Iterator[str]:
    num_unchecked = num_without_checksums(weights.shards)
    if num_unchecked:
        yield f"{num_unchecked} files have torch's old format, which has no checksums to compare"
    if weights.unnamed_masters:
        count = sum(map(len, weights.unnamed_masters))
        yield (
            f"{count} fp32 weights in the optimizer state could not be matched to parameters; "
            "the 16-bit weights of these parameters were taken"
        )
    if weights.left_out:
        yield f"left out, for they are no tensors: {', '.join(weights.left_out)}"
