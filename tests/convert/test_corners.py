"""What few models have and every one may have: other orders, odd types, DeepSpeed's rarer settings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ds_toolkit.checkpoint.dtypes import FLOAT32
from ds_toolkit.checkpoint.layout import find_tag_folder
from ds_toolkit.checkpoint.masters import name_masters
from ds_toolkit.checkpoint.reductions import Inert
from ds_toolkit.checkpoint.shards import open_shard
from ds_toolkit.checkpoint.tensors import Role, StoredTensor
from ds_toolkit.checkpoint.weights import read_weights
from ds_toolkit.convert.consolidate import consolidate
from ds_toolkit.convert.gathering import gather

ODD = ["stage0-odd-fp32", "stage0-odd-bf16", "stage1-odd-bf16", "stage2-odd-fp32", "stage3-odd-bf16"]


def read(path: Path, offset_bytes: int, out: memoryview) -> None:
    with path.open("rb") as file:
        assert os.preadv(file.fileno(), [out], offset_bytes) == len(out)


def bytes_of(tensor: StoredTensor) -> bytes:
    data = bytearray(tensor.num_elements * tensor.dtype.size_bytes)
    gather(tensor, 0, memoryview(data), read)
    return bytes(data)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("case", ODD)
def test_buffers_of_every_type_and_order_are_kept_exactly(zoo: Path, case: str) -> None:
    tensors = read_weights(find_tag_folder(zoo / case / "checkpoints")).tensors
    buffers = torch.load(zoo / case / "buffers.pt", weights_only=True)
    assert len(buffers) == 9
    for name, expected in buffers.items():
        assert tensors[name].role is Role.BUFFER
        assert tensors[name].dtype.name == str(expected.dtype).removeprefix("torch."), name
        assert tensors[name].shape == expected.shape
        assert bytes_of(tensors[name]) == raw(expected), name
    assert not tensors["image"].is_plain


@pytest.mark.parametrize("suffix", [".bin", ".safetensors"])
@pytest.mark.parametrize("case", ODD)
def test_they_come_out_as_they_were(zoo: Path, tmp_path: Path, case: str, suffix: str) -> None:
    from safetensors.torch import load_file

    out = tmp_path / f"model{suffix}"
    done = consolidate(zoo / case / "checkpoints", out)
    found = torch.load(out, weights_only=True) if suffix == ".bin" else load_file(out)
    truth = torch.load(zoo / case / "truth.pt", weights_only=True)
    assert set(found) == set(truth)
    for name, expected in truth.items():
        assert (found[name].dtype, found[name].shape) == (expected.dtype, expected.shape), name
        assert raw(found[name]) == raw(expected), name
    assert done.notes == ()


def test_weights_in_another_order_and_their_masters(zoo: Path) -> None:
    """Both lie in a real file: the parameter as channels_last, its fp32 master row by row."""
    weights = read_weights(find_tag_folder(zoo / "stage0-odd-bf16" / "checkpoints"))
    assert not weights.tensors["conv.weight"].is_plain
    assert any(master.blocks is None for group in weights.unnamed_masters for master in group)
    named = name_masters(weights)
    assert named.unnamed_masters == ()
    assert named.tensors["conv.weight"].dtype == FLOAT32
    assert named.tensors["conv.weight"].is_plain
    full = read_weights(find_tag_folder(zoo / "stage0-odd-fp32" / "checkpoints"))
    assert not full.tensors["conv.weight"].is_plain


def test_padding_between_parameters_is_really_there(zoo: Path) -> None:
    """Else `parameter_alignment` would prove nothing."""
    folder = find_tag_folder(zoo / "stage1-aligned" / "checkpoints")
    shard = open_shard(folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    assert any(map(any, shard.root["optimizer_state_dict"]["param_alignment_paddings"]))


def test_the_optimizer_state_is_the_elastic_one(zoo: Path) -> None:
    folder = find_tag_folder(zoo / "stage2-elastic" / "checkpoints")
    shard = open_shard(folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    assert isinstance(shard.root["optimizer_state_dict"]["base_optimizer_state"], list)


def test_an_object_of_a_user_s_own_class_stays_a_name(zoo: Path) -> None:
    folder = find_tag_folder(zoo / "stage2-bf16-2ranks" / "checkpoints")
    settings = open_shard(folder / "mp_rank_00_model_states.pt").root["settings"]
    assert isinstance(settings, Inert)
    assert str(settings.arguments[0] if settings.arguments else settings.function).endswith("Settings")
    assert settings.state == {"seed": 1}


@pytest.mark.parametrize("case", ["stage2-oldformat", "stage3-oldformat"])
def test_the_old_format_has_no_checksums_and_says_so(zoo: Path, tmp_path: Path, case: str) -> None:
    folder = find_tag_folder(zoo / case / "checkpoints")
    assert all(path.read_bytes()[:1] == b"\x80" for path in folder.glob("*.pt"))
    done = consolidate(folder, tmp_path / "model.bin")
    assert len(done.notes) == 1
    assert (
        done.notes[0] == f"{done.num_shards} files have torch's old format, which has no checksums to compare"
    )
    found = torch.load(tmp_path / "model.bin", weights_only=True)
    for name, expected in torch.load(zoo / case / "truth.pt", weights_only=True).items():
        assert torch.equal(found[name], expected), name
