"""Pipelines that DeepSpeed wrote, and some made by hand that it would not write on this machine."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from stored import assert_holds, copier, tag_of, values_of

from ds_toolkit.checkpoint.manifest import Manifest, ManifestFile, RunShape
from ds_toolkit.checkpoint.masters import name_masters
from ds_toolkit.checkpoint.tensors import Role
from ds_toolkit.checkpoint.weights import read_weights
from ds_toolkit.convert.consolidate import consolidate
from ds_toolkit.errors import ToolkitError

CASES = [
    "pp2-stage1-bf16-2ranks",
    "pp2-stage0-fp32-4ranks",
    "pp2-stage0-bf16-4ranks",
    "pp2-stage1-fp32-4ranks",
    "pp4-bf16optimizer-4ranks",
    "pp2-parallel-write-4ranks",
]
UNTOLD = "pp2-stage0-untold-2ranks"
TIED = {"tied_modules.embedding.weight", "tied_modules.embedding.shift"}


@pytest.fixture
def copied(layouts_zoo: Path, tmp_path: Path) -> Callable[[str], Path]:
    return copier(layouts_zoo, tmp_path)


@pytest.mark.parametrize("case", CASES)
def test_every_weight_of_the_live_stages_is_there_bit_by_bit(layouts_zoo: Path, case: str) -> None:
    truth = torch.load(layouts_zoo / case / "truth.pt")
    weights = read_weights(tag_of(layouts_zoo / case))
    assert_holds(weights, truth)
    assert weights.names == tuple(truth)
    assert weights.stage == (0 if "stage0" in case else 1)
    assert weights.pp_world_size == int(case[2])
    assert weights.dp_world_size == int(case[-6]) // weights.pp_world_size
    assert (weights.step, weights.tp_world_size) == (2, 1)
    assert not weights.unnamed_masters
    # Stage 0 in fp32 has the layer's file alone.
    replicas = {replica.kept.name for replica in weights.replicas}
    assert replicas == (set() if case == "pp2-stage0-fp32-4ranks" else TIED)
    assert all(replica.other.slices != replica.kept.slices for replica in weights.replicas)


@pytest.mark.parametrize("case", CASES)
def test_roles_and_dtypes(layouts_zoo: Path, case: str) -> None:
    tensors = read_weights(tag_of(layouts_zoo / case)).tensors
    assert {name for name, tensor in tensors.items() if tensor.role is Role.BUFFER} - {
        "tied_modules.embedding.positions"
    } == {"5.norm.running_mean", "5.norm.running_var", "5.norm.num_batches_tracked"}
    trained = [tensors["tied_modules.embedding.weight"], tensors["2.weight"], tensors["5.linear.weight"]]
    assert {tensor.role for tensor in trained} == {Role.TRAINED}
    assert {tensor.dtype.name for tensor in trained} == {"float32"}
    frozen = {name for name, tensor in tensors.items() if tensor.role is Role.FROZEN}
    # Stage 0 in fp32 does not say what its optimizer has.
    wanted = set() if case == "pp2-stage0-fp32-4ranks" else {"3.weight", "3.bias", "5.linear.bias"}
    assert frozen == wanted


def test_a_tied_layer_that_nothing_names_keeps_its_number_and_a_note_says_so(layouts_zoo: Path) -> None:
    truth = torch.load(layouts_zoo / UNTOLD / "truth.pt")
    tied = "tied_modules.embedding."
    expected = {name.replace(tied, "0."): value for name, value in truth.items()}
    weights = read_weights(tag_of(layouts_zoo / UNTOLD))
    assert_holds(weights, expected)
    assert weights.notes[0].endswith("(tied_modules.<key>): 0, 2, 3, 6")


@pytest.mark.parametrize("case", ["pp2-stage1-bf16-2ranks", "pp2-stage0-fp32-4ranks"])
def test_a_missing_layer_is_named(copied: Callable[[str], Path], case: str) -> None:
    folder = copied(case)
    (folder / "layer_05-model_states.pt").unlink()
    with pytest.raises(ToolkitError, match="file of layer 5 is missing"):
        read_weights(folder)


def test_a_missing_layer_that_only_states_of_the_optimizer_tell(copied: Callable[[str], Path]) -> None:
    folder = copied("pp2-stage0-fp32-4ranks")
    (folder / "layer_00-model_states.pt").unlink()
    with pytest.raises(ToolkitError, match="the file of a layer is missing") as caught:
        read_weights(folder)
    assert "stage 0 has more states of shape (11, 5) than there are weights" in str(caught.value.why)


def test_a_layer_without_a_file_is_noted(copied: Callable[[str], Path]) -> None:
    # The fourth one is a function; nothing tells that the one before it had frozen weights.
    folder = copied("pp2-stage1-bf16-2ranks")
    assert "no file of the layers 4: they are functions" in read_weights(folder).notes[-1]
    (folder / "layer_03-model_states.pt").unlink()
    assert "no file of the layers 3, 4: they are functions" in read_weights(folder).notes[-1]


def test_a_missing_layer_that_only_the_manifest_knows_is_named(copied: Callable[[str], Path]) -> None:
    folder = copied("pp2-stage1-bf16-2ranks")
    files = tuple(ManifestFile(path.name, path.stat().st_size, 0, 0) for path in sorted(folder.glob("*.pt")))
    Manifest("tag", 2, "periodic", RunShape(2, 1, 1, 2, "bf16"), files).write(folder)
    assert read_weights(folder).step == 2
    path = folder / "layer_03-model_states.pt"
    path.unlink()
    with pytest.raises(ToolkitError, match="a checkpoint file is missing") as caught:
        read_weights(folder)
    assert caught.value.where == str(path)


@pytest.mark.parametrize(
    "name", ["mp_rank_01_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt"]
)
def test_a_missing_stage_is_named(copied: Callable[[str], Path], name: str) -> None:
    folder = copied("pp2-stage1-bf16-2ranks")
    (folder / name).unlink()
    with pytest.raises(ToolkitError, match="a checkpoint file is missing") as caught:
        read_weights(folder)
    assert caught.value.where == str(folder / name)


def test_a_stage_left_over_from_a_larger_run_is_named(copied: Callable[[str], Path]) -> None:
    folder = copied("pp2-stage1-bf16-2ranks")
    extra = folder / "mp_rank_02_model_states.pt"
    shutil.copy(folder / "mp_rank_01_model_states.pt", extra)
    with pytest.raises(ToolkitError, match="more shards than its world size") as caught:
        read_weights(folder)
    assert caught.value.where == str(extra)


@pytest.mark.parametrize("shape", [(5, 4), (25, 1)])
def test_layers_of_another_shape_do_not_mix(copied: Callable[[str], Path], shape: tuple[int, int]) -> None:
    folder = copied("pp2-stage1-bf16-2ranks")
    path = folder / "layer_02-model_states.pt"
    torch.save({"weight": torch.zeros(shape), "bias": torch.zeros(5)}, path)
    with pytest.raises(ToolkitError, match="do not belong together") as caught:
        read_weights(folder)
    assert caught.value.where == str(path)


def test_stages_of_different_steps_do_not_mix(copied: Callable[[str], Path]) -> None:
    folder = copied("pp2-stage1-bf16-2ranks")
    path = folder / "mp_rank_01_model_states.pt"
    torch.save({**torch.load(path, weights_only=False), "global_steps": 3}, path)
    with pytest.raises(ToolkitError, match="do not belong together") as caught:
        read_weights(folder)
    assert (caught.value.where, caught.value.why) == (str(path), "step is 3 here and 2 in the first file")


def test_layer_files_left_in_another_checkpoint_are_named(copied: Callable[[str], Path]) -> None:
    folder = copied("pp2-stage1-bf16-2ranks")
    for path in folder.glob("layer_*"):
        path.unlink()
    with pytest.raises(ToolkitError, match="layer files are missing"):
        read_weights(folder)


# Made by hand.


def write_pipeline(
    folder: Path,
    layers: dict[int, dict[str, torch.Tensor]],
    stages: list[dict[str, torch.Tensor]],
    *,
    zero: int = 1,
    dtype: torch.dtype = torch.float32,
    **more: Any,
) -> Path:
    """One data-parallel rank; `stages` are what the optimizers have, in fp32."""
    for index, state in layers.items():
        torch.save(
            {name: value.to(dtype) if torch.is_tensor(value) else value for name, value in state.items()},
            folder / f"layer_{index:02d}-model_states.pt",
        )
    for stage, optimized in enumerate(stages):
        flat = torch.cat([value.flatten() for value in optimized.values()])
        model = {
            "module": None,
            "buffer_names": [],
            "param_shapes": [{name: value.shape for name, value in optimized.items()}] if zero else None,
            "optimizer": None if zero else {"fp32_groups_flat": [flat]},
            "shared_params": {},
            "global_steps": 2,
            "dp_world_size": 1,
            "mp_world_size": len(stages),
            "checkpoint_parallel_dimensions": {"pp_degree": len(stages), "tp_degree": 1},
            **more,
        }
        torch.save(model, folder / f"mp_rank_{stage:02d}_model_states.pt")
        if zero:
            state = {
                "zero_stage": 1,
                "partition_count": [1],
                "single_partition_of_fp32_groups": [flat],
                "group_paddings": [0],
            }
            path = folder / f"zero_pp_rank_0_mp_rank_{stage:02d}_optim_states.pt"
            torch.save({"optimizer_state_dict": state}, path)
    return folder


def test_a_tied_layer_saved_at_each_of_its_places_is_one(tmp_path: Path) -> None:
    weight, other = torch.randn(4, 3), torch.randn(2)
    key = "tied_modules.x.weight"
    layers = {0: {"b": other}, 1: {"weight": weight}, 2: {"weight": weight}}
    folder = write_pipeline(tmp_path, layers, [{"0.b": other, key: weight}, {key: weight}])
    weights = read_weights(folder)
    assert_holds(weights, {key: weight, "0.b": other})
    # As in the model, whose first child is `tied_modules`.
    assert weights.names == (key, "0.b")
    assert weights.notes == ()


def test_of_two_keys_the_one_with_the_layers_values_is_taken(tmp_path: Path) -> None:
    one, two = torch.randn(4, 3), torch.randn(4, 3)
    names = ["tied_modules.one.weight", "tied_modules.two.weight"]
    layers = {0: {"weight": two}, 1: {"weight": one}}
    optimized = dict(zip(names, (one, two), strict=True))
    folder = write_pipeline(tmp_path, layers, [optimized, optimized], dtype=torch.bfloat16)
    weights = read_weights(folder)
    assert_holds(weights, optimized)
    assert weights.notes == ()


def test_of_two_keys_with_the_same_values_none_is_taken(tmp_path: Path) -> None:
    same = torch.ones(4, 3)
    optimized = {"tied_modules.one.weight": same, "tied_modules.two.weight": same}
    weights = read_weights(write_pipeline(tmp_path, {0: {"weight": same}}, [optimized, optimized]))
    assert_holds(weights, {**optimized, "0.weight": same})
    (note,) = weights.notes
    assert note.endswith("(tied_modules.<key>): 0")


def test_a_frozen_layer_like_a_tied_one_is_not_taken_for_it(tmp_path: Path) -> None:
    tied, frozen = torch.randn(4, 3), torch.randn(4, 3)
    key = "tied_modules.x.weight"
    folder = write_pipeline(
        tmp_path, {0: {"weight": tied}, 1: {"weight": frozen}}, [{key: tied}, {key: tied}]
    )
    weights = read_weights(folder)
    assert_holds(weights, {key: tied, "1.weight": frozen})
    assert weights.tensors["1.weight"].role is Role.FROZEN


def test_a_tied_module_that_no_layer_holds_comes_from_the_optimizer(tmp_path: Path) -> None:
    # DeepSpeed saves no layer that is used through a forward_fn.
    tied, other = torch.randn(4, 3), torch.randn(2)
    key = "tied_modules.x.weight"
    folder = write_pipeline(tmp_path, {1: {"b": other}}, [{key: tied}, {key: tied, "1.b": other}])
    assert_holds(read_weights(folder), {key: tied, "1.b": other})


def test_a_shape_that_nothing_says_is_not_made_up(copied: Callable[[str], Path]) -> None:
    folder = copied("pp2-stage0-bf16-4ranks")
    (folder / "layer_00-model_states.pt").unlink()
    with pytest.raises(ToolkitError, match=r"shape of the tensor tied_modules.embedding.\w+ is not known"):
        read_weights(folder)


def test_masters_of_stage_0_in_16_bits_are_named_by_their_values(tmp_path: Path) -> None:
    full = {"0.a": torch.randn(4, 3), "1.a": torch.randn(5), "2.a": torch.randn(2)}
    layers = {index: {"a": full[f"{index}.a"]} for index in range(3)}
    stages = [{"0.a": full["0.a"], "1.a": full["1.a"]}, {"2.a": full["2.a"]}]
    weights = read_weights(write_pipeline(tmp_path, layers, stages, zero=0, dtype=torch.float16))
    assert weights.tensors["0.a"].dtype.name == "float16"
    named = name_masters(weights)
    assert_holds(named, full)
    assert not named.unnamed_masters


def test_older_checkpoints_do_not_say_how_many_stages_there_are(tmp_path: Path) -> None:
    full = {"0.a": torch.randn(4, 3), "1.a": torch.randn(5)}
    layers = {index: {"a": full[f"{index}.a"]} for index in range(2)}
    stages = [{name: value} for name, value in full.items()]
    folder = write_pipeline(tmp_path, layers, stages, checkpoint_parallel_dimensions=None)
    weights = read_weights(folder)
    assert_holds(weights, full)
    assert (weights.pp_world_size, weights.tp_world_size) == (2, 1)


def test_what_is_no_tensor_is_left_out_under_its_whole_name(tmp_path: Path) -> None:
    weight = torch.randn(4)
    layers: dict[int, Any] = {0: {"a": weight, "b._extra_state": {"scale": 1}}}
    weights = read_weights(write_pipeline(tmp_path, layers, [{"0.a": weight}]))
    assert weights.left_out == ("0.b._extra_state",)
    assert torch.equal(values_of(weights.tensors["0.a"]), weight)


def test_tensor_parallel_ranks_of_each_stage_are_put_together_first(tmp_path: Path) -> None:
    column, row, tied = torch.randn(4, 3), torch.randn(2, 6), torch.randn(4, 2)
    key = "tied_modules.x.weight"
    degrees = {"pp_degree": 2, "tp_degree": 2}
    info = {"parameter_with_row_parallelism_patterns": [r"1\.row"], "tp_replicated_parameter_patterns": []}
    for tp_rank in range(2):
        part = {
            key: tied.chunk(2)[tp_rank],
            "0.column": column.chunk(2)[tp_rank],
            "1.row": row.chunk(2, dim=1)[tp_rank].contiguous(),
        }
        part_of_layer = {0: {"column": part["0.column"]}, 1: {"row": part["1.row"]}, 2: {"weight": part[key]}}
        alone = tmp_path / str(tp_rank)
        alone.mkdir()
        write_pipeline(
            alone,
            part_of_layer,
            [{key: part[key], "0.column": part["0.column"]}, {key: part[key], "1.row": part["1.row"]}],
            mp_world_size=4,
            checkpoint_parallel_dimensions=degrees,
            universal_checkpoint_info=info,
        )
        for path in sorted(alone.iterdir()):
            name = path.name.replace("-model_states", f"-model_{tp_rank:02d}-model_states")
            stage = re.search(r"mp_rank_(\d+)", name)
            if stage is not None:
                name = name.replace(stage[0], f"mp_rank_{int(stage[1]) * 2 + tp_rank:02d}")
            path.rename(tmp_path / name)
        alone.rmdir()
    weights = read_weights(tmp_path)
    assert weights.names == (key, "0.column", "1.row")
    assert (weights.pp_world_size, weights.tp_world_size) == (2, 2)
    out = tmp_path.parent / f"{tmp_path.name}.safetensors"
    done = consolidate(tmp_path, out)
    written = safetensors.torch.load_file(out)
    assert all(
        torch.equal(written[name], whole)
        for name, whole in ((key, tied), ("0.column", column), ("1.row", row))
    )
    assert done.notes == ()
