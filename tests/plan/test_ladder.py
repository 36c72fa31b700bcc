from __future__ import annotations

from dataclasses import replace

import pytest

from ds_toolkit.plan.job import Cluster, Job, Model, Precision
from ds_toolkit.plan.ladder import USABLE_FRACTION, choose, ladder
from ds_toolkit.plan.network import parse_network

GB = 10**9


def seven_billion(gpu_memory_gb: int | None, host_memory_gb: int | None = 1000, gpus: int = 8) -> Job:
    device = None if gpu_memory_gb is None else gpu_memory_gb * GB
    host = None if host_memory_gb is None else host_memory_gb * GB
    return Job(Model.from_count(7 * GB), Cluster(1, gpus, device, host), Precision.BF16, 1, 1, 2048)


@pytest.mark.parametrize(
    ("gpu_memory_gb", "name"),
    [
        (80, "ZeRO 1, micro batch 1 x 1"),
        (48, "ZeRO 1, micro batch 1 x 1"),
        (40, "ZeRO 3, micro batch 1 x 1"),
        (24, "ZeRO 3, activations recomputed, micro batch 1 x 1"),
        (16, "ZeRO 3, optimizer on host, activations recomputed, micro batch 1 x 1"),
        (6, "ZeRO 3, all states on host, activations recomputed, micro batch 1 x 1"),
    ],
)
def test_the_least_intrusive_rung_that_fits_is_chosen(gpu_memory_gb: int, name: str) -> None:
    chosen = choose(ladder(seven_billion(gpu_memory_gb)))
    assert chosen is not None
    assert chosen.name == name
    assert chosen.device_bytes is not None
    assert chosen.device_bytes <= gpu_memory_gb * GB * USABLE_FRACTION


def test_stage_2_is_taken_where_stage_1_accumulates_all_gradients() -> None:
    chosen = choose(ladder(replace(seven_billion(46), accumulation_steps=2)))
    assert chosen is not None
    assert chosen.name == "ZeRO 2, micro batch 1 x 2"


def test_a_stage_that_was_asked_for_is_kept() -> None:
    for stage in (1, 2, 3):
        chosen = choose(ladder(seven_billion(80), stage=stage), stage)
        assert chosen is not None
        assert (chosen.stage, chosen.offload.optimizer) == (stage, False)
    assert choose(ladder(seven_billion(80), stage=0), 0) is None
    for stage in (1, 2):
        rungs = ladder(seven_billion(30), stage=stage)
        offloading = choose(rungs, stage)
        assert offloading is not None
        assert offloading.offload.optimizer
        assert {rung.stage for rung in rungs[4:]} == {stage}


def test_a_smaller_micro_batch_keeps_the_global_batch() -> None:
    job = replace(seven_billion(48), micro_batch_size=12)
    rungs = ladder(job)
    smaller = rungs[4]
    assert smaller.job.micro_batch_size < 12
    assert not smaller.job.recompute_activations
    assert {rung.job.global_batch_size for rung in rungs} == {job.global_batch_size}
    # The largest one that fits: the next larger divisor does not.
    recomputing = rungs[5]
    assert recomputing.fits
    assert recomputing.job.micro_batch_size == 12


def test_the_micro_batch_falls_until_it_fits_or_is_one() -> None:
    rungs = ladder(replace(seven_billion(32), micro_batch_size=8))
    fitting = rungs[5]
    assert fitting.job.recompute_activations
    assert 1 <= fitting.job.micro_batch_size <= 8
    hopeless = ladder(replace(seven_billion(2), micro_batch_size=9))
    assert {rung.job.micro_batch_size for rung in hopeless[4:]} == {1}
    assert {rung.job.accumulation_steps for rung in hopeless[4:]} == {9}


def test_what_lacks_is_said_of_the_gpu_and_of_the_host() -> None:
    rungs = ladder(seven_billion(4, host_memory_gb=50))
    assert rungs[1].why.endswith("a GPU too much")
    assert "a GPU too much" in rungs[-2].why
    assert "a host too much" in rungs[-2].why
    assert choose(rungs) is None


def test_nvme_takes_what_the_host_cannot() -> None:
    job = seven_billion(6, host_memory_gb=150)
    rungs = ladder(job, nvme=True)
    chosen = choose(rungs)
    assert chosen is rungs[-1]
    assert chosen.offload.nvme
    assert chosen.nvme_bytes > 7 * GB * 12
    assert choose(ladder(job)) is None


def test_the_host_holds_the_offloaded_shares_of_all_its_ranks() -> None:
    rung = ladder(seven_billion(24))[-2]
    # fp32 weights, moments and gradients, and gradients in 16 bits.
    assert rung.host_bytes == pytest.approx(7 * GB * 18, rel=0.001)


def test_nothing_is_offloaded_to_a_host_of_unknown_memory() -> None:
    rungs = ladder(seven_billion(24, host_memory_gb=None))
    assert not any(rung.fits for rung in rungs if rung.offload.optimizer)
    assert "not known" in rungs[-1].why


def test_on_a_cpu_all_ranks_share_the_host_and_nothing_is_offloaded() -> None:
    rungs = ladder(seven_billion(None, host_memory_gb=300, gpus=2))
    assert [rung.stage for rung in rungs] == [0, 1, 2, 3, 3]
    assert not any(rung.offload.optimizer for rung in rungs)
    assert all(rung.device_bytes is None for rung in rungs)
    assert all(rung.host_bytes == 2 * rung.memory.device.total_bytes for rung in rungs)


def test_each_rung_says_what_its_communication_takes() -> None:
    rungs = ladder(seven_billion(80), parse_network("100GbE"))
    times = [rung.communication_seconds for rung in rungs]
    assert all(time is not None and time > 0 for time in times)
    # Two model sizes at stage 0, three at stages 1 and 2, and at the most three at stage 3.
    assert times[1] == times[2] == pytest.approx(1.5 * (times[0] or 0))
    assert (times[3] or 0) <= (times[2] or 0)
    assert (times[-1] or 0) > (times[3] or 0)
    assert ladder(seven_billion(80))[0].communication_seconds is None
