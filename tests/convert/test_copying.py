"""Byte ranges arrive, whatever their size, type, order and number."""

from __future__ import annotations

import errno
import fcntl
import os
import zlib
from pathlib import Path

import mounts
import pytest
import torch

from ds_toolkit.checkpoint.dtypes import DTYPES
from ds_toolkit.convert import output_file
from ds_toolkit.convert.copying import BLOCK_BYTES, copy_ranges
from ds_toolkit.convert.moves import Move, num_written_bytes
from ds_toolkit.errors import ToolkitError
from ds_toolkit.files import start_writing_back

FLOAT32, BFLOAT16, UINT8 = DTYPES["float32"], DTYPES["bfloat16"], DTYPES["uint8"]


@pytest.fixture
def destination(tmp_path: Path) -> Path:
    path = tmp_path / "destination"
    path.touch()
    return path


def random_file(path: Path, num_bytes: int) -> bytes:
    data = os.urandom(num_bytes)
    path.write_bytes(data)
    return data


@pytest.mark.parametrize("num_threads", [1, 4])
def test_many_ranges_from_several_files(tmp_path: Path, destination: Path, num_threads: int) -> None:
    first = random_file(tmp_path / "first", 3 * BLOCK_BYTES + 17)
    second = random_file(tmp_path / "second", 5000)
    moves = [
        Move(tmp_path / "second", 100, 4000, UINT8, 10, UINT8, "x"),
        Move(tmp_path / "second", 0, 0, UINT8, 0, UINT8, "empty"),
        Move(tmp_path / "first", 7, 3 * BLOCK_BYTES, UINT8, 5000, UINT8, "y"),
        Move(tmp_path / "second", 4100, 900, UINT8, 4010, UINT8, "x"),
    ]
    reported: list[tuple[int, int]] = []
    crcs = copy_ranges(
        moves,
        destination,
        checksums=True,
        num_threads=num_threads,
        progress=lambda done, total: reported.append((done, total)),
    )
    written = destination.read_bytes()
    assert written[10:4910] == second[100:5000]
    assert written[5000:] == first[7 : 7 + 3 * BLOCK_BYTES]
    assert crcs == {"x": zlib.crc32(second[100:5000]), "y": zlib.crc32(written[5000:])}
    total_bytes = 4900 + 3 * BLOCK_BYTES
    assert [done for done, _ in reported] == sorted(done for done, _ in reported)
    assert reported[-1] == (total_bytes, total_bytes)


def test_no_checksums_unless_wanted(tmp_path: Path, destination: Path) -> None:
    random_file(tmp_path / "first", 10)
    assert copy_ranges([Move(tmp_path / "first", 0, 10, UINT8, 0, UINT8, "x")], destination) == {}


