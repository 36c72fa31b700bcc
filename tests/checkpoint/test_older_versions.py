"""Checkpoints in the forms of older versions of DeepSpeed, written by hand as those versions wrote them.

Forms: DeepSpeed 0.4, runtime/engine.py, runtime/zero/stage1.py and stage2.py.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_toolkit.checkpoint.weights import read_weights
from ds_toolkit.convert.consolidate import consolidate
from ds_toolkit.errors import ToolkitError

FIRST = {"a.weight": (3, 4), "b.weight": (5, 2)}
SECOND = {"a.bias": (3,), "b.bias": (4,)}


def trained(*groups: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {name: torch.randn(shape) for group in groups for name, shape in group.items()}


def flat(weights: dict[str, torch.Tensor], group: dict[str, tuple[int, ...]], multiple: int) -> torch.Tensor:
    joined = torch.cat([weights[name].flatten() for name in group])
    return torch.nn.functional.pad(joined, (0, -joined.numel() % multiple), value=99.0)


def write(
    folder: Path,
    weights: dict[str, torch.Tensor],
    optimizer_states: Sequence[dict[str, Any]],
    shapes: Any,
    *,
    underscore: str = "",
    model: dict[str, Any] | None = None,
    more_module: dict[str, torch.Tensor] | None = None,
) -> Path:
    """Model states of 0.4, and one optimizer file a rank."""
    folder.mkdir(exist_ok=True)
    module = OrderedDict((name, value.half()) for name, value in weights.items())
    states = {
        "module": OrderedDict({**module, **(more_module or {})}),
        "optimizer": None,
        "csr_tensor_module_names": set(),
        "skipped_steps": 0,
        "global_steps": 3,
        "dp_world_size": len(optimizer_states),
        "mp_world_size": 1,
        **(model or {}),
    }
    states = {key: value for key, value in states.items() if value != "absent"}
    torch.save(states, folder / "mp_rank_00_model_states.pt")
    for rank, state in enumerate(optimizer_states):
        saved = {"optimizer_state_dict": state}
        if shapes is not None:
            saved["param_shapes"] = OrderedDict((name, torch.Size(shape)) for name, shape in shapes.items())
        torch.save(saved, folder / f"zero_pp_rank_{rank}_mp_rank_00{underscore}optim_states.pt")
    return folder


def lean(parts: Sequence[torch.Tensor], num_elements: int) -> list[torch.Tensor]:
    """Parts end to end without the padding behind so many elements."""
    left = num_elements
    cut = []
    for part in parts:
        cut.append(part[: max(left, 0)].clone())
        left -= part.numel()
    return cut


def stage_2(
    weights: dict[str, torch.Tensor], groups: Sequence[dict[str, Any]], num_ranks: int, *, padded: bool
) -> list[dict[str, Any]]:
    """What stage 2 wrote before it said what it had cut off."""
    parts = [flat(weights, group, num_ranks).chunk(num_ranks) for group in groups]
    if not padded:
        parts = [
            lean(of, sum(map(math.prod, group.values()))) for of, group in zip(parts, groups, strict=True)
        ]
    return [
        {
            "zero_stage": 2,
            "partition_count": num_ranks,
            "base_optimizer_state": [],
            "single_partition_of_fp32_groups": [of_group[rank].clone() for of_group in parts],
        }
        for rank in range(num_ranks)
    ]


def stage_1(
    weights: dict[str, torch.Tensor],
    groups: Sequence[dict[str, Any]],
    num_ranks: int,
    *,
    padded: bool,
    num_turns: int = 2,
) -> list[dict[str, Any]]:
    """Sub-partitions in turns; `padded` is what the setting `elastic_checkpoint` false left out and in."""
    by_rank: list[list[list[torch.Tensor]]] = [[] for _ in range(num_ranks)]
    for group in groups:
        vector = flat(weights, group, num_ranks * num_turns)
        parts = list(vector.chunk(num_ranks * num_turns))
        if not padded:
            parts = lean(parts, sum(map(math.prod, group.values())))
        for rank in range(num_ranks):
            by_rank[rank].append([part.clone() for part in parts[rank::num_ranks]])
    elastic = {"zero_stage": 1, "partition_count": num_ranks, "num_comm_intervals_per_group": [num_turns]}
    return [
        {
            "base_optimizer_state": [],
            "local_sub_partitions_of_fp32_groups": by_rank[rank],
            **({} if padded else elastic),
        }
        for rank in range(num_ranks)
    ]


def assert_holds(folder: Path, out: Path, truth: dict[str, torch.Tensor], **more: torch.Tensor) -> None:
    consolidate(folder, out)
    found = torch.load(out, weights_only=True)
    assert set(found) == set(truth) | set(more)
    for name, expected in {**truth, **more}.items():
        assert torch.equal(found[name], expected), name


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("form", [stage_1, stage_2])
def test_one_group_in_the_optimizer_s_file(tmp_path: Path, form: Any, padded: bool, num_ranks: int) -> None:
    weights = trained(FIRST)
    folder = write(tmp_path / "tag", weights, form(weights, [FIRST], num_ranks, padded=padded), FIRST)
    assert_holds(folder, tmp_path / "model.bin", weights)
    assert read_weights(folder).stage == (1 if form is stage_1 else 2)


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
@pytest.mark.parametrize("form", [stage_1, stage_2])
def test_groups_that_are_one_list_end_where_their_weights_end(
    tmp_path: Path, form: Any, num_ranks: int
) -> None:
    weights = trained(FIRST, SECOND)
    states = form(weights, [FIRST, SECOND], num_ranks, padded=False)
    folder = write(tmp_path / "tag", weights, states, {**FIRST, **SECOND})
    assert_holds(folder, tmp_path / "model.bin", weights)


@pytest.mark.parametrize("form", [stage_1, stage_2])
def test_groups_that_are_one_list_and_padded_are_refused(tmp_path: Path, form: Any) -> None:
    weights = trained(FIRST, SECOND)
    states = form(weights, [FIRST, SECOND], 5, padded=True)
    folder = write(tmp_path / "tag", weights, states, {**FIRST, **SECOND})
    with pytest.raises(ToolkitError, match="which parameters the fp32 weights belong to") as caught:
        read_weights(folder)
    assert "no group of weights ends where" in str(caught.value.why)


def test_without_a_list_of_parameters_nothing_is_guessed(tmp_path: Path) -> None:
    weights = trained(FIRST)
    folder = write(tmp_path / "tag", weights, stage_2(weights, [FIRST], 2, padded=False), None)
    with pytest.raises(ToolkitError, match="which parameters the fp32 weights belong to"):
        read_weights(folder)


@pytest.mark.parametrize("missing", ["dp_world_size", "mp_world_size", "buffer_names"])
def test_what_may_be_missing(tmp_path: Path, missing: str) -> None:
    weights = trained(FIRST)
    model = {"buffer_names": ["mask"], missing: "absent"}
    folder = write(
        tmp_path / "tag",
        weights,
        stage_2(weights, [FIRST], 3, padded=False),
        FIRST,
        underscore="_",
        model=model,
        more_module={"mask": torch.tensor([True, False])},
    )
    assert_holds(folder, tmp_path / "model.bin", weights, mask=torch.tensor([True, False]))
    assert read_weights(folder).dp_world_size == 3


def test_a_rank_too_few_is_noticed_without_a_world_size(tmp_path: Path) -> None:
    weights = trained(FIRST)
    for padded in (True, False):
        states = stage_1(weights, [FIRST], 3, padded=padded)[:2]
        folder = write(tmp_path / "tag", weights, states, FIRST, model={"dp_world_size": "absent"})
        with pytest.raises(ToolkitError):
            read_weights(folder)


def test_tied_weights_that_nothing_lists_are_known_by_their_place(tmp_path: Path) -> None:
    weights = trained(FIRST)
    folder = write(tmp_path / "tag", weights, stage_2(weights, [FIRST], 2, padded=False), FIRST)
    states = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)
    states["module"]["head.weight"] = states["module"]["a.weight"]
    torch.save(states, folder / "mp_rank_00_model_states.pt")
    assert read_weights(folder).aliases == {"head.weight": "a.weight"}
    assert_holds(folder, tmp_path / "model.bin", weights, **{"head.weight": weights["a.weight"]})


@pytest.mark.parametrize("stage", [1, 2])
def test_a_sub_partition_that_is_too_short_is_named(tmp_path: Path, stage: int) -> None:
    weights = trained(FIRST)
    form = stage_1 if stage == 1 else stage_2
    states = form(weights, [FIRST], 2, padded=False)
    folder = write(tmp_path / "tag", weights, states, FIRST)
    state = torch.load(folder / "zero_pp_rank_1_mp_rank_00optim_states.pt", weights_only=False)
    key = "local_sub_partitions_of_fp32_groups" if stage == 1 else "single_partition_of_fp32_groups"
    groups = state["optimizer_state_dict"][key]
    if stage == 1:
        groups[0][0] = groups[0][0][:-1].clone()
    else:
        groups[0] = groups[0][:-1].clone()
    torch.save(state, folder / "zero_pp_rank_1_mp_rank_00optim_states.pt")
    with pytest.raises(ToolkitError, match="does not hold as much") as caught:
        read_weights(folder)
    assert caught.value.where == str(folder / "zero_pp_rank_1_mp_rank_00optim_states.pt")


def test_stage_3_with_one_list_of_parameters(tmp_path: Path) -> None:
    """The list of version 0.4, and no number of ranks; stage 3 cuts each parameter by itself."""
    weights = trained(FIRST, SECOND)
    folder = tmp_path / "tag"
    folder.mkdir()
    shapes = OrderedDict((name, torch.Size(shape)) for name, shape in {**FIRST, **SECOND}.items())
    for rank in range(2):
        model = {
            "module": OrderedDict((name, torch.empty(0).half()) for name in weights),
            "buffer_names": [],
            "global_steps": 3,
        }
        torch.save(model, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        parts = []
        for value in weights.values():
            size = -(-value.numel() // 2)
            padded = torch.nn.functional.pad(value.flatten(), (0, 2 * size - value.numel()))
            parts.append(padded[rank * size : (rank + 1) * size])
        state = {"zero_stage": 3, "partition_count": 2, "fp32_flat_groups": [torch.cat(parts)]}
        saved = {"optimizer_state_dict": {**state, "optimizer_state_dict": {}}, "param_shapes": shapes}
        torch.save(saved, folder / f"zero_pp_rank_{rank}_mp_rank_00optim_states.pt")
    assert_holds(folder, tmp_path / "model.bin", weights)
