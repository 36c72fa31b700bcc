"""Predictions against what real engines hold in memory and hand to their backend to send."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jobs
import pytest

from ds_toolkit.plan.communication import step_traffic
from ds_toolkit.plan.job import Cluster, Job, Model, Precision
from ds_toolkit.plan.memory import Offload, rank_memory
from ds_toolkit.plan.zero import ZeroSettings

WORKER = Path(__file__).with_name("engine_worker.py")
# Of the worker's model, what the forward pass keeps: the inputs of 33 blocks.
ACTIVATIONS = 33 * 21
# Adam's step counters, norms and the like, which no plan counts.
FEW_BYTES = 700
# What the worker writes into its configurations.
SETTINGS = {"reduce_bucket_size": 1_000, "prefetch_bucket_size": 0, "persistence_threshold": 100}
HELD = [
    {"question": "held", "stage": stage, "precision": precision, "offload": offload, "accumulation": passes}
    for stage in range(4)
    for precision in ("fp32", "bf16")
    for offload in (False, True)
    for passes in (1, 2)
    # Below stage 1 DeepSpeed ignores the section; accumulation changes what stage 2 holds.
    if (stage > 0 or not offload) and (stage == 2 or passes == 2)
]
OVERLAPPING = [
    {
        "question": "held",
        "stage": stage,
        "precision": precision,
        "offload": False,
        "accumulation": passes,
        "overlap": overlap,
    }
    # Stage 1 reduces at another time with overlap, and where a pass is the last one.
    for stage, passes, overlap in ((1, 1, True), (1, 2, True), (2, 2, True), (1, 1, False))
    for precision in ("fp32", "bf16")
]
FUSED = {"question": "fused", "precision": "bf16", "accumulation": 1}
SENT = [
    {"question": "sent", "stage": stage, "precision": "bf16", "accumulation": passes, "reuse": reuse}
    for stage in range(4)
    for passes in (1, 3)
    for reuse in (0, 9_000, 10**9)
    if stage == 3 or reuse == 0
]
SENT += [
    {
        "question": "sent",
        "stage": stage,
        "precision": "fp32",
        "accumulation": 1,
        "reuse": 0,
        "offload": offload,
    }
    for stage in range(4)
    for offload in (False, True)
    if stage > 0 or not offload
]


def held_cases(num_ranks: int) -> list[dict[str, Any]]:
    """What overlaps does so with any other rank: two are enough."""
    return HELD + (OVERLAPPING if num_ranks == 2 else [])


def sent_cases(num_ranks: int) -> list[dict[str, Any]]:
    """Alone a rank sends nothing; of four ranks the cases that accumulate are enough."""
    return [case for case in SENT if num_ranks == 2 or (num_ranks > 2 and case["accumulation"] > 1)]


@functools.cache
def measurements(num_ranks: int) -> list[dict[str, Any]]:
    """What every rank's engine says, for every case; one launch for all."""
    cases = [*held_cases(num_ranks), *sent_cases(num_ranks), *([FUSED] if num_ranks == 1 else [])]
    command = jobs.torchrun_command(WORKER, json.dumps(cases), num_ranks=num_ranks)
    environment = {"PYTHONPATH": f"{WORKER.parents[1]}:{jobs.REPOSITORY}"}
    output = jobs.run(command, timeout_seconds=220, environment=environment).check().output
    lines = [json.loads(line[9:]) for line in output.splitlines() if line.startswith("MEASURED ")]
    assert len(lines) == num_ranks * len(cases), output[-3000:]
    return lines


def planned_job(line: dict[str, Any], num_ranks: int) -> Job:
    sizes = tuple(line["sizes"])
    # One layer of width 6 has 432 parameters, about a matrix of the worker's, and hardly any activations.
    model = Model(sum(sizes), 1, 6, 1, tensor_sizes=sizes)
    precision = Precision(line["case"]["precision"])
    return Job(model, Cluster(1, num_ranks, None, None), precision, 1, line["case"]["accumulation"], 1)


# Four ranks share what processors there are.
@pytest.mark.timeout(240)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_memory_is_what_engines_hold(num_ranks: int) -> None:
    for case in held_cases(num_ranks):
        ranks = [line for line in measurements(num_ranks) if line["case"] == case]
        job = planned_job(ranks[0], num_ranks)
        offload = Offload(optimizer=bool(case["offload"]))
        settings = ZeroSettings(**SETTINGS, overlap_comm=bool(case.get("overlap")))
        planned = rank_memory(job, int(case["stage"]), offload, settings)
        # Without a GPU device and host are one memory: their sums are compared.
        items = {
            kind: getattr(planned.device, f"{kind}_bytes") + getattr(planned.host, f"{kind}_bytes")
            for kind in ("weights", "gradients", "optimizer", "buffers")
        }
        for kind in ("weights", "gradients", "optimizer"):
            measured = max(line[kind] for line in ranks)
            assert items[kind] == pytest.approx(measured, rel=0.01), (case, kind)
        total, measured = sum(items.values()), max(line["all"] for line in ranks)
        activations_bytes = ACTIVATIONS * job.precision.num_bytes
        assert total * 0.99 <= measured <= total * 1.01 + activations_bytes, (case, items, measured)
        # Nothing outlives a backward pass or a step but what belongs to a kind.
        left_over = [size for line in ranks for size in line["unexplained"]]
        assert min(left_over) >= 0, case
        assert max(left_over) < FEW_BYTES, (case, left_over)


def test_a_fused_optimizer_holds_fp32_gradients_twice() -> None:
    (line,) = [line for line in measurements(1) if line["case"] == FUSED]
    job = replace(planned_job(line, 1), cluster=Cluster(1, 1, 10**12, None))
    planned = rank_memory(job, 0).device
    items = ("weights", "gradients", "optimizer", "buffers")
    total = sum(getattr(planned, f"{kind}_bytes") for kind in items)
    assert line["all"] == pytest.approx(total, rel=0.01)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_traffic_is_what_engines_send(num_ranks: int) -> None:
    for case in sent_cases(num_ranks):
        ranks = [line for line in measurements(num_ranks) if line["case"] == case]
        settings = ZeroSettings(**SETTINGS, max_reuse_distance=int(case["reuse"]))
        planned = step_traffic(planned_job(ranks[0], num_ranks), int(case["stage"]), settings=settings)
        for line in ranks:
            counted = {
                "all_reduce": planned.all_reduce_bytes,
                "reduce_scatter_tensor": planned.reduce_scatter_bytes,
                "all_gather_into_tensor": planned.all_gather_bytes,
            }
            for kind, predicted in counted.items():
                # Norms and overflow flags are a few bytes that no plan counts.
                assert predicted == pytest.approx(line.get(kind, 0), rel=0.01, abs=100), (case, kind)
            assert not {"reduce", "broadcast"} & line.keys(), case
