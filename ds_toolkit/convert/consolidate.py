"""A checkpoint's weights as files that plain PyTorch, or any reader of safetensors, loads."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_toolkit.checkpoint.dtypes import DTYPES, DType
from ds_toolkit.checkpoint.layout import find_tag_folder
from ds_toolkit.checkpoint.masters import name_masters
from ds_toolkit.checkpoint.tensors import CheckpointMap, Role
from ds_toolkit.checkpoint.weights import read_weights
from ds_toolkit.convert.comparison import Comparison, compare_with_upstream
from ds_toolkit.convert.copying import Progress, default_num_threads, free_space_bytes
from ds_toolkit.convert.replicas import check_replicas
from ds_toolkit.convert.selection import Choice, Selected, notes_on, select
from ds_toolkit.convert.targets import FORMATS, OutputFile, Target, find_target, keep_clear_of, output_files
from ds_toolkit.convert.weight_files import read_weight_files
from ds_toolkit.convert.writing import check_space, needed_memory_bytes, write
from ds_toolkit.errors import ToolkitError
from ds_toolkit.units import parse_bytes

# More threads only wait for each other.
MAX_JOBS = 256
OUTPUT_DTYPES = {"fp32": DTYPES["float32"], "bf16": DTYPES["bfloat16"], "fp16": DTYPES["float16"]}
DEFAULT_SHARD_SIZE = "5GB"


@dataclass(frozen=True)
class Consolidated:
    """What was read and written, or would be.

    Attributes:
        files: the files of the output, and in a folder its index.
        written: false after a dry run; `num_bytes` then counts the tensors alone.
        num_shards: files that were read.
        num_tensors: entries of the output, buffers included and aliases of tied weights left out.
        num_parameters: elements of weights, buffers left out.
        num_bytes: size of the output.
        num_from_base: names that came from the base.
        memory_bytes: about as much memory does it take.
        free_bytes: on the output's file system, before it was written.
        notes: what the reader of a summary should know about the weights.
        comparison: how DeepSpeed's own script reads the checkpoint, if that was asked for.
    """

    output: Path
    files: tuple[Path, ...]
    written: bool
    tag: str
    stage: int
    step: int
    dp_world_size: int
    tp_world_size: int
    pp_world_size: int
    ds_version: str | None
    dtype: str
    num_shards: int
    num_tensors: int
    num_parameters: int
    num_bytes: int
    num_from_base: int
    memory_bytes: int
    free_bytes: int
    seconds: float
    aliases: dict[str, str]
    missing: tuple[str, ...]
    notes: tuple[str, ...]
    comparison: Comparison | None

    @property
    def bytes_per_second(self) -> float:
        """Output bytes over wall-clock time, everything but the comparison included."""
        return self.num_bytes / self.seconds

    @property
    def fits(self) -> bool:
        """Whether the output's file system had room for it."""
        return self.num_bytes <= self.free_bytes


