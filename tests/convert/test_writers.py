"""Files that their own libraries accept."""

from __future__ import annotations

import itertools
import json
import math
import struct
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch

from ds_toolkit.checkpoint.dtypes import DTYPES, UINT8, DType
from ds_toolkit.convert.writers import Layout, OutputTensor, Writer
from ds_toolkit.convert.writers.bin import BinWriter
from ds_toolkit.convert.writers.safetensors import SafetensorsWriter
from ds_toolkit.errors import ToolkitError

VALUES = {
    "odd": torch.arange(5, dtype=torch.uint8),
    "wide": torch.arange(6, dtype=torch.float64).reshape(2, 3),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "half": torch.arange(7).to(torch.bfloat16),
    "flags": torch.tensor([True, False]),
    'name with ünïcode and "quotes"': torch.arange(3),
}
ALIASES = {"tied": "wide", "again": "wide"}
NAMES = ("tied", *VALUES, "again")


def fill(writer: Writer, path: Path) -> Layout:
    outputs = [
        OutputTensor(name, tuple(value.shape), DTYPES[str(value.dtype).removeprefix("torch.")], value.nbytes)
        for name, value in VALUES.items()
    ]
    layout = writer.lay_out(path, outputs, NAMES, ALIASES)
    checksums = {}
    with path.open("r+b") as file:
        for name, value in VALUES.items():
            data = value.reshape(-1).view(torch.uint8).numpy().tobytes()
            file.seek(layout.offsets_bytes[name])
            file.write(data)
            checksums[name] = zlib.crc32(data)
    writer.finish(path, checksums if writer.needs_checksums else {})
    assert path.stat().st_size == layout.size_bytes
    return layout


def assert_equal(found: dict[str, torch.Tensor], names: tuple[str, ...]) -> None:
    assert set(found) == set(names)
    for name in names:
        expected = VALUES[ALIASES.get(name, name)]
        assert found[name].dtype == expected.dtype
        assert found[name].shape == expected.shape
        assert torch.equal(found[name], expected), name


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_loads_it(tmp_path: Path, mmap: bool) -> None:
    path = tmp_path / "model.bin"
    fill(BinWriter(), path)
    found = torch.load(path, weights_only=True, mmap=mmap)
    assert_equal(found, NAMES)
    assert tuple(found) == NAMES


def test_tied_weights_share_their_storage(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    fill(BinWriter(), path)
    found = torch.load(path, weights_only=True)
    assert len({found[name].untyped_storage().data_ptr() for name in ("wide", "tied", "again")}) == 1
    assert path.stat().st_size < 4000


def test_zip_tools_accept_it(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    fill(BinWriter(), path)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    # What stands before each member's data must say the same as the directory.
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            said = struct.unpack_from("<I", data, member.header_offset + 14)[0]
            assert said == member.CRC == zlib.crc32(archive.read(member)), member.filename


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [*DTYPES.values()], ids=str)
def test_torch_loads_every_type_that_it_has(tmp_path: Path, dtype: DType) -> None:
    """Types without a typed storage too; shapes and strides are those that torch gives its own tensors."""
    path = tmp_path / "model.bin"
    shapes: dict[str, tuple[int, ...]] = {"a": (2, 3), "b": (), "c": (0, 3), "d": (3, 0, 2), "e": (1, 2, 1)}
    outputs = [
        OutputTensor(name, shape, dtype, math.prod(shape) * dtype.size_bytes)
        for name, shape in shapes.items()
    ]
    writer = BinWriter()
    layout = writer.lay_out(path, outputs, tuple(shapes), {})
    data = bytes(range(6 * dtype.size_bytes)) if dtype.name != "bool" else b"\0\1\0\1\1\1"
    with path.open("r+b") as file:
        file.seek(layout.offsets_bytes["a"])
        file.write(data)
    writer.finish(path, {})
    found = torch.load(path, weights_only=True)
    for name, shape in shapes.items():
        expected = torch.empty(shape, dtype=getattr(torch, dtype.name))
        assert found[name].dtype == expected.dtype
        assert found[name].shape == expected.shape
        assert found[name].stride() == expected.stride()
        assert found[name].untyped_storage().nbytes() == expected.untyped_storage().nbytes()
    assert bytes(found["a"].untyped_storage().tolist()) == data


def test_tensors_of_more_elements_than_an_integer_of_32_bits_counts(tmp_path: Path) -> None:
    """On a sparse file."""
    path = tmp_path / "model.bin"
    shape = (2**31 + 8, 2)
    writer = BinWriter()
    outputs = [OutputTensor("huge", shape, DTYPES["uint8"], 2**32 + 16), OutputTensor("b", (2,), UINT8, 2)]
    layout = writer.lay_out(path, outputs, ("huge", "b"), {})
    with path.open("r+b") as file:
        file.seek(layout.offsets_bytes["huge"] + 2**32 + 15)
        file.write(b"\x05")
        file.seek(layout.offsets_bytes["b"])
        file.write(b"\x07\x08")
    writer.finish(path, {})
    found = torch.load(path, weights_only=True, mmap=True)
    assert found["huge"].shape == shape
    assert int(found["huge"][-1, -1]) == 5
    assert found["b"].tolist() == [7, 8]
    assert path.stat().st_blocks * 512 < 2**20


def test_a_bin_is_written_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from ds_toolkit.convert.writers.bin import BinWriter\n"
        f"BinWriter().lay_out(Path({str(tmp_path / 'x')!r}), [], (), {{}})\n"
        "print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    assert subprocess.check_output(command, text=True, timeout=60).strip() == "False"


def test_safetensors_loads_it(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    fill(SafetensorsWriter(), path)
    assert_equal(safetensors.torch.load_file(path), tuple(VALUES))
    with safetensors.safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt", **ALIASES}


def test_safetensors_are_aligned_and_without_gaps(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    layout = fill(SafetensorsWriter(), path)
    data = path.read_bytes()
    (header_bytes,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + header_bytes])
    del header["__metadata__"]
    ends = sorted(tuple(entry["data_offsets"]) for entry in header.values())
    assert ends[0][0] == 0
    assert all(previous[1] == following[0] for previous, following in itertools.pairwise(ends))
    assert 8 + header_bytes + ends[-1][1] == len(data)
    for name, value in VALUES.items():
        assert layout.offsets_bytes[name] % value.dtype.itemsize == 0


def test_a_module_with_tied_weights_loads_strictly(tmp_path: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(3, 3, bias=False)
            self.second = torch.nn.Linear(3, 3, bias=False)
            self.second.weight = self.first.weight

    writer, path = SafetensorsWriter(), tmp_path / "model.safetensors"
    output = OutputTensor("first.weight", (3, 3), DTYPES["float32"], 36)
    layout = writer.lay_out(
        path, [output], ("first.weight", "second.weight"), {"second.weight": "first.weight"}
    )
    with path.open("r+b") as file:
        file.seek(layout.offsets_bytes["first.weight"])
        file.write(torch.arange(9.0).numpy().tobytes())
    model = Tied()
    assert safetensors.torch.load_model(model, path) == (set(), [])
    assert model.second.weight.flatten().tolist() == list(range(9))


@pytest.mark.parametrize(("name", "dtype"), [("a", "complex128"), ("__metadata__", "float32")])
def test_what_safetensors_cannot_hold_is_named(tmp_path: Path, name: str, dtype: str) -> None:
    with pytest.raises(ToolkitError, match=f"cannot hold the tensor {name}"):
        SafetensorsWriter().lay_out(tmp_path / "x", [OutputTensor(name, (), DTYPES[dtype], 4)], (name,), {})