def test_conversion_across_pieces(tmp_path: Path, destination: Path) -> None:
    values = torch.randn(BLOCK_BYTES // 4 * 2 + 3)
    (tmp_path / "first").write_bytes(values.numpy().tobytes())
    move = Move(tmp_path / "first", 4, values.nbytes - 4, FLOAT32, 6, BFLOAT16, "x")
    crcs = copy_ranges([move], destination, checksums=True)
    expected = values[1:].bfloat16().view(torch.uint8).numpy().tobytes()
    assert destination.read_bytes()[6:] == expected
    assert crcs == {"x": zlib.crc32(expected)}
    assert num_written_bytes(move) == len(expected)


def test_a_source_that_became_shorter_is_named(tmp_path: Path, destination: Path) -> None:
    random_file(tmp_path / "first", 10)
    with pytest.raises(ToolkitError, match="became shorter") as caught:
        copy_ranges([Move(tmp_path / "first", 0, 11, UINT8, 0, UINT8, "x")], destination)
    assert caught.value.where == str(tmp_path / "first")


def test_a_source_that_vanished_is_named(tmp_path: Path, destination: Path) -> None:
    with pytest.raises(ToolkitError, match="cannot be opened") as caught:
        copy_ranges([Move(tmp_path / "first", 0, 11, UINT8, 0, UINT8, "x")], destination)
    assert caught.value.where == str(tmp_path / "first")


def test_no_file_stays_open(tmp_path: Path, destination: Path) -> None:
    random_file(tmp_path / "first", 10)
    descriptors = Path("/proc/self/fd")
    num_before = len(list(descriptors.iterdir()))
    copy_ranges([Move(tmp_path / "first", 0, 10, UINT8, 0, UINT8, "x")], destination)
    with pytest.raises(ToolkitError):
        copy_ranges([Move(tmp_path / "first", 0, 11, UINT8, 0, UINT8, "x")], destination)
    assert len(list(descriptors.iterdir())) == num_before


def test_a_disk_that_fills_up_stops_every_thread(
    tmp_path: Path, destination: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_file(tmp_path / "first", 20 * BLOCK_BYTES)
    calls = []

    def full(descriptor: int, data: memoryview, offset: int) -> int:
        calls.append(offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    move = Move(tmp_path / "first", 0, 20 * BLOCK_BYTES, UINT8, 0, UINT8, "x")
    with pytest.raises(ToolkitError, match="too full") as caught:
        copy_ranges([move], destination, num_threads=3)
    assert "the output needs 41.9 MB" in str(caught.value.why)
    assert len(calls) <= 3


def test_an_error_in_the_progress_callback_is_not_lost(tmp_path: Path, destination: Path) -> None:
    random_file(tmp_path / "first", 10)

    def broken(done_bytes: int, total_bytes: int) -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        copy_ranges([Move(tmp_path / "first", 0, 10, UINT8, 0, UINT8, "x")], destination, progress=broken)


def test_whole_blocks_go_past_the_page_cache_and_the_rest_begins_at_once(
    tmp_path: Path, destination: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = random_file(tmp_path / "first", 3 * BLOCK_BYTES + 12)
    direct: list[int] = []
    begun: list[tuple[int, int]] = []
    pwrite, begin = os.pwrite, start_writing_back

    def recorded_pwrite(descriptor: int, written: memoryview, offset_bytes: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            direct.append(offset_bytes)
        return pwrite(descriptor, written, offset_bytes)

    def recorded_begin(descriptor: int, offset_bytes: int, num_bytes: int) -> None:
        begun.append((offset_bytes, num_bytes))
        begin(descriptor, offset_bytes, num_bytes)

    monkeypatch.setattr(os, "pwrite", recorded_pwrite)
    monkeypatch.setattr(output_file, "start_writing_back", recorded_begin)
    copy_ranges([Move(tmp_path / "first", 0, 3 * BLOCK_BYTES, UINT8, 8, UINT8, "x")], destination)
    assert destination.read_bytes()[8:] == data[: 3 * BLOCK_BYTES]
    assert sorted(direct) == [BLOCK_BYTES, 2 * BLOCK_BYTES]
    assert sorted(begun) == [(8, BLOCK_BYTES - 8), (3 * BLOCK_BYTES, 8)]


def test_a_file_system_that_takes_no_direct_writes_gets_ordinary_ones(
    tmp_path: Path, destination: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = random_file(tmp_path / "first", 3 * BLOCK_BYTES)
    pwrite = os.pwrite

    def refused(descriptor: int, written: memoryview, offset_bytes: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwrite(descriptor, written, offset_bytes)

    monkeypatch.setattr(os, "pwrite", refused)
    copy_ranges([Move(tmp_path / "first", 0, 3 * BLOCK_BYTES, UINT8, 0, UINT8, "x")], destination)
    assert destination.read_bytes() == data


def test_a_disk_without_room_is_noticed_before_anything_is_read(tmp_path: Path) -> None:
    random_file(tmp_path / "first", 10)
    with mounts.tmpfs(tmp_path / "disk", str(2**20)) as disk:
        destination = disk / "destination"
        with destination.open("wb") as file:
            file.truncate(2**21)
        with pytest.raises(ToolkitError, match="too full"):
            copy_ranges([Move(tmp_path / "first", 0, 10, UINT8, 0, UINT8, "x")], destination)
        assert destination.stat().st_blocks == 0
