"""Files in torch's old format: whole, cut, bent and malicious."""

from __future__ import annotations

import io
import os
import pickle
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_toolkit.checkpoint.reductions import Inert, TensorRecord
from ds_toolkit.checkpoint.shards import open_shard
from ds_toolkit.errors import ToolkitError

MAGIC = 0x1950A86A20F9469CFC6C
SYSTEM = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}


def save_old(value: Any, path: Path) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=False)
    return path


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    base = torch.arange(100, dtype=torch.float32)
    value = {"view": base[10:22].view(3, 4), "half": torch.arange(5).to(torch.bfloat16), "step": 3}
    return save_old(value, tmp_path / "shard.pt")


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int16,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
        torch.uint16,
    ],
)
def test_tensors_of_every_type_are_where_they_are_said_to_be(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: torch.arange(size).to(torch.float32).to(dtype) for name, size in (("a", 7), ("b", 3))}
    path = save_old({**tensors, "none": torch.zeros(0, 3, dtype=dtype)}, tmp_path / "shard.pt")
    shard = open_shard(path)
    for name, tensor in tensors.items():
        assert shard.root[name].dtype.name == str(dtype).removeprefix("torch.")
        assert shard.read(shard.root[name]) == tensor.view(torch.uint8).numpy().tobytes()
    assert shard.root["none"].shape == (0, 3)


def test_views_into_a_storage(saved: Path) -> None:
    shard = open_shard(saved)
    assert shard.root["step"] == 3
    expected = torch.load(saved, weights_only=True)
    for name in ("view", "half"):
        assert shard.read(shard.root[name]) == expected[name].view(torch.uint8).numpy().tobytes()


class Key:
    """What pickle writes as a persistent reference."""

    def __init__(self, identity: tuple[Any, ...]) -> None:
        self.identity = identity


class KeyPickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.identity if isinstance(value, Key) else None


def hand_made(
    path: Path,
    identity: tuple[Any, ...] = ("storage", torch.FloatStorage, "0", "cpu", 6, None),
    *,
    offset: int = 0,
    keys: Any = ("0",),
    count: int = 6,
    system: Any = SYSTEM,
    magic: int = MAGIC,
    protocol: int = 1001,
) -> Path:
    """A file of one tensor of three elements in a storage of six: 0, 1, 2, 3, 4, 5."""

    class Tensor:
        def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
            return torch._utils._rebuild_tensor_v2, (Key(identity), offset, (3,), (1,), False, {})

    out = io.BytesIO()
    for value in (magic, protocol, system):
        pickle.dump(value, out, 2)
    KeyPickler(out, 2).dump({"tensor": Tensor()})
    pickle.dump(list(keys) if isinstance(keys, tuple) else keys, out, 2)
    out.write(struct.pack("<q6f", count, *range(6)))
    path.write_bytes(out.getvalue())
    return path


def test_views_of_storages_as_torch_wrote_them_long_ago(tmp_path: Path) -> None:
    """Element 1 of a view that begins at element 2 of its storage."""
    view = ("storage", torch.FloatStorage, "0", "cpu", 6, ("1", 2, 4))
    path = hand_made(tmp_path / "shard.pt", view, offset=1)
    assert torch.load(path, weights_only=True)["tensor"].tolist() == [3.0, 4.0, 5.0]
    shard = open_shard(path)
    assert struct.unpack("<3f", shard.read(shard.root["tensor"])) == (3.0, 4.0, 5.0)


