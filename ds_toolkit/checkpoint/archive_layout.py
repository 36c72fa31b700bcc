"""A file of `torch.save` whose storages lie at fixed places, and may be filled before its pickle is made.

torch writes the pickle first and the storages behind it, so that all of them move when the pickle grows by a
byte (a step counter that passes 255 is enough). Here the storages come first and the pickle last: where each
lies depends on the sizes alone.

Format: PKWARE's APPNOTE.TXT, sections 4.3.7, 4.3.12, 4.3.14 to 4.3.16 and 4.5.3 (zip64). Members are those of
torch's `_save` (torch/serialization.py) and of PyTorchStreamWriter (caffe2/serialize).
torch reads members by name, in any order.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

ROOT = "archive"
# torch aligns storages so, and loads faster what is aligned.
ALIGNMENT_BYTES = 64
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_END64 = struct.Struct("<4sQ2H2I4Q")
_END64_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4H2IH")
_ZIP64_ID, _PADDING_ID = 1, 0x4246
_VERSION_NEEDED = 45
_IN_ZIP64 = 0xFFFFFFFF
_MOST_ENTRIES = 0xFFFF
# What torch writes beside the pickle and the storages; PyTorchStreamReader asks for the version.
_CONSTANTS = {".format_version": b"1", "byteorder": b"little", "version": b"3\n"}


@dataclass(frozen=True)
class ArchiveLayout:
    """Where everything lies in a file whose storages have these sizes in bytes, named 0, 1, 2 and so on."""

    storage_bytes: Sequence[int]
    offsets_bytes: Sequence[int] = field(init=False)
    tail_offset_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        offsets, position = [], 0
        for key, size_bytes in enumerate(self.storage_bytes):
            offset = _aligned(position + len(_local_header(_storage_name(key), size_bytes, 0)))
            offsets.append(offset)
            position = offset + size_bytes
        object.__setattr__(self, "offsets_bytes", tuple(offsets))
        object.__setattr__(self, "tail_offset_bytes", position)

    def header(self, key: int, crc32: int = 0) -> tuple[int, bytes]:
        """What stands in front of a storage, and at which offset; a CRC of 0 is one that nobody computed."""
        start = self._start(key)
        whole_bytes = self.offsets_bytes[key] - start
        return start, _local_header(_storage_name(key), self.storage_bytes[key], crc32, whole_bytes)

    def tail(self, pickled: bytes, crcs: Mapping[int, int] | None = None) -> bytes:
        """What stands behind the storages, from `tail_offset_bytes` to the end of the file.

        Args:
            pickled: `data.pkl`, whose persistent ids name the storages by their numbers.
            crcs: CRC-32 of each storage; without, 0, which torch does not look at.
        """
        directory = bytearray(self._entries(crcs) if crcs else self._entries_without_crcs)
        out = bytearray()
        for name, content in {"data.pkl": pickled, **_CONSTANTS}.items():
            crc32, full_name = zlib.crc32(content), f"{ROOT}/{name}"
            directory += _entry(full_name, len(content), crc32, self.tail_offset_bytes + len(out))
            out += _local_header(full_name, len(content), crc32) + content
        num_entries = len(self.storage_bytes) + 1 + len(_CONSTANTS)
        end = _end(num_entries, len(directory), self.tail_offset_bytes + len(out))
        return bytes(out) + bytes(directory) + end

    def _start(self, key: int) -> int:
        return self.offsets_bytes[key - 1] + self.storage_bytes[key - 1] if key else 0

    @cached_property
    def _entries_without_crcs(self) -> bytes:
        # A snapshot has them at every step.
        return self._entries({})

    def _entries(self, crcs: Mapping[int, int]) -> bytes:
        return b"".join(
            _entry(_storage_name(key), size_bytes, crcs.get(key, 0), self._start(key))
            for key, size_bytes in enumerate(self.storage_bytes)
        )


def _storage_name(key: int) -> str:
    return f"{ROOT}/data/{key}"


def _aligned(position: int) -> int:
    # An extra field for padding takes four bytes at the least.
    return -(-(position + 4) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _local_header(name: str, size_bytes: int, crc32: int, whole_bytes: int | None = None) -> bytes:
    """A member's header; `whole_bytes`, if given, is the length that padding brings it to."""
    encoded = name.encode()
    extra = b""
    size = size_bytes
    if size_bytes >= _IN_ZIP64:
        extra, size = struct.pack("<2H2Q", _ZIP64_ID, 16, size_bytes, size_bytes), _IN_ZIP64
    if whole_bytes is not None:
        num_padding = whole_bytes - _LOCAL_HEADER.size - len(encoded) - len(extra) - 4
        extra += struct.pack("<2H", _PADDING_ID, num_padding) + bytes(num_padding)
    fields = (b"PK\x03\x04", _VERSION_NEEDED, 0, 0, 0, 0, crc32, size, size, len(encoded), len(extra))
    return _LOCAL_HEADER.pack(*fields) + encoded + extra


def _entry(name: str, size_bytes: int, crc32: int, header_offset: int) -> bytes:
    encoded = name.encode()
    values = [value for value in (size_bytes, size_bytes, header_offset) if value >= _IN_ZIP64]
    extra = struct.pack(f"<2H{len(values)}Q", _ZIP64_ID, 8 * len(values), *values) if values else b""
    size, offset = min(size_bytes, _IN_ZIP64), min(header_offset, _IN_ZIP64)
    versions = (_VERSION_NEEDED, _VERSION_NEEDED)
    lengths = (len(encoded), len(extra), 0)
    fields = (b"PK\x01\x02", *versions, 0, 0, 0, 0, crc32, size, size, *lengths, 0, 0, 0, offset)
    return _ENTRY.pack(*fields) + encoded + extra


def _end(num_entries: int, directory_bytes: int, directory_offset: int) -> bytes:
    counts = (num_entries, num_entries, directory_bytes, directory_offset)
    versions = (_VERSION_NEEDED, _VERSION_NEEDED)
    record = _END64.pack(b"PK\x06\x06", _END64.size - 12, *versions, 0, 0, *counts)
    locator = _END64_LOCATOR.pack(b"PK\x06\x07", 0, directory_offset + directory_bytes, 1)
    short = min(num_entries, _MOST_ENTRIES)
    sizes = (min(directory_bytes, _IN_ZIP64), min(directory_offset, _IN_ZIP64))
    return record + locator + _END.pack(b"PK\x05\x06", 0, 0, short, short, *sizes, 0)
