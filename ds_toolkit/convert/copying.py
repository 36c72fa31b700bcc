"""The engine that moves byte ranges from files to a file, converting element types on the way.

A few threads, each with one buffer: memory does not depend on how much is moved. Reading, writing, CRCs and
numpy's conversions all release the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ds_toolkit.checkpoint.crc32 import combined
from ds_toolkit.checkpoint.dtypes import DType, convert
from ds_toolkit.checkpoint.reading import read_into
from ds_toolkit.convert.gathering import Gather, Read
from ds_toolkit.convert.integrity import SourceCrcs
from ds_toolkit.errors import ToolkitError
from ds_toolkit.files import start_writing_back
from ds_toolkit.units import format_bytes

# Large enough for the disk, small enough for a processor's cache to hold it between reading, CRC and writing.
PIECE_BYTES = 2 * 2**20
MAX_THREADS = 8

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Move:
    """A byte range of a source file, where it goes in the destination, and as what.

    `num_bytes` counts source bytes, whole elements of `source_dtype`. Moves with the same `member` are
    consecutive parts of one member of the destination, whose CRC-32 is wanted.
    """

    source: Path
    source_offset_bytes: int
    num_bytes: int
    source_dtype: DType
    destination_offset_bytes: int
    destination_dtype: DType
    member: str

    @property
    def sources(self) -> Iterator[Path]:
        """The file that is read."""
        yield self.source

    @property
    def num_written_bytes(self) -> int:
        """Bytes in the destination."""
        return self.num_bytes // self.source_dtype.size_bytes * self.destination_dtype.size_bytes

    def pieces(self, piece_bytes: int) -> Iterator[Move]:
        """The same in pieces of at most so many bytes of the source."""
        if 0 < self.num_bytes <= piece_bytes:
            yield self
            return
        item_bytes, written_item_bytes = self.source_dtype.size_bytes, self.destination_dtype.size_bytes
        step_bytes = piece_bytes // item_bytes * item_bytes
        for start in range(0, self.num_bytes, step_bytes):
            written = start // item_bytes * written_item_bytes
            yield replace(
                self,
                source_offset_bytes=self.source_offset_bytes + start,
                num_bytes=min(step_bytes, self.num_bytes - start),
                destination_offset_bytes=self.destination_offset_bytes + written,
            )

    def fill(self, buffer: memoryview, read: Read) -> memoryview:
        """The bytes as they are in the source, at the front of the buffer."""
        raw = buffer[: self.num_bytes]
        read(self.source, self.source_offset_bytes, raw)
        return raw


def default_num_threads() -> int:
    """As many as this process may use processors, up to a number beyond which disks get no faster."""
    return min(len(os.sched_getaffinity(0)), MAX_THREADS)


def copy_ranges(
    moves: Sequence[Move | Gather],
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
        moves: Sequence[Move | Gather],
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
        self._total_bytes = sum(move.num_written_bytes for move in moves)
        self._done_bytes = 0
        self._pieces = (piece for move in moves for piece in move.pieces(PIECE_BYTES))
        self._lock = threading.Lock()
        self._descriptors: dict[Path, int] = {}
        self._crcs: list[tuple[int, str, int, int]] | None = [] if checksums else None

    def open_files(self, stack: contextlib.ExitStack) -> None:
        for path in dict.fromkeys(path for move in self._moves for path in move.sources):
            self._descriptors[path] = _opened(path, os.O_RDONLY, stack)
        self._written = _opened(self._destination, os.O_WRONLY, stack)

    def work(self) -> None:
        buffer = memoryview(bytearray(PIECE_BYTES))
        try:
            while not self.stop:
                with self._lock:
                    piece = next(self._pieces, None)
                if piece is None:
                    return
                self._carry(piece, buffer)
        except BaseException as error:
            with self._lock:
                self.error = self.error or self._explained(error)
            self.stop = True

    def _carry(self, piece: Move | Gather, buffer: memoryview) -> None:
        read_crcs: list[tuple[Path, int, int, int]] = []

        def read(source: Path, offset_bytes: int, out: memoryview) -> None:
            self._read(source, offset_bytes, out)
            if self._source_crcs is not None:
                read_crcs.append((source, offset_bytes, len(out), zlib.crc32(out)))

        raw = piece.fill(buffer, read)
        data = raw if piece.source_dtype == piece.destination_dtype else _converted(raw, piece)
        crc = self._written_crc(piece, data, read_crcs)
        self._write(piece.destination_offset_bytes, data)
        with self._lock:
            for read_crc in read_crcs:
                self._source_crcs.add(*read_crc)  # type: ignore[union-attr]
            if self._crcs is not None:
                self._crcs.append((piece.destination_offset_bytes, piece.member, crc, len(data)))
            self._done_bytes += len(data)
            if self._progress is not None:
                self._progress(self._done_bytes, self._total_bytes)

    def _written_crc(
        self, piece: Move | Gather, data: memoryview, read_crcs: Sequence[tuple[Path, int, int, int]]
    ) -> int:
        if self._crcs is None:
            return 0
        # A range that is written as it was read has one CRC; what is gathered may be in another order.
        is_as_read = isinstance(piece, Move) and piece.source_dtype == piece.destination_dtype
        return read_crcs[0][3] if is_as_read and read_crcs else zlib.crc32(data)

    def _write(self, offset_bytes: int, data: memoryview) -> None:
        num_written = 0
        while num_written < len(data):
            num_written += os.pwrite(self._written, data[num_written:], offset_bytes + num_written)
        # The disk works while the next pieces are read; else all of it would be waited for at the end.
        start_writing_back(self._written, offset_bytes, len(data))

    def _read(self, source: Path, offset_bytes: int, raw: memoryview) -> None:
        read_into(self._descriptors[source], source, offset_bytes, raw)

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


def _opened(path: Path, flags: int, stack: contextlib.ExitStack) -> int:
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        raise ToolkitError("a file cannot be opened", where=path, why=error.strerror) from error
    stack.callback(os.close, descriptor)
    return descriptor


def _converted(raw: memoryview, piece: Move | Gather) -> memoryview:
    import numpy as np

    return convert(np.frombuffer(raw, np.uint8), piece.source_dtype, piece.destination_dtype).data
