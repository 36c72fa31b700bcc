"""Whether the bytes that are copied are those that were saved.

torch writes a CRC-32 beside every storage of a shard (a member of its zip archive). It is compared for those
that hold what is asked for; the other states of the optimizer, twice as much as the weights, are not read.
The CRCs of the pieces that are copied anyway are joined to those of whole members, so that nothing is read
twice; what lies between the pieces is read here.
"""

from __future__ import annotations

import os
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ds_toolkit.checkpoint.crc32 import combined
from ds_toolkit.checkpoint.legacy import is_legacy_file
from ds_toolkit.checkpoint.shards import Slice
from ds_toolkit.checkpoint.ziparchive import Member, read_members
from ds_toolkit.errors import ToolkitError

_PIECE_BYTES = 4 * 2**20


class SourceCrcs:
    """The CRCs of what was read, by file and place, to be compared with those that the files hold."""

    def __init__(self, slices: Iterable[Slice]) -> None:
        """`slices` are the byte ranges that are going to be read."""
        self._offsets: dict[Path, set[int]] = {}
        self._read: dict[Path, list[tuple[int, int, int]]] = {}
        for place in slices:
            if place.num_bytes:
                self._offsets.setdefault(place.path, set()).add(place.offset_bytes)

    def add(self, path: Path, offset_bytes: int, num_bytes: int, crc32: int) -> None:
        """Bytes of a file were read, and this is their CRC; one thread at a time."""
        self._read.setdefault(path, []).append((offset_bytes, num_bytes, crc32))

    def check(self, num_threads: int) -> None:
        """Compare every storage that one of the slices lies in, and the structure beside it.

        Raises:
            ToolkitError: one has changed since it was saved, with its file and member.
        """
        with ThreadPoolExecutor(num_threads) as pool:
            for _ in pool.map(lambda work: self._check(*work), list(self._work())):
                pass

    def _work(self) -> Iterator[tuple[Path, Member, list[tuple[int, int, int]]]]:
        for path, offsets in self._offsets.items():
            pieces = sorted(self._read.get(path, ()))
            starts = [start for start, _, _ in pieces]
            for member in _members_at(path, offsets):
                first = bisect_right(starts, member.data_offset - 1)
                last = bisect_right(starts, member.data_offset + member.size_bytes - 1)
                yield path, member, pieces[first:last]

    @staticmethod
    def _check(path: Path, member: Member, pieces: list[tuple[int, int, int]]) -> None:
        position, end = member.data_offset, member.data_offset + member.size_bytes
        crc32 = 0
        descriptor = _opened(path)
        try:
            for start, num_bytes, piece_crc32 in pieces:
                # What was read twice counts once; of two that overlap, the rest of the second is a gap.
                if start < position or start + num_bytes > end:
                    continue
                crc32 = _crc32_on(descriptor, position, start, crc32)
                crc32 = combined(crc32, piece_crc32, num_bytes)
                position = start + num_bytes
            crc32 = _crc32_on(descriptor, position, end, crc32)
        finally:
            os.close(descriptor)
        if crc32 != member.crc32:
            raise ToolkitError(
                "a shard has changed since it was saved",
                where=path,
                why=f"the CRC-32 of its member {member.name} is {crc32:08x}, saved as {member.crc32:08x}",
                fix="use another tag, or restore the file",
            )


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY)
    except OSError as error:
        raise ToolkitError(
            "a checkpoint file cannot be opened any more",
            where=path,
            why=error.strerror,
            fix="bring the file back, or take another tag",
        ) from error


def num_without_checksums(paths: Iterable[Path]) -> int:
    """How many of the files have torch's old format, which holds no checksums to compare."""
    return sum(is_legacy_file(path) for path in paths)


def _members_at(path: Path, offsets: set[int]) -> list[Member]:
    descriptor = _opened(path)
    try:
        if is_legacy_file(path):
            return []
        members = sorted(read_members(descriptor).values(), key=lambda member: member.data_offset)
    finally:
        os.close(descriptor)
    starts = [member.data_offset for member in members]
    wanted = {bisect_right(starts, offset) - 1 for offset in offsets}
    structure = {number for number, member in enumerate(members) if member.name.endswith("/data.pkl")}
    # Zero is what torch writes where it was told to compute none (`set_crc32_options(False)`).
    return [members[number] for number in sorted(wanted | structure) if members[number].crc32]


def _crc32_on(descriptor: int, start: int, end: int, crc32: int) -> int:
    """The CRC continued over bytes [start, end) of a file, as far as there are any."""
    while start < end:
        piece = os.pread(descriptor, min(_PIECE_BYTES, end - start), start)
        if not piece:
            break
        crc32 = zlib.crc32(piece, crc32)
        start += len(piece)
    return crc32
