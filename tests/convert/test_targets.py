"""Folders as Hugging Face's libraries write and read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from huggingface_hub import split_torch_state_dict_into_shards

from ds_toolkit import ToolkitError, consolidate, open_checkpoint
from ds_toolkit.checkpoint.dtypes import DTYPES
from ds_toolkit.checkpoint.layout import find_tag_folder
from ds_toolkit.checkpoint.weights import read_weights
from ds_toolkit.convert.selection import Choice, select
from ds_toolkit.convert.targets import FORMATS, Target, index_of, output_files

CASE = "stage2-bf16-3ranks"


@pytest.fixture
def checkpoint(zoo: Path) -> Path:
    return zoo / CASE / "checkpoints"


def assert_is_whole(folder: Path, truth: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    weights = open_checkpoint(folder)
    assert set(weights) == set(truth)
    for name, value in truth.items():
        assert torch.equal(weights[name], value.to(dtype) if value.is_floating_point() else value), name


@pytest.mark.parametrize("size", [1, 100, 300, 500, "1KB", "5GB"])
@pytest.mark.parametrize("file_format", ["safetensors", "bin"])
def test_shards_are_cut_as_hugging_face_cuts_them(
    checkpoint: Path, tmp_path: Path, file_format: str, size: int | str
) -> None:
    done = consolidate(checkpoint, f"{tmp_path}/out/", file_format=file_format, max_shard_size=size)
    found = {
        path.name: torch.load(path, weights_only=True, mmap=True)
        if file_format == "bin"
        else safetensors.torch.load_file(path)
        for path in done.files
        if path.suffix != ".json"
    }
    # What DeepSpeed's script hands over: buffers, frozen weights, then the others, tied ones tied. Of stage 2
    # the file has them as views of one vector, and the script makes tensors of their own.
    upstream = torch.load(checkpoint.parent / "upstream.pt")
    for name, value in upstream.items():
        upstream[name] = value.float().clone() if value.is_floating_point() else value.clone()
    upstream["head.weight"] = upstream["embedding.weight"]
    if file_format == "safetensors":
        del upstream["head.weight"]
    pattern = "pytorch_model{suffix}.bin" if file_format == "bin" else "model{suffix}.safetensors"
    split = split_torch_state_dict_into_shards(upstream, filename_pattern=pattern, max_shard_size=size)
    expected = {file: set(names) for file, names in split.filename_to_tensors.items()}
    assert {file: set(state) for file, state in found.items()} == expected
    for state in found.values():
        for name, value in state.items():
            assert torch.equal(value, upstream[name]), name
    indices = [path for path in done.files if path.suffix == ".json"]
    assert bool(indices) == split.is_sharded
    for path in indices:
        index = json.loads(path.read_text())
        assert index["weight_map"] == split.tensor_to_filename
        assert index["metadata"] == split.metadata
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in done.files}
    assert done.num_bytes == sum(path.stat().st_size for path in done.files)
    assert_is_whole(tmp_path / "out", torch.load(checkpoint.parent / "truth.pt"), torch.float32)


def test_a_bin_shard_holds_only_its_own_tensors(checkpoint: Path, tmp_path: Path) -> None:
    done = consolidate(checkpoint, f"{tmp_path}/out/", file_format="bin", max_shard_size=300)
    shards = [path for path in done.files if path.suffix == ".bin"]
    assert len(shards) > 3
    for path in shards:
        state = torch.load(path, weights_only=True)
        storages = {value.untyped_storage().data_ptr(): value.untyped_storage() for value in state.values()}
        held = sum(storage.nbytes() for storage in storages.values())
        assert held == sum(value.nbytes for name, value in state.items() if name != "head.weight")


def test_transformers_reads_both_formats(tmp_path: Path) -> None:
    import transformers

    folder = tmp_path / "tag"
    folder.mkdir()
    config = transformers.GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=11, n_positions=4)
    model = transformers.GPT2LMHeadModel(config)
    state = {"module": model.state_dict(), "buffer_names": [], "global_steps": 1, "dp_world_size": 1}
    torch.save({**state, "mp_world_size": 1}, folder / "mp_rank_00_model_states.pt")
    for file_format in ("safetensors", "bin"):
        out = tmp_path / file_format
        out.mkdir()
        config.save_pretrained(out)
        consolidate(folder, out, file_format=file_format, max_shard_size=1000)
        found, info = transformers.GPT2LMHeadModel.from_pretrained(out, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        for name, value in found.state_dict().items():
            assert torch.equal(value, model.state_dict()[name]), name


def test_older_sets_go_and_other_files_stay(checkpoint: Path, tmp_path: Path) -> None:
    truth = torch.load(checkpoint.parent / "truth.pt")
    for name in ("config.json", "pytorch_model.bin", "model-notes.safetensors"):
        (tmp_path / name).write_text("mine")
    others = {"config.json", "pytorch_model.bin", "model-notes.safetensors"}
    for dtype, size in (("fp32", 300), ("bf16", 500), ("fp32", 10**6), ("bf16", 10**6), ("fp32", 500)):
        done = consolidate(checkpoint, tmp_path, dtype=dtype, max_shard_size=size, force=True)
        assert {path.name for path in tmp_path.iterdir()} == others | {path.name for path in done.files}
        assert_is_whole(tmp_path, truth, torch.float32 if dtype == "fp32" else torch.bfloat16)


def test_a_bin_set_beside_safetensors_is_remarked_on(checkpoint: Path, tmp_path: Path) -> None:
    for size, name in ((500, "model.safetensors.index.json"), ("5GB", "model.safetensors")):
        consolidate(checkpoint, tmp_path, max_shard_size=size, force=True)
        done = consolidate(checkpoint, tmp_path, file_format="bin", force=True)
        assert done.notes == (
            f"the folder holds {name} too, which Hugging Face's libraries take before .bin files",
        )


def test_a_format_must_fit_the_name(checkpoint: Path, tmp_path: Path) -> None:
    for out, file_format, what in (
        ("model.bin", "safetensors", "that of another format"),
        ("model.safetensors", "bin", "that of another format"),
        ("out/", "gguf", "`gguf` is no output format"),
    ):
        with pytest.raises(ToolkitError, match=what):
            consolidate(checkpoint, f"{tmp_path}/{out}", file_format=file_format)
    consolidate(checkpoint, tmp_path / "model.pt", file_format="bin")
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


def test_an_output_without_a_name_is_not_the_current_folder(checkpoint: Path) -> None:
    with pytest.raises(ToolkitError, match="the output has no name"):
        consolidate(checkpoint, "")


def test_sizes_of_shards_that_are_none(checkpoint: Path, tmp_path: Path) -> None:
    for size in ("much", "0GB", 0):
        with pytest.raises(ToolkitError):
            consolidate(checkpoint, tmp_path, max_shard_size=size)  # type: ignore[arg-type]


def test_aliases_are_where_their_tensor_is(checkpoint: Path) -> None:
    weights = read_weights(find_tag_folder(checkpoint))
    selected = select(weights, Choice())
    for file_format, is_listed in (("safetensors", False), ("bin", True)):
        target = Target(Path("out"), FORMATS[file_format], is_folder=True)
        files = output_files(target, selected, DTYPES["float32"], 100)
        weight_map = json.loads(index_of(files, target.format))["weight_map"]
        (file,) = (file for file in files if "head.weight" in file.names)
        assert weight_map["embedding.weight"] == file.name
        assert ("head.weight" in weight_map) == is_listed
