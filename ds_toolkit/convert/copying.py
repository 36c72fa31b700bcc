"""The engine that moves byte ranges from files to a file, converting element types on the way.

A few threads, each with a block of the destination: memory does not depend on how much is moved. Reading,
writing, CRCs and numpy's conversions all release the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from ds_toolkit.checkpoint.crc32 import combined
from ds_toolkit.checkpoint.dtypes import convert
from ds_toolkit.checkpoint.reading import read_into
from ds_toolkit.convert.integrity import SourceCrcs
from ds_toolkit.convert.moves import Block, Elements, blocks, num_written_bytes
from ds_toolkit.convert.output_file import ALIGNMENT_BYTES, OutputFile
from ds_toolkit.errors import ToolkitError
from ds_toolkit.units import format_bytes

# Large enough for the disk, small enough for a processor's cache to hold it between reading, CRC and writing.
BLOCK_BYTES = 2 * 2**20
THREADS_PER_CPU = 2
MAX_THREADS = 8

Progress = Callable[[int, int], None]
# Source, place, size and CRC-32 of what was read; place, member, CRC-32 and size of what was written.
_RangeCrc = tuple[Path, int, int, int]
_MemberCrc = tuple[int, str, int, int]


def default_num_threads() -> int:
    """Some for each processor, since half of them wait for the disk, up to where disks get no faster."""
    return min(THREADS_PER_CPU * len(os.sched_getaffinity(0)), MAX_THREADS)


def copy_ranges(
    moves: Sequence[Elements],
    destination: Path,
    *,
    checksums: bool = False,
    source_crcs: SourceCrcs | None = None,
    num_threads: int | None = None,
    progress: Progress | None = None,
) -> dict[str, int]:
    """Carry out a plan of moves that do not overlap in the destination, which exists.

    Args:
        checksums: whether to compute the CRC-32 of what is written, by member.
        source_crcs: told the CRC-32 of everything that is read.
        progress: called with bytes written so far and bytes in all, from several threads, one at a time.

    Returns:
        CRC-32 by member; empty without `checksums`.

    Raises:
        ToolkitError: a source is gone or too short, or the disk is full.
    """
    crew = _Crew(moves, destination, source_crcs, checksums=checksums, progress=progress)
    with contextlib.ExitStack() as stack:
        crew.open_files(stack)
        threads = [threading.Thread(target=crew.work) for _ in range(num_threads or default_num_threads())]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        finally:
            # Reached early by Ctrl-C: the files must not be closed under a thread that still uses them.
            crew.stop = True
            for thread in threads:
                thread.join()
    if crew.error is not None:
        raise crew.error
    return crew.member_crcs()


class _Crew:
    """What the threads share."""

    def __init__(
        self,
        moves: Sequence[Elements],
        destination: Path,
        source_crcs: SourceCrcs | None,
        *,
        checksums: bool,
        progress: Progress | None,
    ) -> None:
        self.stop = False
        self.error: BaseException | None = None
        self._moves = moves
        self._destination = destination
        self._progress = progress
        self._source_crcs = source_crcs
        self._total_bytes = sum(map(num_written_bytes, moves))
        self._done_bytes = 0
        self._blocks = blocks(moves, BLOCK_BYTES)
        self._lock = threading.Lock()
        self._descriptors: dict[Path, int] = {}
        self._crcs: list[_MemberCrc] | None = [] if checksums else None

    def open_files(self, stack: contextlib.ExitStack) -> None:
        for path in dict.fromkeys(path for move in self._moves for path in move.sources):
            self._descriptors[path] = _opened(path, stack)
        try:
            self._output = OutputFile(self._destination, stack)
        except OSError as error:
            raise self._explained(error) from error

    def work(self) -> None:
        # Pages of its own, as direct writing wants them; the last element may reach over the block's end.
        buffer = memoryview(mmap.mmap(-1, BLOCK_BYTES + ALIGNMENT_BYTES))
        scratch = memoryview(bytearray(BLOCK_BYTES))
        try:
            while not self.stop:
                with self._lock:
                    block = next(self._blocks, None)
                if block is None:
                    return
                self._carry(block, buffer, scratch)
        except BaseException as error:
            with self._lock:
                self.error = self.error or self._explained(error)
            self.stop = True

    def _carry(self, block: Block, buffer: memoryview, scratch: memoryview) -> None:
        read_crcs: list[_RangeCrc] = []
        written_crcs: list[_MemberCrc] = []

        def read(source: Path, offset_bytes: int, out: memoryview) -> None:
            read_into(self._descriptors[source], source, offset_bytes, out)
            if self._source_crcs is not None:
                read_crcs.append((source, offset_bytes, len(out), zlib.crc32(out)))

        for piece in block.pieces:
            start, num_bytes = piece.destination_offset_bytes, num_written_bytes(piece)
            data = buffer[start - block.start_bytes :][:num_bytes]
            is_kept = piece.source_dtype == piece.destination_dtype
            raw = piece.fill(data if is_kept else scratch, read)
            if not is_kept:
                data[:] = _converted(raw, piece)
            if self._crcs is not None:
                # What is written as it was read has one CRC; what is gathered may be in another order.
                is_as_read = is_kept and piece.is_in_order and read_crcs
                crc32 = read_crcs[-1][-1] if is_as_read else zlib.crc32(data)
                written_crcs.append((start, piece.member, crc32, num_bytes))
        self._write(block, buffer)
        self._note(block, read_crcs, written_crcs)

    def _write(self, block: Block, buffer: memoryview) -> None:
        if block.is_whole:
            self._output.write_block(block.start_bytes, buffer[:BLOCK_BYTES])
            return
        for start, end in block.runs():
            self._output.write(start, buffer[start - block.start_bytes : end - block.start_bytes])

    def _note(self, block: Block, read_crcs: Sequence[_RangeCrc], written_crcs: Sequence[_MemberCrc]) -> None:
        with self._lock:
            for read_crc in read_crcs:
                self._source_crcs.add(*read_crc)  # type: ignore[union-attr]
            if self._crcs is not None:
                self._crcs.extend(written_crcs)
            self._done_bytes += sum(map(num_written_bytes, block.pieces))
            if self._progress is not None:
                self._progress(self._done_bytes, self._total_bytes)

    def _explained(self, error: BaseException) -> BaseException:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return disk_full(self._destination, self._total_bytes)
        if isinstance(error, OSError):
            return ToolkitError("copying failed", where=self._destination, why=str(error))
        return error

    def member_crcs(self) -> dict[str, int]:
        crcs: dict[str, int] = {}
        for _, member, crc, num_bytes in sorted(self._crcs or ()):
            crcs[member] = combined(crcs[member], crc, num_bytes) if member in crcs else crc
        return crcs


def disk_full(destination: Path, needed_bytes: int) -> ToolkitError:
    """Says how much the output needs and how much is free beside it."""
    free_bytes = free_space_bytes(destination.parent)
    return ToolkitError(
        "the disk is too full for the output",
        where=destination.parent,
        why=f"the output needs {format_bytes(needed_bytes)}, and {format_bytes(free_bytes)} are free",
        fix="make room, or write to another disk",
    )


def free_space_bytes(folder: Path) -> int:
    """What an ordinary user may still write there."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _opened(path: Path, stack: contextlib.ExitStack) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise ToolkitError("a file cannot be opened", where=path, why=error.strerror) from error
    stack.callback(os.close, descriptor)
    return descriptor


def _converted(raw: memoryview, piece: Elements) -> memoryview:
    import numpy as np

    return convert(np.frombuffer(raw, np.uint8), piece.source_dtype, piece.destination_dtype).data
