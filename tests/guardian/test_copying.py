"""Copies of slots: the same bytes but for the CRCs, which any zip tool finds right then."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_toolkit.checkpoint.ziparchive import read_members
from ds_toolkit.guardian.copying import COPY_BYTES, copy_file
from ds_toolkit.guardian.deadline import Deadline
from ds_toolkit.resilience.copying_thread import Copy, batched, copy_all
from ds_toolkit.resilience.slot_files import SlotFile, bytes_of
from ds_toolkit.resilience.state_pickle import StatePickler


def slot_file(path: Path, state: dict[str, Any]) -> None:
    pickled = StatePickler().pickle(state)
    file = SlotFile(path, [storage.nbytes() for storage in pickled.storages])
    pairs = zip(pickled.storages, file.places, strict=True)
    copy_all(batched([Copy(bytes_of(storage), place) for storage, place in pairs]))
    file.write_tail(pickled.data)
    file.close()


@pytest.fixture
def state() -> dict[str, Any]:
    return {
        "large": torch.randn(COPY_BYTES // 4 + 1001),
        "empty": torch.empty(0),
        "small": torch.arange(3),
        "nothing": None,
        # CRC-32 of no bytes is 0, and so is that of these.
        "zero": torch.tensor(list(b"\x9d\x0a\xd9\x6d"), dtype=torch.uint8),
        "exact": torch.ones(COPY_BYTES, dtype=torch.uint8),
    }


def test_the_crcs_are_filled_in_and_nothing_else_changes(tmp_path: Path, state: dict[str, Any]) -> None:
    slot_file(tmp_path / "slot.pt", state)
    size_bytes, crc32 = copy_file(tmp_path / "slot.pt", tmp_path / "copy.pt", Deadline())
    data, original = (tmp_path / "copy.pt").read_bytes(), (tmp_path / "slot.pt").read_bytes()
    assert (size_bytes, crc32) == (len(data), zlib.crc32(data))
    with zipfile.ZipFile(tmp_path / "copy.pt") as archive:
        assert archive.testzip() is None
        for info in archive.infolist():
            content = archive.read(info)
            assert zlib.crc32(content) == info.CRC
            assert (
                int.from_bytes(data[info.header_offset + 14 : info.header_offset + 18], "little") == info.CRC
            )
    with (tmp_path / "slot.pt").open("rb") as file:
        places = [
            offset
            for member in read_members(file.fileno()).values()
            for offset in (member.header_offset + 14, member.entry_offset + 16)
        ]
    patched = {place for offset in places for place in range(offset, offset + 4)}
    assert len(data) == len(original)
    assert {index for index in range(len(data)) if data[index] != original[index]} <= patched
    found = torch.load(tmp_path / "copy.pt", weights_only=True, mmap=True)
    for name, value in state.items():
        assert value is None or torch.equal(found[name], value), name


def test_what_torch_wrote_is_copied_as_it_is(tmp_path: Path, state: dict[str, Any]) -> None:
    torch.save(state, tmp_path / "torch.pt")
    _, crc32 = copy_file(tmp_path / "torch.pt", tmp_path / "copy.pt", Deadline())
    data = (tmp_path / "copy.pt").read_bytes()
    assert data == (tmp_path / "torch.pt").read_bytes()
    assert crc32 == zlib.crc32(data)


@pytest.mark.parametrize("data", [b"", b"no archive", b"PK\x03\x04 cut", bytes(COPY_BYTES + 7)])
def test_what_is_no_archive_is_copied_as_it_is(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a").write_bytes(data)
    assert copy_file(tmp_path / "a", tmp_path / "b", Deadline()) == (len(data), zlib.crc32(data))
    assert (tmp_path / "b").read_bytes() == data


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(name.encode())
    with pytest.raises(FileExistsError):
        copy_file(tmp_path / "a", tmp_path / "b", Deadline())
    assert (tmp_path / "b").read_bytes() == b"b"
