"""Plain files of weights, good ones and bad ones, read without running anything."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from ds_toolkit.convert.opening import open_checkpoint
from ds_toolkit.convert.weight_files import read_weight_files
from ds_toolkit.errors import ToolkitError

VALUES = {
    "wide": torch.arange(6, dtype=torch.float64).reshape(2, 3),
    "half": torch.arange(7).to(torch.bfloat16),
    "flags": torch.tensor([True, False]),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
}


def assert_holds(path: Path, expected: dict[str, torch.Tensor]) -> None:
    found = open_checkpoint(path)
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert found[name].shape == value.shape
        assert torch.equal(found[name], value), name


def test_what_their_own_libraries_write(tmp_path: Path) -> None:
    safetensors.torch.save_file(VALUES, tmp_path / "a.safetensors", metadata={"format": "pt", "note": "x"})
    assert_holds(tmp_path / "a.safetensors", VALUES)
    torch.save(VALUES, tmp_path / "a.bin")
    assert_holds(tmp_path / "a.bin", VALUES)
    assert read_weight_files(tmp_path / "a.safetensors").aliases == {}


def test_tied_and_transposed_weights_of_torch_save(tmp_path: Path) -> None:
    wide = VALUES["wide"]
    state = {"first": wide, "second": wide, "turned": wide.T, "row": wide[1], "epoch": 3}
    torch.save(state, tmp_path / "a.pt")
    assert_holds(tmp_path / "a.pt", {name: value for name, value in state.items() if name != "epoch"})
    assert read_weight_files(tmp_path / "a.pt").aliases == {"second": "first"}
    opened = open_checkpoint(tmp_path / "a.pt")
    assert (opened.is_mapped("first"), opened.is_mapped("turned")) == (True, False)


def test_what_save_model_ties_is_tied(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    safetensors.torch.save_model(model, os.fspath(tmp_path / "model.safetensors"))
    assert_holds(tmp_path, dict(model.state_dict()))


def test_a_folder_that_transformers_wrote(tmp_path: Path) -> None:
    import transformers

    config = transformers.GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=11, n_positions=4)
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path, max_shard_size="1KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    expected = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    assert_holds(tmp_path, expected)
    assert_holds(tmp_path / "model.safetensors.index.json", expected)


class Canary:
    def __reduce__(self) -> Any:
        return (os.mkdir, (os.environ["CANARY"],))


def test_nothing_in_a_pickle_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY", str(tmp_path / "ran"))
    torch.save({"wide": VALUES["wide"], "bad": Canary()}, tmp_path / "a.bin")
    assert_holds(tmp_path / "a.bin", {"wide": VALUES["wide"]})
    assert not (tmp_path / "ran").exists()


def header(path: Path, entries: object, data: bytes = b"", *, length: int | None = None) -> Path:
    encoded = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(encoded) if length is None else length) + encoded + data)
    return path


def entry(dtype: object, shape: object, offsets: object) -> dict[str, object]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        (entry("F32", [2], [0, 8]), None),
        (entry("F32", [2], [0, 12]), "does not lie where"),
        (entry("F32", [4], [0, 16]), "does not lie where"),
        (entry("F32", [-2], [0, -8]), "is not that of a tensor"),
        (entry("F32", [2], [8]), "is not that of a tensor"),
        (entry("F32", "2", [0, 8]), "is not that of a tensor"),
        (entry("X9", [2], [0, 8]), "has the dtype X9"),
        (entry([], [2], [0, 8]), "has the dtype"),
        ({"a": 3}, "is not that of a tensor"),
        ([], "is no JSON object"),
    ],
)
def test_headers_that_lie(tmp_path: Path, entries: object, why: str | None) -> None:
    path = header(tmp_path / "a.safetensors", entries, bytes(8))
    if why is None:
        assert_holds(path, {"a": torch.zeros(2)})
        return
    with pytest.raises(ToolkitError, match="cannot be read") as caught:
        read_weight_files(path)
    assert why in str(caught.value.why)
    assert caught.value.where == str(path)


@pytest.mark.parametrize(
    "content", [b"", b"abc", struct.pack("<Q", 2**60) + b"{}", struct.pack("<Q", 2) + b"x}"]
)
def test_files_that_are_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(ToolkitError, match="cannot be read"):
        read_weight_files(path)


def test_other_things_are_refused(tmp_path: Path) -> None:
    torch.save([1], tmp_path / "list.bin")
    torch.save({"model": dict(VALUES)}, tmp_path / "nested.bin")
    (tmp_path / "a.gguf").touch()
    (tmp_path / "empty").mkdir()
    for name, what in (
        ("list.bin", "it holds no state dict"),
        ("nested.bin", "or one inside another"),
        ("a.gguf", "the format of these weights is not known"),
        ("empty", "there are no weights in this folder"),
        ("none.bin", "does not exist"),
    ):
        with pytest.raises(ToolkitError) as caught:
            read_weight_files(tmp_path / name)
        assert what in str(caught.value), name


def test_an_index_that_lies(tmp_path: Path) -> None:
    safetensors.torch.save_file(VALUES, tmp_path / "a.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for weight_map, why in (
        ({"gone": "a.safetensors"}, "a.safetensors does not hold gone"),
        ({"wide": "../a.safetensors"}, "names a file in another folder"),
        ({"wide": "b.safetensors"}, "does not exist"),
        (None, "it has no `weight_map`"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ToolkitError) as caught:
            read_weight_files(tmp_path)
        assert why in str(caught.value)
