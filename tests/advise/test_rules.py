"""What holds for every rule that needs several rooms: its manual is its test."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ds_toolkit.advise.rules import RULES, Plan, lint_plan
from ds_toolkit.env.envfile import parse_env_text
from ds_toolkit.plan.job import Cluster, Job, Model, Precision
from ds_toolkit.plan.network import parse_network
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
        findings = lint_plan(plan_of(example), ".deepspeed_env")
        assert [finding.code for finding in findings] == [rule.code], example
        assert all(finding.fix for finding in findings)
    for example in rule.good:
        assert lint_plan(plan_of(example)) == [], example


def test_findings_say_which_file_they_are_about() -> None:
    job = plan_of(Example("{}", {"model": "1M", "nodes": "2"})).job
    variables = {"NCCL_IB_HCA": "mlx5_0"}
    (finding,) = lint_plan(Plan({"train_batch_size": 8}, job, parse_network("10GbE"), variables), "my_env")
    assert (finding.where.file, finding.where.pointer) == ("my_env", "NCCL_IB_HCA")
    config = {"train_batch_size": 8, "zero_optimization": {"stage": 1}}
    (finding,) = lint_plan(Plan(config, job))
    assert (finding.where.file, finding.where.pointer) == (None, "/zero_optimization/reduce_bucket_size")


def test_what_a_consumer_fills_in_is_not_judged() -> None:
    job = plan_of(Example("{}", {"model": "1M"})).job
    config = {"train_batch_size": 8, "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}
    assert lint_plan(Plan(config, job)) == []
