"""Byte ranges arrive, whatever their size, type, order and number."""

from __future__ import annotations

import errno
import os
import zlib
from pathlib import Path

import pytest
import torch

from ds_toolkit.checkpoint.dtypes import DTYPES
from ds_toolkit.convert import copying
from ds_toolkit.convert.copying import PIECE_BYTES, Move, copy_ranges
from ds_toolkit.errors import ToolkitError

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
    first = random_file(tmp_path / "first", 3 * PIECE_BYTES + 17)
    second = random_file(tmp_path / "second", 5000)
    moves = [
        Move(tmp_path / "second", 100, 4000, UINT8, 10, UINT8, "x"),
        Move(tmp_path / "second", 0, 0, UINT8, 0, UINT8, "empty"),
        Move(tmp_path / "first", 7, 3 * PIECE_BYTES, UINT8, 5000, UINT8, "y"),
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
    assert written[5000:] == first[7 : 7 + 3 * PIECE_BYTES]
    assert crcs == {"x": zlib.crc32(second[100:5000]), "y": zlib.crc32(written[5000:])}
    total_bytes = 4900 + 3 * PIECE_BYTES
    assert [done for done, _ in reported] == sorted(done for done, _ in reported)
    assert reported[-1] == (total_bytes, total_bytes)


def test_no_checksums_unless_wanted(tmp_path: Path, destination: Path) -> None:
    random_file(tmp_path / "first", 10)
    assert copy_ranges([Move(tmp_path / "first", 0, 10, UINT8, 0, UINT8, "x")], destination) == {}


def test_conversion_across_pieces(tmp_path: Path, destination: Path) -> None:
    values = torch.randn(PIECE_BYTES // 4 * 2 + 3)
    (tmp_path / "first").write_bytes(values.numpy().tobytes())
    move = Move(tmp_path / "first", 4, values.nbytes - 4, FLOAT32, 6, BFLOAT16, "x")
    crcs = copy_ranges([move], destination, checksums=True)
    expected = values[1:].bfloat16().view(torch.uint8).numpy().tobytes()
    assert destination.read_bytes()[6:] == expected
    assert crcs == {"x": zlib.crc32(expected)}
    assert move.num_written_bytes == len(expected)


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
    random_file(tmp_path / "first", 20 * PIECE_BYTES)
    calls = []

    def full(descriptor: int, data: memoryview, offset: int) -> int:
        calls.append(offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(copying.os, "pwrite", full)
    move = Move(tmp_path / "first", 0, 20 * PIECE_BYTES, UINT8, 0, UINT8, "x")
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


def test_the_disk_is_given_every_byte_while_copying_goes_on(
    tmp_path: Path, destination: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_file(tmp_path / "first", 2 * PIECE_BYTES + 12)
    begun: list[tuple[int, int]] = []
    begin = copying.start_writing_back

    def recorded(descriptor: int, offset_bytes: int, num_bytes: int) -> None:
        begun.append((offset_bytes, num_bytes))
        begin(descriptor, offset_bytes, num_bytes)

    monkeypatch.setattr(copying, "start_writing_back", recorded)
    copy_ranges([Move(tmp_path / "first", 12, 2 * PIECE_BYTES, FLOAT32, 6, BFLOAT16, "x")], destination)
    assert sorted(begun) == [(6, PIECE_BYTES // 2), (6 + PIECE_BYTES // 2, PIECE_BYTES // 2)]
