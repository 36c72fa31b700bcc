"""A file of a slot becomes one on the disk: in bounded memory, and with the CRCs that its archive lacks.

A rank writes none into its slots: summing up would cost it more than copying. Here the bytes pass by anyway.
"""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

from ds_toolkit.checkpoint.crc32 import combined
from ds_toolkit.checkpoint.ziparchive import MalformedArchiveError, Member, read_members
from ds_toolkit.files import start_writing_back
from ds_toolkit.guardian.deadline import Deadline

# Few large requests are fast; more than this would be most of the guardian's memory.
COPY_BYTES = 2 * 2**20
# Of the CRC in a local header and in an entry of the directory (PKWARE's APPNOTE.TXT, 4.3.7 and 4.3.12).
_HEADER_CRC_OFFSET, _ENTRY_CRC_OFFSET = 14, 16


def copy_file(source: Path, target: Path, deadline: Deadline) -> tuple[int, int]:
    """Copy, and flush; what is no archive is copied as it is.

    Returns:
        Size in bytes and CRC-32 of the new file.

    Raises:
        ToolkitError: the deadline has passed.
        OSError: the file cannot be written.
    """
    with source.open("rb", buffering=0) as reader, target.open("xb", buffering=0) as writer:
        copy = _Copy(reader.fileno(), writer.fileno(), deadline)
        crc32 = copy.run(_without_crc(reader.fileno()))
        os.fsync(writer.fileno())
        return copy.size_bytes, crc32


def _without_crc(descriptor: int) -> list[Member]:
    """Members whose CRC nobody has computed, as they lie in the file."""
    try:
        members = read_members(descriptor).values()
    except MalformedArchiveError:
        return []
    missing = [member for member in members if member.crc32 == 0 and member.size_bytes]
    return sorted(missing, key=lambda member: member.data_offset)


class _Copy:
    def __init__(self, reader: int, writer: int, deadline: Deadline) -> None:
        self._reader, self._writer, self._deadline = reader, writer, deadline
        self._buffer = memoryview(bytearray(COPY_BYTES))
        self.size_bytes = os.fstat(reader).st_size

    def run(self, members: list[Member]) -> int:
        """The CRC-32 of the whole."""
        crc32, position = 0, 0
        crcs = {}
        for member in members:
            crc32 = self._pass_on(position, member.header_offset, crc32)
            header = bytearray(
                os.pread(self._reader, member.data_offset - member.header_offset, member.header_offset)
            )
            position = member.data_offset + member.size_bytes
            crcs[member.entry_offset] = of_data = self._pass_on(member.data_offset, position, 0)
            struct.pack_into("<I", header, _HEADER_CRC_OFFSET, of_data)
            self._write(header, member.header_offset)
            crc32 = combined(zlib.crc32(header, crc32), of_data, member.size_bytes)
        if not members:
            return self._pass_on(0, self.size_bytes, 0)
        directory = min(crcs)
        crc32 = self._pass_on(position, directory, crc32)
        rest = bytearray(os.pread(self._reader, self.size_bytes - directory, directory))
        for entry_offset, of_data in crcs.items():
            struct.pack_into("<I", rest, entry_offset - directory + _ENTRY_CRC_OFFSET, of_data)
        self._write(rest, directory)
        return zlib.crc32(rest, crc32)

    def _pass_on(self, start: int, stop: int, crc32: int) -> int:
        """Copy a range, and go on with a CRC over it."""
        while start < stop:
            self._deadline.check()
            view = self._buffer[: min(stop - start, COPY_BYTES)]
            count = os.preadv(self._reader, [view], start)
            if count == 0:
                # It became shorter: whoever compares the slot's sequence finds out why.
                break
            crc32 = zlib.crc32(view[:count], crc32)
            self._write(view[:count], start)
            start_writing_back(self._writer, start, count)
            start += count
        return crc32

    def _write(self, data: memoryview | bytearray, offset: int) -> None:
        # A disk that is nearly full takes a part, and refuses the rest at the next try.
        view = memoryview(data)
        while view:
            count = os.pwrite(self._writer, view, offset)
            view, offset = view[count:], offset + count
