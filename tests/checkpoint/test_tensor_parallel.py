"""Checkpoints of models that AutoTP or the client's own modules have split."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from ds_toolkit.checkpoint.dtypes import FLOAT32
from ds_toolkit.checkpoint.layout import find_tag_folder
from ds_toolkit.checkpoint.weights import read_weights
from ds_toolkit.convert.consolidate import Consolidated, consolidate
from ds_toolkit.errors import ToolkitError

CASES = [
    "tp2-stage0-fp32",
    "tp2-stage1-bf16",
    "tp2-stage1-bf16optimizer",
    "tp2-stage2-fp32",
    "tp2-stage2-bf16",
    "tp2-stage3-fp32",
    "tp3-stage0-bf16",
    "tp3-stage1-fp32",
    "tp3-stage3-bf16",
]
TIED = {"head.weight": "embedding.weight"}


def consolidated(checkpoint: Path, out: Path, **options: Any) -> tuple[Consolidated, dict[str, torch.Tensor]]:
    done = consolidate(checkpoint, out, **options)
    return done, torch.load(out, weights_only=True)


def assert_equal(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(truth)
    for name, expected in truth.items():
        assert found[name].dtype == expected.dtype, name
        assert torch.equal(found[name], expected), name


@pytest.mark.parametrize("case", CASES)
def test_what_was_split_comes_out_again_bit_by_bit(tp_zoo: Path, tmp_path: Path, case: str) -> None:
    truth = torch.load(tp_zoo / case / "truth.pt")
    done, found = consolidated(tp_zoo / case / "checkpoints", tmp_path / "model.bin")
    assert_equal(found, truth)
    assert (done.aliases, done.notes) == (TIED, ())
    assert (done.stage, done.dp_world_size) == (int(case[9]), 2 if case.startswith("tp2") else 1)
    consolidate(tp_zoo / case / "checkpoints", tmp_path / "model.safetensors")
    found = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert_equal({**found, "head.weight": found["embedding.weight"]}, truth)


@pytest.mark.parametrize("case", CASES)
def test_the_map_says_how_many_ranks_there_were(tp_zoo: Path, case: str) -> None:
    weights = read_weights(find_tag_folder(tp_zoo / case / "checkpoints"))
    assert weights.tp_world_size == int(case[2])
    assert set(weights.names) == set(torch.load(tp_zoo / case / "truth.pt"))
    num_model_files = len({path for path in weights.shards if "model_states" in path.name})
    split = weights.dp_world_size if "stage3" in case else 1
    assert num_model_files == weights.tp_world_size * split
    if "bf16" not in case or "stage0" not in case:
        assert weights.tensors["layers.0.up.weight"].dtype == FLOAT32


def test_columns_are_copied_and_rows_are_gathered(tp_zoo: Path) -> None:
    tensors = read_weights(find_tag_folder(tp_zoo / "tp2-stage1-bf16" / "checkpoints")).tensors
    assert tensors["layers.0.up.weight"].is_plain
    assert not tensors["layers.0.out.weight"].is_plain
    assert not tensors["layers.0.fused.weight"].is_plain


def test_a_model_that_splits_itself_is_put_together_as_it_says(tp_zoo: Path, tmp_path: Path) -> None:
    done, found = consolidated(tp_zoo / "megatron" / "checkpoints", tmp_path / "model.bin", tag="told")
    assert_equal(found, torch.load(tp_zoo / "megatron" / "truth.pt"))
    assert done.notes == ()


def test_a_model_that_does_not_say_how_it_split_itself_is_refused(tp_zoo: Path, tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match=r"the tensor embedding\.weight cannot be put together") as caught:
        consolidate(tp_zoo / "megatron" / "checkpoints", tmp_path / "model.bin", tag="silent")
    assert caught.value.why == "the checkpoint does not record how its tensors are split"
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def changed(tp_zoo: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of a case of stage 0, whose model states of one rank were changed and saved again."""

    def change(
        how: Callable[[dict[str, Any]], None], *, rank: int = 1, case: str = "tp2-stage0-fp32"
    ) -> Path:
        original = find_tag_folder(tp_zoo / case / "checkpoints")
        folder = Path(shutil.copytree(original, tmp_path / "tag"))
        path = folder / f"mp_rank_{rank:02d}_model_states.pt"
        state = torch.load(path, weights_only=False)
        how(state)
        torch.save(state, path)
        return folder

    return change


