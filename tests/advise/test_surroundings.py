"""A person's own files, held against the model and the machine that were named beside them."""

from __future__ import annotations

from typing import Any

import pytest

from ds_toolkit.advise.rules import lint_plan
from ds_toolkit.advise.surroundings import Surroundings
from ds_toolkit.errors import ToolkitError
from ds_toolkit.plan.job import Model, Precision
from ds_toolkit.plan.network import parse_network

GB = 10**9
SEVEN = Model.from_count(7 * 10**9)


def codes(config: dict[str, Any], **known: Any) -> list[str]:
    return [finding.code for finding in lint_plan(Surroundings(**known).around_config(config))]


@pytest.mark.parametrize(
    ("config", "micro_batch_size", "accumulation_steps"),
    [
        ({"train_batch_size": 64}, 8, 1),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 2}, 4, 2),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, 2, 4),
        ({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5}, 3, 5),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}, 1, 1),
        ({"train_batch_size": 4}, 1, 1),
        ({"train_batch_size": -8, "gradient_accumulation_steps": 0}, 1, 1),
    ],
)
def test_the_job_is_fed_as_deepspeed_works_it_out(
    config: dict[str, Any], micro_batch_size: int, accumulation_steps: int
) -> None:
    job = Surroundings(model=SEVEN, num_nodes=1, gpus_per_node=8).around_config(config).job
    assert job is not None
    assert (job.micro_batch_size, job.accumulation_steps) == (micro_batch_size, accumulation_steps)


@pytest.mark.parametrize(
    ("config", "precision"),
    [({}, "fp32"), ({"bf16": {"enabled": True}}, "bf16"), ({"fp16": {"enabled": "true"}}, "fp16")],
)
def test_the_number_format_is_the_configurations(config: dict[str, Any], precision: str) -> None:
    job = Surroundings(model=SEVEN).around_config(config).job
    assert job is not None
    assert job.precision is Precision(precision)


def test_what_is_known_decides_what_is_judged() -> None:
    stage_3 = {"train_batch_size": 16, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    slow = parse_network("10GbE")
    assert codes(stage_3, model=SEVEN, num_nodes=2, gpus_per_node=8, gpu_memory_bytes=80 * GB) == []
    assert codes(stage_3, num_nodes=2, gpus_per_node=8, network=slow) == []
    known = {"model": SEVEN, "num_nodes": 2, "gpus_per_node": 8, "gpu_memory_bytes": 80 * GB}
    assert codes(stage_3, **known, network=slow) == ["DS552"]
    assert codes(stage_3, **{**known, "num_nodes": 1}, network=slow) == []
    assert codes(stage_3, **{**known, "gpu_memory_bytes": 8 * GB}) == ["DS557"]
    small = {"train_batch_size": 16, "zero_optimization": {"stage": 2}}
    assert codes(small, model=Model.from_count(10**6)) == ["DS551"]
    hpz = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 16}}
    assert codes(hpz, num_nodes=2, gpus_per_node=8) == ["DS559"]
    assert codes(hpz, world_size=32, num_nodes=2) == []


def test_models_that_are_cut_by_tensor_parallelism_are_not_judged_whole() -> None:
    config = {"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 8}}
    known = {"model": SEVEN, "gpus_per_node": 8, "gpu_memory_bytes": 16 * GB}
    assert codes(config, **known) == []
    assert codes({"zero_optimization": {"stage": 1}}, **known) == ["DS557"]


@pytest.mark.parametrize(
    ("known", "num_ranks"),
    [
        ({}, None),
        ({"num_nodes": 4}, None),
        ({"gpus_per_node": 8}, 8),
        ({"num_nodes": 2, "gpus_per_node": 8}, 16),
        ({"world_size": 12}, 12),
        ({"world_size": 12, "num_nodes": 3}, 12),
    ],
)
def test_how_many_ranks_there_are(known: dict[str, int], num_ranks: int | None) -> None:
    surroundings = Surroundings(**known)  # type: ignore[arg-type]
    assert surroundings.num_ranks == num_ranks
    assert (surroundings.cluster.world_size if surroundings.cluster else None) == num_ranks


@pytest.mark.parametrize(
    ("known", "says"),
    [
        ({"world_size": 7, "num_nodes": 2}, "7 ranks do not fill 2 hosts"),
        ({"world_size": 7, "gpus_per_node": 8}, "7 ranks do not fill hosts of 8 GPUs"),
        ({"world_size": 8, "num_nodes": 2, "gpus_per_node": 8}, "8 ranks do not fill 2 hosts of 8 GPUs"),
        ({"gpu_memory_bytes": 80 * GB, "gpus_per_node": 8}, "the model is not known"),
        ({"gpu_memory_bytes": 80 * GB, "model": SEVEN}, "the number of GPUs is not known"),
        ({"network": parse_network("10GbE"), "model": SEVEN}, "the number of hosts is not known"),
        (
            {"network": parse_network("10GbE"), "model": SEVEN, "num_nodes": 2, "gpus_per_node": 8},
            "the memory of a GPU is not known",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(known: dict[str, Any], says: str) -> None:
    with pytest.raises(ToolkitError, match=says):
        Surroundings(**known)


def test_variables_are_held_against_network_and_gpus() -> None:
    known = Surroundings(network=parse_network("10GbE"))
    (finding,) = lint_plan(known.around_variables({"NCCL_IB_HCA": "mlx5_0"}))
    assert finding.code == "DS556"
    assert lint_plan(Surroundings().around_variables({"NCCL_IB_HCA": "mlx5_0"})) == []
    variables = {"NCCL_P2P_DISABLE": "1"}
    (finding,) = lint_plan(Surroundings().around_variables(variables, ("NVIDIA H200",)))
    assert finding.code == "DS554"
    assert lint_plan(Surroundings().around_variables(variables, ("NVIDIA L40S",))) == []
