"""Where the members of an uncompressed zip archive lie in their file (torch.save writes such archives).

Format: PKWARE's APPNOTE.TXT, sections 4.3.7 (local header), 4.3.12 (central directory), 4.3.14 to 4.3.16
(its end, zip64's included). Python's zipfile reads as much as an archive claims to hold; this one reads no
more than the file can hold, and refuses whatever torch would not have written.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass

MAX_DIRECTORY_BYTES = 256 * 2**20
LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")
LOCAL_SIGNATURE = b"PK\x03\x04"
_FILLED_BY_ZIP64 = 0xFFFFFFFF
_ENCRYPTED = 1


class MalformedArchiveError(Exception):
    """The bytes are not an archive that torch could have written; the text says why."""


class TruncatedArchiveError(MalformedArchiveError):
    """The archive has no end: the file is cut short."""


@dataclass(frozen=True)
class Member:
    """One member: the bytes [data_offset, data_offset + size_bytes) of the archive's file.

    `entry_offset` is where its record in the central directory begins, `header_offset` where its header does.
    """

    name: str
    data_offset: int
    size_bytes: int
    crc32: int
    entry_offset: int
    header_offset: int = 0


def read_members(descriptor: int) -> dict[str, Member]:
    """Every member by name, in the order of the central directory.

    Raises:
        MalformedArchiveError: members are compressed, encrypted, twice there, overlapping or out of range.
        TruncatedArchiveError: the end is missing.
    """
    size_bytes = os.fstat(descriptor).st_size
    num_entries, directory_offset, directory_bytes = _find_directory(descriptor, size_bytes)
    directory = os.pread(descriptor, directory_bytes, directory_offset)
    if len(directory) != directory_bytes:
        raise MalformedArchiveError("its directory lies outside the file")
    members: dict[str, Member] = {}
    position = 0
    for _ in range(num_entries):
        member, length = _parse_entry(descriptor, directory, position, directory_offset)
        if member.name in members:
            raise MalformedArchiveError(f"its member {member.name!r} is there twice")
        members[member.name] = member
        position += length
    _check_overlaps(members)
    return members


def _find_directory(descriptor: int, size_bytes: int) -> tuple[int, int, int]:
    """Number of entries, offset and size of the central directory."""
    end_offset = size_bytes - _END.size
    tail = os.pread(descriptor, _END.size, max(end_offset, 0))
    # torch writes no comment, so that the end record is the end of the file.
    if len(tail) < _END.size or not tail.startswith(b"PK\x05\x06") or tail[-2:] != b"\0\0":
        if os.pread(descriptor, 4, 0) == LOCAL_SIGNATURE or size_bytes == 0:
            raise TruncatedArchiveError("it has no end")
        raise MalformedArchiveError("it is not a zip archive")
    _, _, _, _, num_entries, directory_bytes, directory_offset, _ = _END.unpack(tail)
    locator_offset = end_offset - _END64_LOCATOR.size
    locator = os.pread(descriptor, _END64_LOCATOR.size, locator_offset) if locator_offset >= 0 else b""
    if locator.startswith(b"PK\x06\x07"):
        _, _, end64_offset, _ = _END64_LOCATOR.unpack(locator)
        record = os.pread(descriptor, _END64.size, end64_offset) if end64_offset < size_bytes else b""
        if len(record) < _END64.size or not record.startswith(b"PK\x06\x06"):
            raise MalformedArchiveError("its zip64 end record is not where it should be")
        *_, num_entries, directory_bytes, directory_offset = _END64.unpack(record)
    if directory_offset + directory_bytes > end_offset:
        raise MalformedArchiveError("its directory lies outside the file")
    if directory_bytes > MAX_DIRECTORY_BYTES or num_entries * _ENTRY.size > directory_bytes:
        raise MalformedArchiveError(
            f"its directory of {num_entries} entries in {directory_bytes} bytes is absurd"
        )
    return num_entries, directory_offset, directory_bytes


def _parse_entry(descriptor: int, directory: bytes, position: int, data_end: int) -> tuple[Member, int]:
    """A member, and the length of its record."""
    if position + _ENTRY.size > len(directory) or directory[position : position + 4] != b"PK\x01\x02":
        raise MalformedArchiveError("its directory is damaged")
    fields = _ENTRY.unpack_from(directory, position)
    flags, method, crc32, stored, size_bytes = fields[3], fields[4], fields[7], fields[8], fields[9]
    name_length, extra_length, comment_length, header_offset = fields[10], fields[11], fields[12], fields[16]
    name_end = position + _ENTRY.size + name_length
    raw_name = directory[name_end - name_length : name_end]
    extra = directory[name_end : name_end + extra_length]
    size_bytes, stored, header_offset = _zip64_values(extra, size_bytes, stored, header_offset)
    name = raw_name.decode("utf-8", errors="replace")
    if method != 0 or flags & _ENCRYPTED or stored != size_bytes:
        raise MalformedArchiveError(f"its member {name!r} is compressed or encrypted")
    header = os.pread(descriptor, LOCAL_HEADER.size, header_offset) if header_offset < data_end else b""
    if len(header) < LOCAL_HEADER.size or not header.startswith(LOCAL_SIGNATURE):
        raise MalformedArchiveError(f"its member {name!r} is not where the directory says")
    *_, local_name_length, local_extra_length = LOCAL_HEADER.unpack(header)
    data_offset = header_offset + LOCAL_HEADER.size + local_name_length + local_extra_length
    if data_offset + size_bytes > data_end:
        raise MalformedArchiveError(f"its member {name!r} reaches beyond the data")
    length = _ENTRY.size + name_length + extra_length + comment_length
    member = Member(name, data_offset, size_bytes, crc32, data_end + position, header_offset)
    return member, length


def _zip64_values(extra: bytes, *fields: int) -> list[int]:
    """Size, stored size and header offset, those that did not fit 32 bits taken from the extra field."""
    if _FILLED_BY_ZIP64 not in fields:
        return list(fields)
    position = 0
    while position + 4 <= len(extra):
        identifier, length = struct.unpack_from("<HH", extra, position)
        if identifier == 1:
            wanted = fields.count(_FILLED_BY_ZIP64)
            if length < 8 * wanted or position + 4 + 8 * wanted > len(extra):
                break
            values = iter(struct.unpack_from(f"<{wanted}Q", extra, position + 4))
            return [next(values) if field == _FILLED_BY_ZIP64 else field for field in fields]
        position += 4 + length
    raise MalformedArchiveError("a zip64 size is missing")


def _check_overlaps(members: dict[str, Member]) -> None:
    end = 0
    for member in sorted(members.values(), key=lambda member: member.data_offset):
        if member.data_offset < end:
            raise MalformedArchiveError(f"its member {member.name!r} overlaps another")
        end = member.data_offset + member.size_bytes