def test_replicated_weights_that_drifted_apart_are_noted(
    changed: Callable[..., Path], tmp_path: Path
) -> None:
    def drift(state: dict[str, Any]) -> None:
        state["module"]["layers.1.norm.weight"][3] += 1

    folder = changed(drift)
    done, found = consolidated(folder, tmp_path / "model.bin")
    assert len(done.notes) == 1
    assert done.notes[0].endswith("those of the first rank were taken: layers.1.norm.weight")
    assert found["layers.1.norm.weight"].tolist() == [1.0] * 6


def test_buffers_that_differ_are_refused(changed: Callable[..., Path], tmp_path: Path) -> None:
    def differ(state: dict[str, Any]) -> None:
        state["module"]["positions"][2] = 9

    with pytest.raises(ToolkitError, match="the tensor positions cannot be put together") as caught:
        consolidate(changed(differ), tmp_path / "model.bin")
    assert "differs from rank to rank" in str(caught.value.why)


def test_weights_to_be_averaged_that_differ_are_refused(tp_zoo: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tp_zoo / "megatron" / "checkpoints" / "told", tmp_path / "tag"))
    for path in folder.glob("*_mp_rank_01_optim_states.pt"):
        state = torch.load(path, weights_only=False)
        state["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].detach().add_(1)
        torch.save(state, path)
    with pytest.raises(ToolkitError, match=r"the tensor shared\.weight cannot be put together") as caught:
        consolidate(folder, tmp_path / "model.bin")
    assert "averaged" in str(caught.value.why)


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("step", lambda state: state.update(global_steps=2)),
        ("data-parallel world size", lambda state: state.update(dp_world_size=3)),
        ("model-parallel world size", lambda state: state.update(mp_world_size=3)),
        ("list of tensors", lambda state: state["module"].pop("layers.1.norm.weight")),
        (
            "universal_checkpoint_info",
            lambda state: state["universal_checkpoint_info"].update(original_vocab_size=3),
        ),
    ],
)
def test_cells_that_do_not_belong_together(changed: Callable[..., Path], what: str, change: Any) -> None:
    folder = changed(change)
    with pytest.raises(ToolkitError, match="do not belong together") as caught:
        read_weights(folder)
    assert caught.value.where == str(folder / "mp_rank_01_model_states.pt")
    assert str(caught.value.why).startswith(what)


def test_a_shard_of_another_size_is_named(changed: Callable[..., Path]) -> None:
    def shorten(state: dict[str, Any]) -> None:
        state["module"]["layers.1.up.weight"] = torch.zeros(2, 6)

    with pytest.raises(ToolkitError, match=r"the tensor layers\.1\.up\.weight cannot") as caught:
        read_weights(changed(shorten))
    assert caught.value.why == "rank 1 should have the shape (3, 6), and has (2, 6)"


def test_parts_of_different_types_are_named(changed: Callable[..., Path]) -> None:
    def round_it(state: dict[str, Any]) -> None:
        state["module"]["layers.1.up.weight"] = state["module"]["layers.1.up.weight"].bfloat16()

    with pytest.raises(ToolkitError, match=r"the tensor layers\.1\.up\.weight cannot") as caught:
        read_weights(changed(round_it))
    assert "bfloat16, float32" in str(caught.value.why)


def test_a_missing_rank_is_named(changed: Callable[..., Path]) -> None:
    folder = changed(lambda state: None)
    (folder / "mp_rank_01_model_states.pt").unlink()
    with pytest.raises(ToolkitError, match="a checkpoint file is missing") as caught:
        read_weights(folder)
    assert caught.value.where == str(folder / "mp_rank_01_model_states.pt")


def test_files_of_more_ranks_than_there_are_are_named(changed: Callable[..., Path]) -> None:
    folder = changed(lambda state: None)
    shutil.copy(folder / "mp_rank_01_model_states.pt", folder / "mp_rank_02_model_states.pt")
    with pytest.raises(ToolkitError, match="more shards than its world size") as caught:
        read_weights(folder)
    assert caught.value.where == str(folder / "mp_rank_02_model_states.pt")


def test_masters_of_some_ranks_alone_are_not_used(
    changed: Callable[..., Path], tp_zoo: Path, tmp_path: Path
) -> None:
    """A weight that has fp32 values in one rank only stays what all ranks have."""

    def unfit(state: dict[str, Any]) -> None:
        for group in state["optimizer"]["fp32_groups"]:
            for master in group:
                master.detach().add_(5)

    folder = changed(unfit, case="tp3-stage0-bf16")
    done, found = consolidated(folder, tmp_path / "model.bin")
    assert "could not be matched" in done.notes[0]
    # Nothing was trained: the 16-bit weights are the fp32 ones.
    assert_equal(found, torch.load(tp_zoo / "tp3-stage0-bf16" / "truth.pt"))