def consolidate(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tag: str | None = None,
    dtype: str = "fp32",
    file_format: str | None = None,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    exclude_frozen: bool = False,
    strip_prefix: str = "",
    only: Sequence[str] = (),
    base: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    check: bool = False,
    trust: bool = False,
    dry_run: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> Consolidated:
    """Write the weights of a DeepSpeed checkpoint into one file, or into a folder as Hugging Face's.

    Nothing in the checkpoint is executed (unless `check` and `trust` are given), and memory does not grow
    with the model. Every storage that is read is compared with the CRC-32 that was saved beside it. The
    output appears under its name only when it is complete and on the disk.

    Args:
        checkpoint: the save directory, or the folder of a tag in it.
        out: a `.bin`, `.pt` or `.pth` file (a state dict by `torch.save`), a `.safetensors` file, or a
            folder: one that is there, or a name that ends in a slash.
        tag: which checkpoint; by default the one that `latest` names.
        dtype: `fp32`, `bf16` or `fp16`, of all floating tensors; others, and 8-bit floats, are kept exactly.
        file_format: of a folder's files, `safetensors` (the default) or `bin`.
        max_shard_size: of a folder's files, in bytes or as text (`5GB`); a larger tensor has its own file.
        exclude_frozen: whether to leave frozen weights out.
        strip_prefix: removed from the names that begin with it, such as `module.`.
        only: globs; a tensor is written if one matches its name in the checkpoint or in the output.
        base: a file or a folder of weights; what the checkpoint lacks is taken from there.
        jobs: threads; by default as many as there are processors to use, up to eight.
        check: whether to let DeepSpeed's own zero_to_fp32 read the checkpoint, in a process of its own, and
            compare. It executes what is in the checkpoint, therefore `trust` must be given too.
        trust: that the checkpoint comes from somebody who may run code here.
        dry_run: whether to write nothing and say what would be written.
        force: whether to replace the output if it exists.
        progress: called with bytes written so far and bytes in all, perhaps from other threads.

    Raises:
        ToolkitError: nothing was written, for the reason that it gives.
    """
    started = time.perf_counter()
    output_dtype, shard_bytes, num_threads = _settings(dtype, max_shard_size, jobs)
    _check_combination(exclude_frozen=exclude_frozen, base=base, check=check, trust=trust, dry_run=dry_run)
    target = find_target(out, file_format, force=force)
    folder = find_tag_folder(Path(checkpoint), tag)
    weights = name_masters(read_weights(folder))
    keep_clear_of(target, folder)
    filled = read_weight_files(Path(base)) if base is not None else None
    only = (only,) if isinstance(only, str) else tuple(only)
    selected = select(weights, Choice(only, exclude_frozen, strip_prefix), filled)
    files = output_files(target, selected, output_dtype, shard_bytes)
    free_bytes = free_space_bytes(target.free_in)
    notes = list(_notes(weights, selected, target, has_base=filled is not None))
    if dry_run:
        sizes_bytes = {_path_of(target, file): file.num_bytes for file in files}
    else:
        check_space(target, files)
        notes += check_replicas(weights.replicas)
        sizes_bytes = write(
            target,
            files,
            selected.tensors,
            # A master without a parameter may be one that was damaged.
            also_checked=[master.place for group in weights.unnamed_masters for master in group],
            num_threads=num_threads,
            force=force,
            progress=progress,
        )
    seconds = time.perf_counter() - started
    tensors = selected.tensors.values()
    return Consolidated(
        output=target.path,
        files=tuple(sizes_bytes),
        written=not dry_run,
        tag=folder.resolve().name,
        stage=weights.stage,
        step=weights.step,
        dp_world_size=weights.dp_world_size,
        tp_world_size=weights.tp_world_size,
        pp_world_size=weights.pp_world_size,
        ds_version=weights.ds_version,
        dtype=dtype,
        num_shards=len({*weights.shards, *(place.path for tensor in tensors for place in tensor.slices)}),
        num_tensors=len(tensors),
        num_parameters=sum(tensor.num_elements for tensor in tensors if tensor.role is not Role.BUFFER),
        num_bytes=sum(sizes_bytes.values()),
        num_from_base=len(selected.from_base),
        memory_bytes=needed_memory_bytes(selected.tensors, num_threads),
        free_bytes=free_bytes,
        seconds=seconds,
        aliases=dict(selected.aliases),
        missing=selected.missing,
        notes=tuple(notes),
        comparison=compare_with_upstream(folder, target, selected, weights, dtype) if check else None,
    )


def _settings(dtype: str, max_shard_size: str | int, jobs: int | None) -> tuple[DType, int, int]:
    if dtype not in OUTPUT_DTYPES:
        raise ToolkitError(f"`{dtype}` is no output dtype", fix=f"choose one of {', '.join(OUTPUT_DTYPES)}")
    shard_bytes = parse_bytes(max_shard_size) if isinstance(max_shard_size, str) else max_shard_size
    if shard_bytes < 1:
        raise ToolkitError(f"a shard of {shard_bytes} bytes holds nothing", fix="write it as 5GB or 500MB")
    if jobs is not None and not 1 <= jobs <= MAX_JOBS:
        raise ToolkitError(f"{jobs} is no number of threads", fix=f"give 1 to {MAX_JOBS}")
    return OUTPUT_DTYPES[dtype], shard_bytes, jobs or default_num_threads()


def _check_combination(
    *, exclude_frozen: bool, base: object, check: bool, trust: bool, dry_run: bool
) -> None:
    if exclude_frozen and base is not None:
        raise ToolkitError(
            "frozen weights cannot be both left out and taken from a base",
            fix="leave one of the two options out",
        )
    if check and not trust:
        raise ToolkitError(
            "the comparison runs code that is in the checkpoint",
            why="DeepSpeed's zero_to_fp32 unpickles the shards",
            fix="give --trust as well if you know who wrote this checkpoint, or leave --check out",
        )
    if check and dry_run:
        raise ToolkitError("a dry run writes nothing that could be compared", fix="leave --check out")


def _path_of(target: Target, file: OutputFile) -> Path:
    return target.path / file.name if target.is_folder else target.path


def _notes(weights: CheckpointMap, selected: Selected, target: Target, *, has_base: bool) -> Iterator[str]:
    yield from notes_on(weights, selected, has_base=has_base)
    first = FORMATS["safetensors"]
    if target.is_folder and target.format is not first:
        for name in (first.single, first.index):
            if (target.path / name).exists():
                yield f"the folder holds {name} too, which Hugging Face's libraries take before .bin files"
