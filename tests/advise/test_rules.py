"""What holds for every rule that needs several rooms: its manual is its test."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from ds_toolkit.advise.rules import RULES, lint_plan
from ds_toolkit.advise.subject import Plan
from ds_toolkit.env.envfile import parse_env_text
from ds_toolkit.findings import Where
from ds_toolkit.plan.communication import compute_seconds, step_seconds, step_traffic
from ds_toolkit.plan.job import Cluster, Job, Model, Precision
from ds_toolkit.plan.network import Network, parse_network
from ds_toolkit.rules import Example
from ds_toolkit.units import parse_count

GB = 10**9


def plan_of(example: Example) -> Plan:
    """Eight GPUs of 80 GB a host; the context says what else there is."""
    context = example.context
    cluster = Cluster(int(context.get("nodes", 1)), 8, 80 * GB, 2000 * GB)
    model = Model.from_count(parse_count(context["model"]))
    job = Job(model, cluster, Precision.BF16, 4, 1, 1024)
    is_config = example.text.startswith("{")
    return Plan(
        config=json.loads(example.text) if is_config else {"train_batch_size": 8},
        job=job if is_config else replace(job, model=Model.from_count(10**8)),
        network=parse_network(context["network"]) if "network" in context else None,
        variables={} if is_config else parse_env_text(example.text).variables,
        gpu_names=(context["gpu"],) if "gpu" in context else (),
    )


@pytest.mark.parametrize("rule", list(RULES), ids=lambda rule: rule.code)
def test_examples_hold(rule: Any) -> None:
    assert rule.code.startswith("DS55")
    assert rule.bad
    assert rule.good
    for example in rule.bad:
        findings = lint_plan(plan_of(example))
        assert [finding.code for finding in findings] == [rule.code], example
        assert all(finding.fix for finding in findings)
    for example in rule.good:
        assert lint_plan(plan_of(example)) == [], example


def test_findings_say_where_they_are() -> None:
    job = plan_of(Example("{}", {"model": "1M", "nodes": "2"})).job
    variables = {"NCCL_IB_HCA": "mlx5_0"}
    plan = Plan({"train_batch_size": 8}, job, parse_network("10GbE"), variables)
    (finding,) = lint_plan(plan, lambda name: Where("my_env", name, 3, 1))
    assert finding.where == Where("my_env", "NCCL_IB_HCA", 3, 1)
    config = {"train_batch_size": 8, "zero_optimization": {"stage": 1}}
    (finding,) = lint_plan(Plan(config, job))
    assert (finding.where.file, finding.where.pointer) == (None, "/zero_optimization/reduce_bucket_size")


def test_what_a_consumer_fills_in_is_not_judged() -> None:
    job = plan_of(Example("{}", {"model": "1M"})).job
    config = {"train_batch_size": 8, "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}
    assert lint_plan(Plan(config, job)) == []


def codes(zero: dict[str, object], model: str = "7B", nodes: str = "1", **arguments: Any) -> set[str]:
    job = plan_of(Example("{}", {"model": model, "nodes": nodes})).job
    plan = Plan({"train_batch_size": 8, "zero_optimization": zero}, job, **arguments)
    return {finding.code for finding in lint_plan(plan)}


@pytest.mark.parametrize("size", [math.nan, math.inf, -math.inf])
def test_sizes_that_are_no_numbers_are_the_linters_to_refuse(size: float) -> None:
    assert codes({"stage": 2, "reduce_bucket_size": size}) == codes({"stage": 2})


@pytest.mark.parametrize("device", [["cpu"], {"cpu": 1}, 7, None])
def test_a_device_that_is_no_name_is_the_linters_to_refuse(device: object) -> None:
    assert codes({"stage": 2, "offload_optimizer": {"device": device}}) == codes({"stage": 2})


@pytest.mark.parametrize(
    ("name", "linked"),
    [
        ("NVIDIA A100-SXM4-80GB", True),
        ("NVIDIA H100 80GB HBM3", True),
        ("NVIDIA H100 NVL", True),
        ("NVIDIA H200", True),
        ("NVIDIA H20", True),
        ("NVIDIA B200", True),
        ("NVIDIA GB200", True),
        ("NVIDIA H100 PCIe", False),
        ("NVIDIA A100-PCIE-40GB", False),
        ("NVIDIA RTX PRO 6000 Blackwell", False),
        ("NVIDIA GeForce RTX 4090", False),
        ("NVIDIA L40S", False),
    ],
)
@pytest.mark.parametrize(
    "variables", [{"NCCL_P2P_DISABLE": "1"}, {"NCCL_P2P_LEVEL": "LOC"}, {"NCCL_P2P_LEVEL": "0"}]
)
def test_boards_with_nvlink_by_the_name_that_the_driver_gives(
    name: str, linked: bool, variables: dict[str, str]
) -> None:
    assert ("DS554" in codes({"stage": 1}, gpu_names=(name,), variables=variables)) is linked
    assert "DS554" not in codes({"stage": 1}, gpu_names=(name,), variables={"NCCL_P2P_LEVEL": "NVL"})


def test_a_secondary_partition_relieves_the_network() -> None:
    job = plan_of(Example("{}", {"model": "7B", "nodes": "2"})).job
    model = Model(7 * GB, 32, 4096, 32_000)
    job = replace(job, model=model)
    traffic = step_traffic(job, 3, settings=Plan({"zero_optimization": {"stage": 3}}, job).settings)
    computing = compute_seconds(job, 312e12)
    # A network that carries three model sizes a little too slowly carries two of them in time.
    needed = step_seconds(traffic, Network("one", 1e9), 1) / computing
    network = Network("just too slow", 1e9 * needed * 0.9)
    plain = {"stage": 3}
    assert "DS552" in {f.code for f in lint_plan(Plan({"zero_optimization": plain}, job, network))}
    secondary = {"stage": 3, "zero_hpz_partition_size": 8}
    assert "DS552" not in {f.code for f in lint_plan(Plan({"zero_optimization": secondary}, job, network))}
    slow = lint_plan(Plan({"zero_optimization": secondary}, job, parse_network("1GbE")))
    (finding,) = [finding for finding in slow if finding.code == "DS552"]
    assert "zero_hpz" not in str(finding.fix)


def test_the_old_spelling_of_offloading_counts() -> None:
    old, new = {"cpu_offload": True}, {"offload_optimizer": {"device": "cpu"}}
    assert "DS557" in codes({"stage": 2}, model="30B")
    for spelling in (old, new):
        assert "DS557" not in codes({"stage": 2, **spelling}, model="30B")
    job = plan_of(Example("{}", {"model": "1B"})).job
    for spelling, pointer in ((old, "cpu_offload"), (new, "offload_optimizer")):
        config = {"train_batch_size": 8, "zero_optimization": {"stage": 2, **spelling}}
        (finding,) = lint_plan(Plan(config, job))
        assert (finding.code, finding.where.pointer) == ("DS558", f"/zero_optimization/{pointer}")
