"""Files with their storages in front are read by torch, by zip tools and by the toolkit's own reader."""

from __future__ import annotations

import io
import pickle
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_toolkit.checkpoint.archive_layout import ALIGNMENT_BYTES, ArchiveLayout
from ds_toolkit.checkpoint.reductions import TensorRecord
from ds_toolkit.checkpoint.shards import open_shard


class Pickler(pickle.Pickler):
    """Pickles as torch does: a storage is its number."""

    def __init__(self, file: Any) -> None:
        super().__init__(file, protocol=2)
        self.storages: dict[int, torch.UntypedStorage] = {}
        self._keys: dict[int, int] = {}

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, torch.storage.TypedStorage):
            return None
        storage, kind = value._untyped_storage, getattr(torch, value._pickle_storage_type())
        key = self._keys.setdefault(storage.data_ptr() or -id(storage), len(self._keys))
        self.storages[key] = storage
        return ("storage", kind, str(key), "cpu", value._size())


def written(path: Path, value: Any, *, with_crcs: bool = True) -> ArchiveLayout:
    """Write a value as the arena does: storages first, each at its place, the pickle last."""
    out = io.BytesIO()
    pickler = Pickler(out)
    pickler.dump(value)
    datas = [bytes(storage.tolist()) for _, storage in sorted(pickler.storages.items())]
    shard = ArchiveLayout([len(data) for data in datas])
    crcs = {key: zlib.crc32(data) for key, data in enumerate(datas)} if with_crcs else {}
    with path.open("wb") as file:
        for key, data in enumerate(datas):
            start, header = shard.header(key, crcs.get(key, 0))
            assert start + len(header) == shard.offsets_bytes[key]
            file.seek(start)
            file.write(header + data)
        file.seek(shard.tail_offset_bytes)
        file.write(shard.tail(out.getvalue(), crcs))
    return shard


def sample() -> dict[str, Any]:
    weight = torch.randn(7, 5)
    return {
        "weight": weight,
        "tied": weight,
        "row": weight[2],
        "half": torch.randn(3).bfloat16(),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3.5),
        "step": 300,
        "nested": [{"mask": torch.tensor([True, False])}],
    }


def assert_equal(found: dict[str, Any], value: dict[str, Any]) -> None:
    for name in ("weight", "tied", "row", "half", "empty", "scalar"):
        assert found[name].dtype == value[name].dtype
        assert torch.equal(found[name], value[name])
    assert found["step"] == 300
    assert torch.equal(found["nested"][0]["mask"], value["nested"][0]["mask"])
    assert found["tied"].data_ptr() == found["weight"].data_ptr()


@pytest.mark.parametrize("with_crcs", [True, False])
@pytest.mark.parametrize("mmap", [True, False])
def test_torch_reads_it(tmp_path: Path, mmap: bool, with_crcs: bool) -> None:
    value = sample()
    written(tmp_path / "shard.pt", value, with_crcs=with_crcs)
    assert_equal(torch.load(tmp_path / "shard.pt", weights_only=True, mmap=mmap), value)
    assert_equal(torch.load(tmp_path / "shard.pt", weights_only=False, mmap=mmap), value)


def test_zip_tools_read_it_and_find_its_crcs_right(tmp_path: Path) -> None:
    written(tmp_path / "shard.pt", sample())
    with zipfile.ZipFile(tmp_path / "shard.pt") as archive:
        assert archive.testzip() is None
        assert archive.namelist()[:2] == ["archive/data/0", "archive/data/1"]


def test_the_toolkit_reads_it_and_finds_storages_where_they_were_put(tmp_path: Path) -> None:
    shard = written(tmp_path / "shard.pt", sample())
    opened = open_shard(tmp_path / "shard.pt")
    assert isinstance(opened.root["weight"], TensorRecord)
    for key, offset in enumerate(shard.offsets_bytes):
        assert offset % ALIGNMENT_BYTES == 0
        assert opened.storages[str(key)].data_offset == offset
        assert opened.storages[str(key)].size_bytes == shard.storage_bytes[key]


def test_a_longer_pickle_moves_nothing(tmp_path: Path) -> None:
    first = written(tmp_path / "a.pt", {"weight": torch.ones(9), "step": 255})
    second = written(tmp_path / "b.pt", {"weight": torch.ones(9), "step": 256})
    assert first == second
    assert (tmp_path / "b.pt").stat().st_size == (tmp_path / "a.pt").stat().st_size + 1


def test_no_storages_at_all(tmp_path: Path) -> None:
    written(tmp_path / "shard.pt", {"step": 3})
    assert torch.load(tmp_path / "shard.pt", weights_only=True) == {"step": 3}


def test_storages_beyond_four_gigabytes(tmp_path: Path) -> None:
    """On a sparse file, of which only the ends are there."""
    sizes = [2**32 + 8, 16]
    shard = ArchiveLayout(sizes)
    small = torch.arange(4, dtype=torch.int32)
    out = io.BytesIO()
    pickler = Pickler(out)
    # The structure of two tensors, the first of whose storage is never touched.
    huge = torch.empty(2**32 + 8, dtype=torch.uint8)
    pickler.dump({"huge": huge, "small": small})
    with (tmp_path / "shard.pt").open("wb") as file:
        for key in range(2):
            start, header = shard.header(key)
            file.seek(start)
            file.write(header)
        file.seek(shard.offsets_bytes[0] + sizes[0] - 1)
        file.write(b"\x07")
        file.seek(shard.offsets_bytes[1])
        file.write(small.numpy().tobytes())
        file.seek(shard.tail_offset_bytes)
        file.write(shard.tail(out.getvalue()))
    found = torch.load(tmp_path / "shard.pt", weights_only=True, mmap=True)
    assert int(found["huge"][-1]) == 7
    assert torch.equal(found["small"], small)
    assert shard.offsets_bytes[1] > 2**32
    assert open_shard(tmp_path / "shard.pt").storages["0"].size_bytes == sizes[0]
    with zipfile.ZipFile(tmp_path / "shard.pt") as archive:
        assert [info.file_size for info in archive.infolist()[:2]] == sizes


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(0, 300), max_size=30), pickled=st.binary(max_size=200))
def test_any_sizes_make_an_archive(sizes: list[int], pickled: bytes) -> None:
    shard = ArchiveLayout(sizes)
    data = bytearray(shard.tail_offset_bytes)
    for key, size in enumerate(sizes):
        start, header = shard.header(key, zlib.crc32(bytes([key] * size)))
        data[start : start + len(header)] = header
        data[shard.offsets_bytes[key] : shard.offsets_bytes[key] + size] = bytes([key] * size)
    data += shard.tail(pickled, {key: zlib.crc32(bytes([key] * size)) for key, size in enumerate(sizes)})
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        assert archive.read("archive/data.pkl") == pickled
        for key, size in enumerate(sizes):
            assert archive.read(f"archive/data/{key}") == bytes([key] * size)
