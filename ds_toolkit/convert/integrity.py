"""Whether the bytes about to be copied are those that were saved.

torch writes a CRC-32 beside every storage of a shard (a member of its zip archive). It is compared for those
that hold what is asked for; the other states of the optimizer, twice as much as the weights, are not read.
"""

from __future__ import annotations

import os
import zlib
from bisect import bisect_right
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ds_toolkit.checkpoint.shards import Slice
from ds_toolkit.checkpoint.ziparchive import Member, read_members
from ds_toolkit.errors import ToolkitError

_PIECE_BYTES = 4 * 2**20


def check_slices(slices: Iterable[Slice], num_threads: int) -> None:
    """Read every storage that one of the slices lies in, and the structure beside it.

    Raises:
        ToolkitError: a storage has changed since it was saved, with its file and member.
    """
    offsets_bytes: dict[Path, set[int]] = {}
    for place in slices:
        if place.num_bytes:
            offsets_bytes.setdefault(place.path, set()).add(place.offset_bytes)
    work = [
        (path, member) for path, offsets in offsets_bytes.items() for member in _members_at(path, offsets)
    ]
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in pool.map(lambda path_and_member: _check(*path_and_member), work):
            pass


def _members_at(path: Path, offsets: set[int]) -> list[Member]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        members = sorted(read_members(descriptor).values(), key=lambda member: member.data_offset)
    finally:
        os.close(descriptor)
    starts = [member.data_offset for member in members]
    wanted = {bisect_right(starts, offset) - 1 for offset in offsets}
    structure = {number for number, member in enumerate(members) if member.name.endswith("/data.pkl")}
    # Zero is what torch writes where it was told to compute none (`set_crc32_options(False)`).
    return [members[number] for number in sorted(wanted | structure) if members[number].crc32]


def _check(path: Path, member: Member) -> None:
    crc32 = 0
    position, end = member.data_offset, member.data_offset + member.size_bytes
    descriptor = os.open(path, os.O_RDONLY)
    try:
        while position < end:
            piece = os.pread(descriptor, min(_PIECE_BYTES, end - position), position)
            if not piece:
                break
            crc32 = zlib.crc32(piece, crc32)
            position += len(piece)
    finally:
        os.close(descriptor)
    if position < end or crc32 != member.crc32:
        raise ToolkitError(
            "a shard has changed since it was saved",
            where=path,
            why=f"the CRC-32 of its member {member.name} is {crc32:08x}, saved as {member.crc32:08x}",
            fix="use another tag, or restore the file",
        )
