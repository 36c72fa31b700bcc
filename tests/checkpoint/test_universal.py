"""Universal checkpoints that DeepSpeed's converter wrote, and some changed by hand."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from stored import assert_holds

from ds_toolkit.checkpoint.layout import find_tag_folder
from ds_toolkit.checkpoint.tensors import Role
from ds_toolkit.checkpoint.weights import read_weights
from ds_toolkit.errors import ToolkitError

STAGE1 = "stage1-fp32-2ranks"
UNIVERSAL = [STAGE1, "stage2-bf16-3ranks", "stage3-bf16-2ranks", "stage1-bf16optimizer"]
MODEL = "mp_rank_00_model_states.pt"


@pytest.fixture
def copied(zoo: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Copies a universal checkpoint to where a test may damage it."""

    def copy(case: str) -> Path:
        return shutil.copytree(zoo / case / "universal" / "global_step3", tmp_path / case)

    return copy


def rewrite(path: Path, **changes: object) -> None:
    torch.save({**torch.load(path, weights_only=False), **changes}, path)


@pytest.mark.parametrize("case", UNIVERSAL)
def test_every_weight_of_the_live_engine_is_there_bit_by_bit(zoo: Path, case: str) -> None:
    folder = find_tag_folder(zoo / case / "universal")
    weights = read_weights(folder)
    assert_holds(weights, torch.load(zoo / case / "truth.pt"))
    assert weights.aliases == {"head.weight": "embedding.weight"}
    assert (weights.stage, weights.step) == (int(case[5]), 3)
    assert weights.notes == ()
    ordinary = read_weights(zoo / case / "checkpoints" / "global_step3")
    assert weights.names == ordinary.names
    assert {name: tensor.role for name, tensor in weights.tensors.items()} == {
        name: tensor.role for name, tensor in ordinary.tensors.items()
    }
    assert weights.tensors["up.weight"].role is Role.TRAINED
    assert weights.tensors["up.weight"].slices[0].path == folder / "zero" / "up.weight" / "fp32.pt"


def test_latest_decides_before_latest_universal(zoo: Path, tmp_path: Path) -> None:
    source = zoo / STAGE1
    for name in ("one", "two"):
        shutil.copytree(source / "universal" / "global_step3", tmp_path / name)
    (tmp_path / "latest_universal").write_text("two")
    assert find_tag_folder(tmp_path) == tmp_path / "two"
    (tmp_path / "latest").write_text("one")
    assert find_tag_folder(tmp_path) == tmp_path / "one"
    (tmp_path / "latest").unlink()
    (tmp_path / "latest_universal").write_text("three")
    with pytest.raises(ToolkitError, match="`latest_universal` names the tag `three`"):
        find_tag_folder(tmp_path)


@pytest.mark.parametrize("name", ["zero/up.weight/fp32.pt", "zero/optimizer_state.pt"])
def test_a_missing_file_is_named(copied: Callable[[str], Path], name: str) -> None:
    folder = copied(STAGE1)
    (folder / name).unlink()
    with pytest.raises(ToolkitError, match="a checkpoint file is missing") as caught:
        read_weights(folder)
    assert caught.value.where == str(folder / name)


def test_a_conversion_that_did_not_finish_has_no_model_states(copied: Callable[[str], Path]) -> None:
    folder = copied(STAGE1)
    (folder / MODEL).unlink()
    with pytest.raises(ToolkitError, match="no model states"):
        read_weights(folder)


@pytest.mark.parametrize("case", [STAGE1, "stage3-bf16-2ranks"])
def test_a_shape_that_is_not_the_models_is_named(copied: Callable[[str], Path], case: str) -> None:
    folder = copied(case)
    path = folder / "zero" / "up.weight" / "fp32.pt"
    state = torch.load(path)
    torch.save(state[:-1] if torch.is_tensor(state) else {"param": state["param"].T.contiguous()}, path)
    with pytest.raises(ToolkitError, match=r"up.weight has not the shape") as caught:
        read_weights(folder)
    assert caught.value.where == str(path)


