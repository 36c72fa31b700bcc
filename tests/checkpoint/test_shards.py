"""Files whole, cut, bent and malicious."""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ds_toolkit.checkpoint.reductions import Inert, TensorRecord
from ds_toolkit.checkpoint.shards import open_shard
from ds_toolkit.errors import ToolkitError

END_BYTES = 22


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A file of torch.save with two tensors, one of them a view into a larger storage."""
    path = tmp_path / "shard.pt"
    base = torch.arange(100, dtype=torch.float32)
    torch.save({"view": base[10:22].view(3, 4), "half": torch.arange(5).to(torch.bfloat16), "step": 3}, path)
    return path


def rewritten(path: Path, change: Callable[[bytearray], None]) -> Path:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)
    return path


def directory_start(data: bytes) -> int:
    return int(struct.unpack_from("<I", data, len(data) - END_BYTES + 16)[0])


def test_tensors_are_where_they_are_said_to_be(saved: Path) -> None:
    shard = open_shard(saved)
    assert shard.root["step"] == 3
    for name, tensor in torch.load(saved, weights_only=True).items():
        if name == "step":
            continue
        place = shard.locate(shard.root[name], name=name)
        found = saved.read_bytes()[place.offset_bytes : place.offset_bytes + place.num_bytes]
        assert found == tensor.contiguous().view(torch.uint8).numpy().tobytes()


def test_scattered_elements_are_refused(tmp_path: Path) -> None:
    torch.save(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), tmp_path / "shard.pt")
    shard = open_shard(tmp_path / "shard.pt")
    with pytest.raises(ToolkitError, match="the elements of conv do not lie in row-major order"):
        shard.locate(shard.root, name="conv")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match="missing") as caught:
        open_shard(tmp_path / "shard.pt")
    assert caught.value.where == str(tmp_path / "shard.pt")


@pytest.mark.parametrize("sixteenths", range(16))
def test_a_file_cut_short_is_named_with_its_size(saved: Path, sixteenths: int) -> None:
    whole_bytes = saved.stat().st_size
    size_bytes = whole_bytes * sixteenths // 16
    os.truncate(saved, size_bytes)
    with pytest.raises(ToolkitError, match="truncated") as caught:
        open_shard(saved)
    assert caught.value.where == str(saved)
    assert f"it has {size_bytes:,} bytes" in str(caught.value.why)


def test_a_file_cut_short_says_what_its_tensors_need(tmp_path: Path) -> None:
    path = tmp_path / "shard.pt"
    torch.save(torch.zeros(100_000), path)
    os.truncate(path, 5000)
    with pytest.raises(ToolkitError) as caught:
        open_shard(path)
    assert "its tensors alone need 400,0" in str(caught.value.why)


def test_a_file_cut_short_says_what_the_manifest_says(saved: Path) -> None:
    whole_bytes = saved.stat().st_size
    os.truncate(saved, 100)
    with pytest.raises(ToolkitError) as caught:
        open_shard(saved, whole_bytes)
    assert caught.value.why == f"it has 100 bytes; its manifest says {whole_bytes:,}"


def test_a_pickle_bomb_in_a_file_does_nothing(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (os.system, (f"touch {tmp_path / 'victim'}",))

    torch.save({"client": [Bomb()], "weight": torch.zeros(2)}, tmp_path / "shard.pt")
    shard = open_shard(tmp_path / "shard.pt")
    assert isinstance(shard.root["client"][0], Inert)
    assert isinstance(shard.root["weight"], TensorRecord)
    assert not (tmp_path / "victim").exists()


def test_compressed_members_are_refused(saved: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed.pt"
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(ToolkitError) as caught:
        open_shard(packed)
    assert "compressed" in str(caught.value.why)


def test_zip64_is_not_needed(tmp_path: Path) -> None:
    path = hand_made(tmp_path / "shard.pt", [("a/data.pkl", pickle.dumps({"step": 3}, 2))])
    assert open_shard(path).root == {"step": 3}


@pytest.mark.parametrize(
    ("offset", "format_", "value"),
    [
        (42, "<I", 0xFFFFFFF0),  # where the local header is
        (42, "<I", 5),
        (42, "<I", 0xFFFFFFFF),  # a zip64 offset that is not there
        (24, "<I", 0x7FFFFFFF),  # size
        (20, "<I", 1),  # stored size differs
        (10, "<H", 8),  # compressed
        (8, "<H", 1),  # encrypted
        (28, "<H", 0xFFFF),  # name reaches out of the directory
        (0, "<I", 0),  # signature
    ],
)
def test_a_bent_directory_is_refused(saved: Path, offset: int, format_: str, value: int) -> None:
    rewritten(saved, lambda data: struct.pack_into(format_, data, directory_start(data) + offset, value))
    with pytest.raises(ToolkitError, match="cannot be read"):
        open_shard(saved)


def test_a_member_that_reaches_beyond_the_data_is_refused(saved: Path) -> None:
    def stretch(data: bytearray) -> None:
        # The stored size and the size, alike.
        struct.pack_into("<II", data, directory_start(data) + 20, 0x7FFFFFFF, 0x7FFFFFFF)

    with pytest.raises(ToolkitError) as caught:
        open_shard(rewritten(saved, stretch))
    assert "reaches beyond the data" in str(caught.value.why)


def hand_made(path: Path, members: list[tuple[str, bytes]]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members:
            archive.writestr(name, data)
    return path


@pytest.mark.parametrize(
    ("offset", "format_", "value"),
    [
        (12, "<I", 0xFFFFFFFE),  # absurd directory size
        (16, "<I", 0xFFFFFFFE),  # directory beyond the file
        (10, "<H", 60_000),  # more entries than the directory can hold
        (10, "<H", 2),  # one entry more than there is
    ],
)
def test_a_bent_end_is_refused(tmp_path: Path, offset: int, format_: str, value: int) -> None:
    path = hand_made(tmp_path / "shard.pt", [("a/data.pkl", pickle.dumps(1, 2))])
    assert open_shard(path).root == 1
    rewritten(path, lambda data: struct.pack_into(format_, data, len(data) - END_BYTES + offset, value))
    with pytest.raises(ToolkitError, match="cannot be read"):
        open_shard(path)


@pytest.mark.parametrize("offset", [0, 32, 40, 48])
@pytest.mark.parametrize("value", [2**32, 2**63, 2**64 - 1])
def test_a_bent_zip64_end_is_refused(saved: Path, offset: int, value: int) -> None:
    # torch writes such a record whether it is needed or not.
    end64 = saved.stat().st_size - END_BYTES - 20 - 56
    rewritten(saved, lambda data: struct.pack_into("<Q", data, end64 + offset, value))
    with pytest.raises(ToolkitError, match="cannot be read"):
        open_shard(saved)


def test_members_that_overlap_or_come_twice_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "shard.pt"
    hand_made(
        path, [("a/data.pkl", pickle.dumps(1, 2)), ("a/data/0", b"12345678"), ("a/data/1", b"12345678")]
    )

    def overlap(data: bytearray) -> None:
        second = data.index(b"PK\x01\x02", data.index(b"PK\x01\x02", directory_start(data)) + 1)
        third = data.index(b"PK\x01\x02", second + 1)
        data[third + 42 : third + 46] = data[second + 42 : second + 46]

    with pytest.raises(ToolkitError) as caught:
        open_shard(rewritten(path, overlap))
    assert "overlaps" in str(caught.value.why)
    hand_made(path, [("a/data.pkl", pickle.dumps(1, 2)), ("a/data/0", b"1"), ("a/data/2", b"1")])
    rewritten(path, lambda data: data.__setitem__(slice(None), data.replace(b"a/data/2", b"a/data/0")))
    with pytest.raises(ToolkitError) as caught:
        open_shard(path)
    assert "twice" in str(caught.value.why)


def test_a_storage_of_the_wrong_size_is_refused(saved: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(saved) as old:
        pickled = old.read("shard/data.pkl")
    path = hand_made(tmp_path / "other.pt", [("shard/data.pkl", pickled), ("shard/data/0", b"1234")])
    shard = open_shard(path)
    with pytest.raises(ToolkitError) as caught:
        shard.locate(shard.root["view"], name="view")
    assert caught.value.why == "the storage of view should have 400 bytes and has 4 bytes"
    with pytest.raises(ToolkitError) as caught:
        shard.locate(shard.root["half"], name="half")
    assert "is not there" in str(caught.value.why)


def test_ten_thousand_members_are_read(tmp_path: Path) -> None:
    path = tmp_path / "shard.pt"
    torch.save([torch.zeros(1) for _ in range(10_000)], path)
    shard = open_shard(path)
    assert len(shard.storages) == 10_000
    assert shard.locate(shard.root[9_999]).num_bytes == 4


def test_big_endian_files_are_refused(tmp_path: Path) -> None:
    path = hand_made(tmp_path / "shard.pt", [("a/data.pkl", pickle.dumps(1, 2)), ("a/byteorder", b"big")])
    with pytest.raises(ToolkitError, match="big-endian"):
        open_shard(path)


@pytest.mark.parametrize("content", [b"not a checkpoint at all, only text", b"\x00" * 1000])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "shard.pt").write_bytes(content)
    with pytest.raises(ToolkitError, match="cannot be read"):
        open_shard(tmp_path / "shard.pt")


def test_a_zip_without_a_pickle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ToolkitError) as caught:
        open_shard(hand_made(tmp_path / "shard.pt", [("a/other", b"1")]))
    assert "no data.pkl" in str(caught.value.why)
