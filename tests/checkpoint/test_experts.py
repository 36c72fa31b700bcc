"""Mixtures of experts that DeepSpeed wrote, and what is wrong with them once they are damaged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from stored import assert_holds, copier, tag_of

from ds_toolkit.checkpoint.examining.summary import summarize
from ds_toolkit.checkpoint.masters import name_masters
from ds_toolkit.checkpoint.tensors import Role
from ds_toolkit.checkpoint.weights import read_weights
from ds_toolkit.errors import ToolkitError

CASES = [
    "moe-ep2-stage1-bf16-2ranks",
    "moe-ep1-stage2-fp32-2ranks",
    "moe-ep2-stage0-fp32-4ranks",
    "moe-ep2-stage0-bf16-4ranks",
    "moe-ep2-stage1-fp32-4ranks",
    "moe-ep2-stage2-bf16-4ranks",
    "moe-ep2-bf16optimizer-4ranks",
    "moe-ep2-datafirst-4ranks",
]
STAGE1 = "moe-ep2-stage1-bf16-2ranks"
PREFIX = "block.moe.deepspeed_moe.experts.deepspeed_experts"


@pytest.fixture
def copied(layouts_zoo: Path, tmp_path: Path) -> Callable[[str], Path]:
    return copier(layouts_zoo, tmp_path)


def rewrite(path: Path, **changes: object) -> None:
    torch.save({**torch.load(path, weights_only=False), **changes}, path)


@pytest.mark.parametrize("case", CASES)
def test_every_expert_of_the_live_engines_is_there_bit_by_bit(layouts_zoo: Path, case: str) -> None:
    truth = torch.load(layouts_zoo / case / "truth.pt")
    weights = name_masters(read_weights(tag_of(layouts_zoo / case)))
    assert_holds(weights, truth)
    assert weights.names == tuple(truth)
    assert weights.dp_world_size == int(case[-6])
    assert (weights.notes, weights.unnamed_masters) == ((), ())
    assert summarize(tag_of(layouts_zoo / case)).ep_world_size == int(case[6])


@pytest.mark.parametrize("case", CASES)
def test_roles_and_dtypes(layouts_zoo: Path, case: str) -> None:
    tensors = name_masters(read_weights(tag_of(layouts_zoo / case))).tensors
    for expert in range(4):
        assert tensors[f"{PREFIX}.{expert}.number"].role is Role.BUFFER
        trained = tensors[f"{PREFIX}.{expert}.up.weight"]
        assert (trained.role, trained.dtype.name) == (Role.TRAINED, "float32")
        if "stage0" not in case:
            assert tensors[f"{PREFIX}.{expert}.frozen"].role is Role.FROZEN


@pytest.mark.parametrize("case", [STAGE1, "moe-ep2-stage0-fp32-4ranks"])
@pytest.mark.parametrize("expert", [0, 3])
def test_a_missing_expert_is_named(copied: Callable[[str], Path], case: str, expert: int) -> None:
    folder = copied(case)
    path = folder / f"layer_0_expert_{expert}_mp_rank_00_model_states.pt"
    path.unlink()
    with pytest.raises(ToolkitError, match="a checkpoint file is missing") as caught:
        read_weights(folder)
    assert caught.value.where == str(path)


@pytest.mark.parametrize("case", ["moe-ep2-stage0-fp32-4ranks", "moe-ep2-stage0-bf16-4ranks"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_optimizer_of_experts_is_named(copied: Callable[[str], Path], case: str, rank: int) -> None:
    folder = copied(case)
    path = folder / f"expp_rank_{rank}_mp_rank_00_optim_states.pt"
    path.unlink()
    with pytest.raises(ToolkitError, match="a checkpoint file is missing") as caught:
        read_weights(folder)
    assert caught.value.where == str(path)


def test_without_their_number_a_gap_between_experts_is_named(copied: Callable[[str], Path]) -> None:
    folder = copied("moe-ep2-stage0-fp32-4ranks")
    rewrite(folder / "mp_rank_00_model_states.pt", num_experts=None)
    assert read_weights(folder).step == 2
    (folder / "layer_0_expert_1_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(ToolkitError, match="weights of expert 1 of block"):
        read_weights(folder)


def test_an_expert_left_over_from_another_model_is_named(copied: Callable[[str], Path]) -> None:
    folder = copied(STAGE1)
    extra = folder / "layer_0_expert_4_mp_rank_00_model_states.pt"
    shutil.copy(folder / "layer_0_expert_3_mp_rank_00_model_states.pt", extra)
    with pytest.raises(ToolkitError, match="more experts than its model") as caught:
        read_weights(folder)
    assert caught.value.where == str(extra)


def test_where_the_optimizer_has_other_values_the_files_count_and_a_note_says_so(
    layouts_zoo: Path, copied: Callable[[str], Path]
) -> None:
    folder = copied(STAGE1)
    path = folder / "layer_0_expert_2_mp_rank_00_model_states.pt"
    name = f"{PREFIX}.2.up.weight"
    other = torch.randn(3, 5).bfloat16()
    rewrite(path, **{name: other})
    weights = read_weights(folder)
    truth = torch.load(layouts_zoo / STAGE1 / "truth.pt")
    assert_holds(weights, {**truth, name: other.float()})
    (note,) = weights.notes
    assert note.startswith(f"the optimizer's fp32 weights of 1 expert tensors, {name} among them, do not")


def test_a_configuration_that_is_wrong_about_the_order_of_ranks_does_no_harm(
    layouts_zoo: Path, copied: Callable[[str], Path]
) -> None:
    for case, is_true in (("moe-ep2-datafirst-4ranks", True), ("moe-ep2-stage1-fp32-4ranks", False)):
        folder = copied(case)
        path = folder / "mp_rank_00_model_states.pt"
        config = torch.load(path, weights_only=False)["ds_config"]
        rewrite(path, ds_config={**config, "use_data_before_expert_parallelism": not is_true})
        weights = read_weights(folder)
        assert_holds(weights, torch.load(layouts_zoo / case / "truth.pt"))
        assert weights.notes == ()


def test_experts_of_another_shape_do_not_mix(copied: Callable[[str], Path]) -> None:
    folder = copied(STAGE1)
    for path in folder.glob("layer_0_expert_*"):
        state = torch.load(path)
        torch.save({name: value.flatten() for name, value in state.items()}, path)
    with pytest.raises(ToolkitError, match="do not belong together") as caught:
        read_weights(folder)
    assert f"{PREFIX}.0.up.weight with shape (3, 5)" in str(caught.value.why)


def test_ranks_that_order_groups_differently_do_not_mix(copied: Callable[[str], Path]) -> None:
    folder = copied(STAGE1)
    path = folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    state = torch.load(path, weights_only=False)
    state["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][1]["name"] = "ep_size_4"
    torch.save(state, path)
    with pytest.raises(ToolkitError, match="do not belong together") as caught:
        read_weights(folder)
    assert caught.value.where == str(path)


def test_experts_under_tensor_parallelism_are_refused(copied: Callable[[str], Path]) -> None:
    folder = copied(STAGE1)
    name = "layer_0_expert_0_mp_rank_00_model_states.pt"
    shutil.copy(folder / name, folder / name.replace("mp_rank_00", "mp_rank_01"))
    with pytest.raises(ToolkitError, match="a mixture of experts that a pipeline or tensor parallelism"):
        read_weights(folder)


def test_automatic_expert_parallelism_is_refused_by_name(copied: Callable[[str], Path]) -> None:
    folder = copied(STAGE1)
    rewrite(folder / "mp_rank_00_model_states.pt", ds_autoep_layers=[{"moe_layer_id": 0}])
    with pytest.raises(ToolkitError, match="automatic expert parallelism"):
        read_weights(folder)
