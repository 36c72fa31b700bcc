"""The map of real checkpoints, and of some made by hand that DeepSpeed would not make on this machine."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stored import assert_holds, copier, tag_of, values_of

from ds_toolkit.checkpoint.manifest import Manifest, ManifestFile, RunShape
from ds_toolkit.checkpoint.masters import name_masters
from ds_toolkit.checkpoint.tensors import Role
from ds_toolkit.checkpoint.weights import read_weights
from ds_toolkit.errors import ToolkitError

READABLE = [
    f"stage{stage}-{precision}-{num_ranks}ranks"
    for num_ranks in (2, 3)
    for stage in (0, 1, 2, 3)
    for precision in ("fp32", "bf16")
    if stage > 0 or num_ranks == 2
] + [
    "stage3-subgroups",
    "stage1-no-frozen",
    "stage2-no-frozen",
    "stage3-no-frozen",
    "stage1-aligned",
    "stage2-elastic",
    "stage1-offload",
    "stage2-offload",
    "stage3-offload",
    "stage3-hpz",
    "stage2-oldformat",
    "stage3-oldformat",
    "stage1-bf16-5ranks",
    "stage3-bf16-12ranks",
]
# zero_to_fp32.py cannot read it.
BF16_OPTIMIZER = "stage1-bf16optimizer"
FROZEN = {"frozen.weight", "frozen.bias"}


@pytest.fixture
def copied(zoo: Path, tmp_path: Path) -> Callable[[str], Path]:
    return copier(zoo, tmp_path)


@pytest.mark.parametrize("case", [*READABLE, BF16_OPTIMIZER])
def test_every_weight_of_the_live_engine_is_there_bit_by_bit(zoo: Path, case: str) -> None:
    truth = torch.load(zoo / case / "truth.pt")
    if case.endswith("no-frozen"):
        truth = {name: tensor for name, tensor in truth.items() if name not in FROZEN}
    weights = name_masters(read_weights(tag_of(zoo / case)))
    assert_holds(weights, truth)
    assert (weights.stage, weights.step, weights.ds_version is None) == (int(case[5]), 3, False)
    assert weights.dp_world_size == int(case.split("-")[2].removesuffix("ranks") if "ranks" in case else 2)
    assert weights.aliases == {"head.weight": "embedding.weight"}
    assert not weights.unnamed_masters


@pytest.mark.parametrize("case", ["stage1-bf16-2ranks", "stage2-fp32-3ranks", "stage3-bf16-2ranks"])
def test_roles(zoo: Path, case: str) -> None:
    tensors = read_weights(tag_of(zoo / case)).tensors
    assert {name for name, tensor in tensors.items() if tensor.role is Role.FROZEN} >= FROZEN
    assert {name for name, tensor in tensors.items() if tensor.role is Role.BUFFER} == {
        "positions",
        "average",
        "mask",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
    assert tensors["up.weight"].role is Role.TRAINED
    assert tensors["up.weight"].dtype.name == "float32"


# It reads neither stage 0 nor torch's old format.
UPSTREAM = [case for case in READABLE[2:] if "oldformat" not in case]


@pytest.mark.parametrize("case", [*UPSTREAM, "stage2-roundrobin"])
def test_upstream_agrees_where_it_can_read(zoo: Path, case: str) -> None:
    upstream = torch.load(zoo / case / "upstream.pt")
    weights = read_weights(tag_of(zoo / case))
    assert set(upstream) <= set(weights.names)
    for name, tensor in upstream.items():
        values = values_of(weights.tensors[weights.aliases.get(name, name)])
        assert torch.equal(values.to(tensor.dtype), tensor), name


def test_weights_offloaded_to_nvme_are_named(copied: Callable[[str], Path]) -> None:
    """As `_create_fp32_partitions` (runtime/zero/stage3.py) and `save_checkpoint` leave them."""
    folder = copied("stage3-subgroups")
    shard = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    state = torch.load(shard, weights_only=False)
    state["optimizer_state_dict"]["fp32_flat_groups"][1] = torch.empty(0)
    torch.save(state, shard)
    with pytest.raises(ToolkitError, match="does not hold as much"):
        read_weights(folder)
    (folder / "offloaded_tensors" / "rank01").mkdir(parents=True)
    with pytest.raises(ToolkitError, match="offloaded to NVMe, as swap files in offloaded_tensors") as caught:
        read_weights(folder)
    assert caught.value.where == str(shard)


def test_round_robin_groups_round_to_the_weights_in_use(zoo: Path) -> None:
    # DeepSpeed 0.19.8's `safe_get_full_fp32_param` gives other parameters' values here: there is no truth.
    weights = read_weights(tag_of(zoo / "stage2-roundrobin"))
    state = torch.load(weights.folder / "mp_rank_00_model_states.pt", weights_only=False)
    trained = [tensor for tensor in weights.tensors.values() if tensor.role is Role.TRAINED]
    assert len(trained) == 8
    for tensor in trained:
        assert torch.equal(values_of(tensor).bfloat16(), state["module"][tensor.name]), tensor.name


def test_names_are_in_the_order_of_the_state_dict(zoo: Path) -> None:
    for case in ("stage0-fp32-2ranks", "stage2-fp32-2ranks", "stage3-fp32-2ranks"):
        names = list(read_weights(tag_of(zoo / case)).names)
        state = torch.load(next(tag_of(zoo / case).glob("*_model_states.pt")), weights_only=False)
        assert names == list(state["module"])


def test_reading_imports_no_torch_and_no_numpy(zoo: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from ds_toolkit.checkpoint.weights import read_weights;"
        "read_weights(Path(sys.argv[1])); assert not {'torch', 'deepspeed', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tag_of(zoo / "stage3-bf16-3ranks"))],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("stage0-fp32-2ranks", "mp_rank_00_model_states.pt"),
        ("stage2-bf16-2ranks", "mp_rank_00_model_states.pt"),
        ("stage2-bf16-2ranks", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        ("stage2-bf16-3ranks", "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"),
        ("stage3-fp32-2ranks", "zero_pp_rank_1_mp_rank_00_model_states.pt"),
        ("stage3-fp32-2ranks", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ],
)
def test_a_missing_shard_is_named(copied: Callable[[str], Path], case: str, name: str) -> None:
    folder = copied(case)
    (folder / name).unlink()
    with pytest.raises(ToolkitError) as caught:
        read_weights(folder)
    if case.startswith("stage0") or name.startswith("mp_rank"):
        assert "model states" in caught.value.what or caught.value.where == str(folder / name)
    else:
        assert (caught.value.what, caught.value.where) == ("a checkpoint file is missing", str(folder / name))


def test_a_shard_left_over_from_a_larger_run_is_named(copied: Callable[[str], Path]) -> None:
    folder = copied("stage2-fp32-2ranks")
    extra = folder / "zero_pp_rank_2_mp_rank_00_optim_states.pt"
    shutil.copy(folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt", extra)
    with pytest.raises(ToolkitError, match="more shards than its world size") as caught:
        read_weights(folder)
    assert caught.value.where == str(extra)


def test_shards_of_other_world_sizes_do_not_mix(zoo: Path, copied: Callable[[str], Path]) -> None:
    folder = copied("stage2-fp32-2ranks")
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(tag_of(zoo / "stage2-fp32-3ranks") / name, folder / name)
    with pytest.raises(ToolkitError, match="do not belong together") as caught:
        read_weights(folder)
    assert caught.value.where == str(folder / name)


def test_ranks_of_one_step_but_swapped_shapes_do_not_mix(copied: Callable[[str], Path]) -> None:
    # With odd sizes the last rank's file is shorter than the others.
    folder = copied("stage2-fp32-2ranks")
    names = [folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)]
    shutil.copy(names[0], names[1])
    with pytest.raises(ToolkitError, match="does not hold as much") as caught:
        read_weights(folder)
    assert caught.value.where == str(names[1])


def test_model_states_of_another_step_are_named(copied: Callable[[str], Path]) -> None:
    folder = copied("stage3-fp32-2ranks")
    path = folder / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=False)
    torch.save({**state, "global_steps": 4}, path)
    with pytest.raises(ToolkitError, match="do not belong together") as caught:
        read_weights(folder)
    assert (caught.value.where, caught.value.why) == (str(path), "step is 4 here and 3 in the first file")


def test_a_size_that_the_manifest_does_not_know(copied: Callable[[str], Path]) -> None:
    folder = copied("stage1-fp32-2ranks")
    files = tuple(ManifestFile(path.name, path.stat().st_size, 0, 0) for path in sorted(folder.glob("*.pt")))
    Manifest("tag", 3, "periodic", RunShape(2, 2, 1, 1, "fp32"), files).write(folder)
    assert read_weights(folder).step == 3
    path = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    size_bytes = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ToolkitError, match="truncated") as caught:
        read_weights(folder)
    assert caught.value.why == f"it has {size_bytes - 100:,} bytes; its manifest says {size_bytes:,}"


# Made by hand.


def write_stage2(
    folder: Path,
    weights: dict[str, torch.Tensor],
    *,
    num_ranks: int = 2,
    paddings: tuple[int, ...] = (),
    optimizer_steps: tuple[int, ...] = (),
    **more: Any,
) -> Path:
    """One group; each parameter is followed by as many zeros as `paddings` says."""
    folder.mkdir(exist_ok=True)
    paddings = paddings or (0,) * len(weights)
    parts = [
        torch.cat([tensor.flatten(), torch.zeros(padding)])
        for tensor, padding in zip(weights.values(), paddings, strict=True)
    ]
    flat = torch.cat(parts)
    num_part = 2 * math.ceil(len(flat) / (2 * num_ranks))
    model = {
        "module": weights,
        "buffer_names": [],
        "param_shapes": [{name: tensor.shape for name, tensor in weights.items()}],
        "shared_params": {},
        "global_steps": 3,
        "dp_world_size": num_ranks,
        "mp_world_size": 1,
        **more,
    }
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    for rank in range(num_ranks):
        part = flat[rank * num_part : (rank + 1) * num_part].clone()
        step = torch.tensor(float(optimizer_steps[rank])) if optimizer_steps else 3
        state = {
            "zero_stage": 2,
            "partition_count": [num_ranks],
            "single_partition_of_fp32_groups": [part],
            "group_paddings": [num_part - len(part)],
            "param_alignment_paddings": [list(paddings)],
            "base_optimizer_state": {"state": {0: {"step": step}}},
        }
        path = folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": state}, path)
    return folder


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7, 12])
def test_ranks_may_hold_nothing_but_padding(tmp_path: Path, num_ranks: int) -> None:
    weights = {"a": torch.randn(3, 3), "scalar": torch.tensor(2.5), "b": torch.randn(2)}
    assert_holds(read_weights(write_stage2(tmp_path, weights, num_ranks=num_ranks)), weights)


def test_padding_between_parameters_is_left_out(tmp_path: Path) -> None:
    weights = {"a": torch.randn(3), "b": torch.randn(5), "c": torch.randn(2)}
    assert_holds(read_weights(write_stage2(tmp_path, weights, paddings=(1, 3, 0))), weights)


def test_optimizers_of_different_steps_do_not_mix(tmp_path: Path) -> None:
    folder = write_stage2(tmp_path, {"a": torch.randn(8)}, optimizer_steps=(3, 2))
    with pytest.raises(ToolkitError, match="do not belong together") as caught:
        read_weights(folder)
    assert caught.value.why == "optimizer step is 2.0 here and 3.0 in the first file"


def test_a_tensor_parallel_rank_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match="a checkpoint file is missing") as caught:
        read_weights(write_stage2(tmp_path, {"a": torch.randn(8)}, mp_world_size=2))
    assert caught.value.where == str(tmp_path / "mp_rank_01_model_states.pt")


def test_a_pipeline_without_layer_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match="pipeline"):
        read_weights(write_stage2(tmp_path, {"a": torch.randn(8)}, module=None))


def test_a_weight_of_an_unknown_kind_is_not_dropped(tmp_path: Path) -> None:
    weights = {"a": torch.randn(8)}
    folder = write_stage2(tmp_path, weights, module={**weights, "odd": torch.eye(3).to_sparse()})
    with pytest.raises(ToolkitError, match="under the name odd"):
        read_weights(folder)
    folder = write_stage2(tmp_path, weights, module={**weights, "layer._extra_state": {"scale": 1}})
    assert read_weights(folder).left_out == ("layer._extra_state",)


def test_frozen_parts_that_are_missing_are_named(tmp_path: Path) -> None:
    folder = write_stage2(tmp_path, {"a": torch.randn(8)}, frozen_param_shapes={"f": torch.Size([2])})
    with pytest.raises(ToolkitError, match="part of the frozen tensor f is missing"):
        read_weights(folder)


def test_a_frozen_part_that_is_too_short_is_named(tmp_path: Path) -> None:
    folder = write_stage2(
        tmp_path,
        {"a": torch.randn(8)},
        frozen_param_shapes={"f": torch.Size([3])},
        frozen_param_fragments={"f": torch.zeros(2)},
    )
    with pytest.raises(ToolkitError, match="the tensor f is not covered") as caught:
        read_weights(folder)
    assert caught.value.where == str(folder / "mp_rank_00_model_states.pt")


def write_stage0(folder: Path, module: dict[str, torch.Tensor], optimizer: dict[str, Any]) -> Path:
    state = {"module": module, "optimizer": optimizer, "global_steps": 3, "dp_world_size": 1}
    torch.save({**state, "buffer_names": [], "mp_world_size": 1}, folder / "mp_rank_00_model_states.pt")
    return folder


def test_flat_masters_of_stage_0_are_named(tmp_path: Path) -> None:
    full = {"a": torch.randn(4, 3), "b": torch.randn(5), "c": torch.randn(12)}
    module = {name: tensor.half() for name, tensor in full.items()}
    groups = [torch.cat([full["b"], full["c"]]), full["a"].flatten()]
    folder = write_stage0(tmp_path, module, {"fp32_groups_flat": groups})
    assert_holds(name_masters(read_weights(folder)), full)


def test_masters_that_round_to_the_same_are_taken_in_order(tmp_path: Path) -> None:
    full = {"a": torch.full((3,), 1.0001), "b": torch.full((3,), 0.9999), "frozen": torch.ones(3)}
    module = {name: tensor.bfloat16() for name, tensor in full.items()}
    folder = write_stage0(tmp_path, module, {"fp32_groups": [[full["a"], full["b"]]]})
    assert_holds(name_masters(read_weights(folder)), full)


def test_masters_go_on_where_the_last_one_was_found(tmp_path: Path) -> None:
    full = {"frozen": torch.ones(3), "y": torch.randn(3), "a": torch.full((3,), 1.0001)}
    module = {name: tensor.bfloat16() for name, tensor in full.items()}
    folder = write_stage0(tmp_path, module, {"fp32_groups": [[full["y"], full["a"]]]})
    assert_holds(name_masters(read_weights(folder)), full)


def test_masters_that_fit_nothing_leave_the_16_bit_weights(tmp_path: Path) -> None:
    module = {"a": torch.randn(4).bfloat16()}
    folder = write_stage0(tmp_path, module, {"fp32_groups": [[torch.randn(4)]]})
    weights = name_masters(read_weights(folder))
    assert_holds(weights, {"a": module["a"].float()})
    assert len(weights.unnamed_masters) == 1