@pytest.mark.parametrize(
    ("identity", "more", "why"),
    [
        (("storage", torch.FloatStorage, "0", "cpu", 6, ("1", 2, 5)), {}, "no proper size"),
        (("storage", torch.FloatStorage, "0", "cpu", 6, ("1", -1, 4)), {}, "no proper size"),
        (("storage", torch.FloatStorage, "0", "cpu", 6, ("1", 2, 3)), {"offset": 1}, "beyond its storage"),
        (("storage", torch.FloatStorage, "0", "cpu", -1, None), {}, "no proper size"),
        (("storage", torch.FloatStorage, "0", "cpu", 2**60, None), {}, "bytes; its tensors and what"),
        (("storage", torch.FloatStorage, "0", "cpu", 7, None), {}, "bytes; its tensors and what"),
        (("storage", torch.FloatStorage, "0", "cpu", 5, None), {}, "5 elements is said to have 6"),
        (("storage", torch.FloatStorage, "0"), {}, "values to unpack"),
        (None, {"count": 2**62}, "said to have 4611686018427387904"),
        (None, {"count": -1}, "said to have -1"),
        (None, {"keys": ()}, "list of storages is not that"),
        (None, {"keys": ("0", "0")}, "list of storages is not that"),
        (None, {"keys": ("0", "1")}, "list of storages is not that"),
        (None, {"keys": {"0": 1}}, "no list of keys"),
        (None, {"keys": (0,)}, "no list of keys"),
        (None, {"system": {**SYSTEM, "little_endian": False}}, "big-endian"),
        (None, {"system": 7}, "protocol"),
        (None, {"protocol": 1002}, "protocol 1002"),
        (None, {"magic": 7}, "does not begin as torch's files do"),
    ],
)
def test_a_bent_file_is_refused(
    tmp_path: Path, identity: tuple[Any, ...] | None, more: dict[str, Any], why: str
) -> None:
    path = tmp_path / "shard.pt"
    hand_made(path, identity, **more) if identity else hand_made(path, **more)
    with pytest.raises(ToolkitError) as caught:
        open_shard(path)
    assert why in str(caught.value.why)
    assert caught.value.where == str(path)


@pytest.mark.parametrize("num_missing", [1, 8, 20, 400, 420, 440, 500])
def test_a_file_cut_short_is_named_with_its_size(saved: Path, num_missing: int) -> None:
    size_bytes = saved.stat().st_size - num_missing
    os.truncate(saved, size_bytes)
    with pytest.raises(ToolkitError, match="truncated") as caught:
        open_shard(saved)
    assert f"it has {size_bytes:,} bytes" in str(caught.value.why)


def test_cut_anywhere_it_is_refused(saved: Path) -> None:
    data = saved.read_bytes()
    for size_bytes in range(0, len(data), 7):
        saved.write_bytes(data[:size_bytes])
        with pytest.raises(ToolkitError, match=r"truncated|cannot be read"):
            open_shard(saved)


def test_what_needs_more_than_the_first_piece_is_read(tmp_path: Path) -> None:
    value = {f"name {number}": torch.full((1,), float(number)) for number in range(20_000)}
    path = save_old(value, tmp_path / "shard.pt")
    shard = open_shard(path)
    assert len(shard.root) == 20_000
    assert struct.unpack("<f", shard.read(shard.root["name 19999"])) == (19999.0,)


def test_a_module_s_class_is_a_name_and_nothing_more(tmp_path: Path) -> None:
    shard = open_shard(save_old({"layer": torch.nn.Linear(2, 2), "x": torch.ones(2)}, tmp_path / "shard.pt"))
    assert isinstance(shard.root["layer"], Inert)
    assert shard.read(shard.root["x"]) == struct.pack("<2f", 1, 1)


def test_a_pickle_bomb_does_nothing(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (os.system, (f"touch {tmp_path / 'victim'}",))

    shard = open_shard(save_old({"client": Bomb(), "weight": torch.zeros(2)}, tmp_path / "shard.pt"))
    assert isinstance(shard.root["client"], Inert)
    assert isinstance(shard.root["weight"], TensorRecord)
    # The three pickles before it are not trusted either.
    path = tmp_path / "other.pt"
    path.write_bytes(pickle.dumps(Bomb(), 2) * 5)
    with pytest.raises(ToolkitError):
        open_shard(path)
    assert not (tmp_path / "victim").exists()


def test_another_pickle_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "shard.pt").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ToolkitError) as caught:
        open_shard(tmp_path / "shard.pt")
    assert "does not begin as torch's files do" in str(caught.value.why)


def test_torch_is_not_needed(saved: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from ds_toolkit.checkpoint.shards import open_shard;"
        "open_shard(Path(sys.argv[1])); assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(saved)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
