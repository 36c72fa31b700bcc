"""Weights as a file of `torch.save`: loads with `torch.load(weights_only=True)`, also with `mmap=True`."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from ds_toolkit.checkpoint.ziparchive import Member, read_members
from ds_toolkit.convert.writers import Layout, OutputTensor

# Offsets of the CRC in an entry of the central directory, and in the record that follows a member's data
# (PKWARE's APPNOTE.TXT, 4.3.12 and 4.3.9).
_ENTRY_CRC_OFFSET = 16
_DESCRIPTOR_CRC_OFFSET = 4
_DESCRIPTOR_SIGNATURE = b"PK\x07\x08"


class BinWriter:
    """torch writes the file around tensors that nobody has filled; aliases share their tensor's storage."""

    needs_checksums = True

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}

    def lay_out(
        self,
        path: Path,
        tensors: Sequence[OutputTensor],
        names: Sequence[str],
        aliases: Mapping[str, str],
    ) -> Layout:
        """Have torch write a sparse file: pages of `torch.empty` that are never touched cost no memory."""
        import torch

        empty = {
            tensor.name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype.name))
            for tensor in tensors
        }
        state_dict = {name: empty[aliases.get(name, name)] for name in names}
        # An open file, for torch would call the archive after the path, which is a temporary one.
        with path.open("w+b") as file, torch.serialization.skip_data():
            torch.save(state_dict, file)
        with path.open("rb") as file:
            members = read_members(file.fileno())
        # torch numbers the storages in the order in which it meets them.
        in_order = dict.fromkeys(aliases.get(name, name) for name in names)
        self._members = {name: members[f"archive/data/{key}"] for key, name in enumerate(in_order)}
        offsets = {name: member.data_offset for name, member in self._members.items()}
        return Layout(offsets, path.stat().st_size)

    def finish(self, path: Path, checksums: Mapping[str, int]) -> None:
        """Put the members' CRCs where torch could not know them: behind the data, and in the directory."""
        with path.open("r+b", buffering=0) as file:
            descriptor = file.fileno()
            for name, member in self._members.items():
                packed = struct.pack("<I", checksums.get(name, 0))
                os.pwrite(descriptor, packed, member.entry_offset + _ENTRY_CRC_OFFSET)
                data_end = member.data_offset + member.size_bytes
                # Members without bytes have no such record.
                if os.pread(descriptor, 4, data_end) == _DESCRIPTOR_SIGNATURE:
                    os.pwrite(descriptor, packed, data_end + _DESCRIPTOR_CRC_OFFSET)
