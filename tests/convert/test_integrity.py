"""Bytes that changed since they were saved are not passed on."""

from __future__ import annotations

import dataclasses
import random
import shutil
import zlib
from pathlib import Path

import pytest
import torch

from ds_toolkit.checkpoint import commit
from ds_toolkit.checkpoint.layout import find_tag_folder
from ds_toolkit.checkpoint.manifest import Manifest, RunShape
from ds_toolkit.checkpoint.shards import Slice, open_shard
from ds_toolkit.checkpoint.weights import read_weights
from ds_toolkit.convert.consolidate import consolidate
from ds_toolkit.convert.integrity import SourceCrcs
from ds_toolkit.errors import ToolkitError

CASES = ["stage0-fp32-2ranks", "stage1-bf16-2ranks", "stage2-bf16-3ranks", "stage3-fp32-2ranks"]


@pytest.fixture(params=CASES)
def tag_folder(request: pytest.FixtureRequest, zoo: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    original = find_tag_folder(zoo / request.param / "checkpoints")
    return Path(shutil.copytree(original, tmp_path / "checkpoints" / original.name))


def flip_a_bit(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_in_any_weight_is_found(tag_folder: Path, tmp_path: Path) -> None:
    weights = read_weights(tag_folder)
    for tensor in weights.tensors.values():
        for place in tensor.slices[-1:]:
            if not place.num_bytes:
                continue
            flip_a_bit(place.path, place.offset_bytes + place.num_bytes - 1)
            with pytest.raises(ToolkitError, match="has changed since it was saved") as caught:
                consolidate(tag_folder, tmp_path / "model.bin")
            assert caught.value.where == str(place.path)
            flip_a_bit(place.path, place.offset_bytes + place.num_bytes - 1)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]
    consolidate(tag_folder, tmp_path / "model.bin")


def test_shards_saved_without_crcs_are_read(tmp_path: Path) -> None:
    """`torch.serialization.set_crc32_options(False)` is a known way to save faster."""
    folder = tmp_path / "tag"
    folder.mkdir()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(stage0_state(), folder / "mp_rank_00_model_states.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    consolidate(folder, tmp_path / "model.bin")
    assert torch.equal(torch.load(tmp_path / "model.bin", weights_only=True)["weight"], torch.arange(1000.0))


def test_a_shard_that_vanished_meanwhile_is_named(tag_folder: Path) -> None:
    weights = read_weights(tag_folder)
    slices = [place for tensor in weights.tensors.values() for place in tensor.slices]
    slices[-1].path.unlink()
    with pytest.raises(ToolkitError, match="cannot be opened any more") as caught:
        SourceCrcs(slices).check(2)
    assert caught.value.where == str(slices[-1].path)


def stage0_state() -> dict[str, object]:
    return {
        "module": {"weight": torch.arange(1000.0)},
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": None,
        "shared_params": None,
        "global_steps": 1,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": "0.19.8",
    }


def test_a_flipped_bit_in_the_structure_is_found(tag_folder: Path, tmp_path: Path) -> None:
    for shard in read_weights(tag_folder).shards:
        data = shard.read_bytes()
        # A byte inside a name of a weight: the pickle stays readable and means something else.
        offset = data.index(b"ds_version") + 3
        flip_a_bit(shard, offset)
        with pytest.raises(ToolkitError):
            consolidate(tag_folder, tmp_path / "model.bin")
        flip_a_bit(shard, offset)


def test_a_model_file_of_another_step_is_refused(zoo: Path, tmp_path: Path) -> None:
    original = find_tag_folder(zoo / "stage2-bf16-2ranks" / "checkpoints")
    shape = RunShape(world_size=1, dp_world_size=2, mp_world_size=1, zero_stage=2, precision="bf16")
    partial = commit.PartialTag(tmp_path / "checkpoints", "tag", commit.new_save_id())
    commit.begin(partial)
    names = [path.name for path in original.iterdir() if path.suffix == ".pt"]
    for name in names:
        shutil.copy(original / name, partial.folder)
    step = read_weights(original).step
    commit.seal(partial, 0, step, shape, names)
    manifest = commit.commit(partial, kind="periodic")
    assert consolidate(tmp_path / "checkpoints", tmp_path / "model.bin").step == step
    dataclasses.replace(manifest, step=step + 1).write(partial.target)
    assert Manifest.read(partial.target).step == step + 1
    with pytest.raises(ToolkitError, match="belongs to another checkpoint") as caught:
        consolidate(tmp_path / "checkpoints", tmp_path / "model.bin", force=True)
    assert f"step {step}, and the tag was committed at step {step + 1}" in str(caught.value)


def test_the_checkpoint_is_not_overwritten_by_its_own_weights(zoo: Path, tmp_path: Path) -> None:
    original = find_tag_folder(zoo / "stage2-bf16-2ranks" / "checkpoints")
    copy = Path(shutil.copytree(original, tmp_path / "tag"))
    for name in ("mp_rank_00_model_states.pt", "new.bin"):
        with pytest.raises(ToolkitError, match="lies inside the checkpoint"):
            consolidate(copy, copy / name, force=True)
    assert not (copy / "new.bin").exists()
    consolidate(copy, tmp_path / "model.bin")


@pytest.mark.parametrize("seed", range(20))
def test_crcs_of_pieces_in_any_order_with_gaps_and_overlaps_are_joined(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "shard.pt"
    torch.save({"a": torch.randn(100), "b": torch.randn(333)}, path)
    data = path.read_bytes()
    chosen = random.Random(seed)
    places = [
        Slice(path, member.data_offset, member.size_bytes) for member in open_shard(path).storages.values()
    ]
    pieces = []
    for place in places:
        for _ in range(chosen.randrange(6)):
            start = place.offset_bytes + chosen.randrange(place.num_bytes)
            num_bytes = chosen.randint(1, place.offset_bytes + place.num_bytes - start)
            pieces.append((start, num_bytes))
    pieces += pieces[:1]

    def crcs_of(data: bytes) -> SourceCrcs:
        crcs = SourceCrcs(places)
        for start, num_bytes in pieces:
            crcs.add(path, start, num_bytes, zlib.crc32(data[start : start + num_bytes]))
        return crcs

    crcs_of(data).check(num_threads=2)
    changed = bytearray(data)
    changed[places[-1].offset_bytes + chosen.randrange(places[-1].num_bytes)] ^= 1
    path.write_bytes(changed)
    with pytest.raises(ToolkitError, match="member shard/data/1 is"):
        crcs_of(bytes(changed)).check(num_threads=2)


def test_what_was_read_is_compared_and_not_what_lies_there_later(tmp_path: Path) -> None:
    path = tmp_path / "shard.pt"
    torch.save({"a": torch.randn(100)}, path)
    (member,) = open_shard(path).storages.values()
    place = Slice(path, member.data_offset, member.size_bytes)
    crcs = SourceCrcs([place])
    crcs.add(path, place.offset_bytes, place.num_bytes, 12345)
    with pytest.raises(ToolkitError, match="has changed since it was saved"):
        crcs.check(num_threads=1)