def test_a_vocabulary_without_its_padding_keeps_its_own_shape(
    zoo: Path, copied: Callable[[str], Path]
) -> None:
    folder = copied(STAGE1)
    path = folder / "zero" / "embedding.weight" / "fp32.pt"
    cut = torch.load(path)["param"][:10, :]
    # As the converter does, with the whole storage.
    torch.save({"param": cut, "cat_dim": 0, "vocab_tensor": True}, path)
    truth = torch.load(zoo / STAGE1 / "truth.pt")
    weights = read_weights(folder)
    assert_holds(weights, {**truth, "embedding.weight": cut, "head.weight": cut})
    assert weights.notes == ("the converter cut the padding off the vocabulary of embedding.weight",)


def test_frozen_parts_of_tensor_parallel_ranks_are_refused(copied: Callable[[str], Path]) -> None:
    folder = copied(STAGE1)
    degrees = {"pp_degree": 1, "tp_degree": 2}
    rewrite(folder / MODEL, mp_world_size=2, checkpoint_parallel_dimensions=degrees)
    with pytest.raises(ToolkitError, match=r"one tensor-parallel rank's part of the frozen \w+"):
        read_weights(folder)


def test_weights_put_together_from_tensor_parallel_parts_have_their_own_shape(
    copied: Callable[[str], Path],
) -> None:
    folder = copied(STAGE1)
    model = torch.load(folder / MODEL, weights_only=False)
    module = {name: value for name, value in model["module"].items() if not name.startswith("frozen.")}
    (shapes, *others) = model["param_shapes"]
    shapes = {name: torch.Size([1]) for name in shapes}
    rewrite(
        folder / MODEL,
        module=module,
        param_shapes=[shapes, *others],
        mp_world_size=2,
        checkpoint_parallel_dimensions={"pp_degree": 1, "tp_degree": 2},
    )
    # A parameter of no elements is in no optimizer.
    model = torch.load(folder / MODEL, weights_only=False)
    del model["module"]["empty"]
    torch.save(model, folder / MODEL)
    weights = read_weights(folder)
    assert weights.tp_world_size == 2
    assert weights.tensors["up.bias"].shape == (11,)


def test_a_pipelines_buffers_are_missing_and_a_note_says_so(tmp_path: Path) -> None:
    parts = [{"0.a": torch.randn(4, 3), "tied_modules.x.w": torch.randn(2)}, {"1.a": torch.randn(5)}]
    parts[1]["tied_modules.x.w"] = parts[0]["tied_modules.x.w"]
    full = {name: value for part in parts for name, value in part.items()}
    for name, value in full.items():
        (tmp_path / "zero" / name).mkdir(parents=True)
        torch.save({"param": value, "cat_dim": 0}, tmp_path / "zero" / name / "fp32.pt")
    torch.save({"zero_stage": 1}, tmp_path / "zero" / "optimizer_state.pt")
    for stage, part in enumerate(parts):
        model = {
            "module": None,
            "buffer_names": ["1.mean"],
            "param_shapes": [{name: value.shape for name, value in part.items()}],
            "global_steps": 2,
            "dp_world_size": 1,
            "mp_world_size": 2,
        }
        torch.save(model, tmp_path / f"mp_rank_{stage:02d}_model_states.pt")
    weights = read_weights(tmp_path)
    assert_holds(weights, full)
    assert weights.pp_world_size == 2
    (note,) = weights.notes
    assert note.startswith("the converter leaves out a pipeline's layer files")
    rewrite(tmp_path / "mp_rank_01_model_states.pt", global_steps=3)
    with pytest.raises(ToolkitError, match="do not belong together"):
        read_weights(tmp_path)


def test_a_mixture_of_experts_is_refused_unless_one_rank_has_all_of_them(
    copied: Callable[[str], Path],
) -> None:
    folder = copied(STAGE1)
    rewrite(folder / MODEL, num_experts=[4])
    with pytest.raises(ToolkitError, match="a mixture of experts converted"):
        read_weights(folder)


def test_a_name_that_leads_out_of_the_checkpoint_is_refused(copied: Callable[[str], Path]) -> None:
    folder = copied(STAGE1)
    rewrite(folder / MODEL, param_shapes=[{"../../secret": torch.Size([1])}])
    with pytest.raises(ToolkitError, match="leads out of the checkpoint"):
        read_weights(folder)
