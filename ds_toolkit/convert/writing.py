"""Carries out a plan: lays each output file out, copies the tensors in, and puts the whole in its place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_toolkit.checkpoint.shards import Slice
from ds_toolkit.checkpoint.tensors import StoredTensor
from ds_toolkit.convert.copying import BLOCK_BYTES, Progress, copy_ranges, disk_full, free_space_bytes
from ds_toolkit.convert.gathering import Gather
from ds_toolkit.convert.integrity import SourceCrcs
from ds_toolkit.convert.moves import Move, num_written_bytes, pieces
from ds_toolkit.convert.placing import partial_path, real_path, whole_folder, whole_output
from ds_toolkit.convert.targets import OutputFile, Target, index_of
from ds_toolkit.convert.weight_files import SAFETENSORS
from ds_toolkit.convert.writers import Layout
from ds_toolkit.errors import ToolkitError

# Measured: Python with numpy.
_BASE_BYTES = 36 * 2**20
# A block as it will stand, a piece of it as it is read, and what numpy makes of that for another type.
_BUFFERS_PER_THREAD = 4


def needed_memory_bytes(tensors: Mapping[str, StoredTensor], num_threads: int) -> int:
    """An estimate of the memory that `write` takes, this process included; the model's size is not in it."""
    spanned_bytes = max((_spanned_bytes(tensor) for tensor in tensors.values()), default=0)
    each_bytes = _BUFFERS_PER_THREAD * BLOCK_BYTES + spanned_bytes
    return _BASE_BYTES + num_threads * each_bytes


def check_space(target: Target, files: Sequence[OutputFile]) -> None:
    """Stop before anything is read if there is no room.

    Raises:
        ToolkitError: it says how much is needed and how much is free.
    """
    needed_bytes = sum(file.num_bytes for file in files)
    if needed_bytes > free_space_bytes(target.free_in):
        raise disk_full(target.free_in / "output", needed_bytes)


def _spanned_bytes(tensor: StoredTensor) -> int:
    if tensor.is_plain:
        return 0
    whole = Gather(tensor, 0, tensor.num_elements, 0, tensor.dtype, tensor.name)
    first = next(pieces(whole, BLOCK_BYTES), None)
    if first is None:
        return 0
    stop = first.start + first.num_elements
    return max(
        block.num_spanned * tensor.dtype.size_bytes
        for part in tensor.parts
        for row in part.blocks or ()
        for block in row.between(first.start, stop)
    )


def write(
    target: Target,
    files: Sequence[OutputFile],
    tensors: Mapping[str, StoredTensor],
    *,
    also_checked: Iterable[Slice] = (),
    num_threads: int,
    force: bool,
    progress: Progress | None,
) -> dict[Path, int]:
    """Write all files of an output; they appear under their names together, when all are on the disk.

    Every storage that is read is compared with its CRC-32, and so are those of `also_checked`.

    Returns:
        Sizes in bytes by path.

    Raises:
        ToolkitError: nothing was written, for the reason that it gives.
    """
    needed_bytes = sum(file.num_bytes for file in files)
    places = [*(place for tensor in tensors.values() for place in tensor.slices), *also_checked]
    # Only torch's archives hold CRCs.
    crcs = SourceCrcs(place for place in places if place.path.suffix != SAFETENSORS)
    work = _Work(target, tensors, num_threads, crcs, _Steps(needed_bytes, progress))
    try:
        if target.is_folder:
            return _write_folder(work, files, force=force)
        with whole_output(target.path, force=force) as partial:
            num_bytes = work.write_file(partial, files[0])
            crcs.check(num_threads)
        return {target.path: num_bytes}
    except OSError as error:
        raise _not_writable(target, needed_bytes, error.strerror or str(error)) from error
    except ToolkitError as error:
        raise _in_its_place(error, target) from error


def _write_folder(work: _Work, files: Sequence[OutputFile], *, force: bool) -> dict[Path, int]:
    folder, form = work.target.path, work.target.format
    last = form.index if len(files) > 1 else files[0].name
    with whole_folder(folder, last=last, replaced=form.is_own, force=force) as staged:
        sizes_bytes = {folder / file.name: work.write_file(staged / file.name, file) for file in files}
        work.source_crcs.check(work.num_threads)
        if len(files) > 1:
            index = index_of(files, form)
            (staged / form.index).write_bytes(index)
            sizes_bytes[folder / form.index] = len(index)
    return sizes_bytes


class _Steps:
    """The progress of several files as that of one."""

    def __init__(self, total_bytes: int, progress: Progress | None) -> None:
        self._total_bytes = total_bytes
        self._progress = progress
        self._before_bytes = 0

    def within(self) -> Progress | None:
        """What a file that is written next reports to."""
        progress, before_bytes = self._progress, self._before_bytes
        if progress is None:
            return None
        return lambda done_bytes, _: progress(before_bytes + done_bytes, self._total_bytes)

    def finish(self, num_bytes: int) -> None:
        """A file is done."""
        self._before_bytes += num_bytes


@dataclass(frozen=True)
class _Work:
    """What the files of one output have in common."""

    target: Target
    tensors: Mapping[str, StoredTensor]
    num_threads: int
    source_crcs: SourceCrcs
    steps: _Steps

    def write_file(self, path: Path, file: OutputFile) -> int:
        """Lay one file out, copy its tensors in, and give its size in bytes."""
        writer = file.new_writer(self.target.format)
        layout = writer.lay_out(path, file.tensors, file.names, file.aliases)
        moves = sorted(_moves(file, self.tensors, layout), key=lambda move: move.destination_offset_bytes)
        checksums = copy_ranges(
            moves,
            path,
            checksums=writer.needs_checksums,
            source_crcs=self.source_crcs,
            num_threads=self.num_threads,
            progress=self.steps.within(),
        )
        writer.finish(path, checksums)
        self.steps.finish(file.num_bytes)
        return layout.size_bytes


def _moves(file: OutputFile, tensors: Mapping[str, StoredTensor], layout: Layout) -> Iterator[Move | Gather]:
    for output in file.tensors:
        tensor = tensors[output.name]
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
            position += num_written_bytes(move)


def _not_writable(target: Target, needed_bytes: int, reason: str) -> ToolkitError:
    return ToolkitError(
        "the output cannot be written",
        where=target.path,
        why=f"{reason}; it needs {needed_bytes:,} bytes, and {free_space_bytes(target.free_in):,} are free",
    )


def _in_its_place(error: ToolkitError, target: Target) -> ToolkitError:
    """The same error, with the name of the output where it has that of its unfinished form."""
    hidden = partial_path(real_path(target.path)).name
    if error.where is None or hidden not in Path(error.where).parts:
        return error
    where = target.free_in if error.what == "the disk is too full for the output" else target.path
    return ToolkitError(error.what, where=where, why=error.why, fix=error.fix)
