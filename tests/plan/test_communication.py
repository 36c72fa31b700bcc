from __future__ import annotations

from dataclasses import replace

import pytest

from ds_toolkit.errors import ToolkitError
from ds_toolkit.plan.communication import (
    Traffic,
    break_even_bytes_per_second,
    compute_seconds,
    step_seconds,
    step_traffic,
)
from ds_toolkit.plan.job import Cluster, Job, Model, Precision
from ds_toolkit.plan.memory import Offload
from ds_toolkit.plan.network import ACHIEVED_SHARE, Network, parse_network
from ds_toolkit.plan.zero import ZeroSettings

SIZE = 2 * 10**10
JOB = Job(Model(10**10, 40, 4096, 32_000), Cluster(2, 8, 8 * 10**10, 10**12), Precision.BF16, 1, 1, 2048)
NO_REUSE = ZeroSettings(max_reuse_distance=0)


@pytest.mark.parametrize(
    ("stage", "reduced", "scattered", "gathered"), [(0, 1, 0, 0), (1, 1, 0, 1), (2, 1, 0, 1), (3, 0, 1, 2)]
)
def test_messages_are_model_sizes(stage: int, reduced: int, scattered: int, gathered: int) -> None:
    traffic = step_traffic(JOB, stage, settings=NO_REUSE)
    assert traffic.all_reduce_bytes == reduced * SIZE
    assert traffic.reduce_scatter_bytes == scattered * SIZE
    assert traffic.all_gather_bytes == gathered * SIZE


def test_plain_data_parallelism_and_stage_3_send_what_the_zero_paper_counts() -> None:
    ring = 15 / 16
    assert step_traffic(JOB, 0).sent_bytes == 2 * SIZE * ring
    assert step_traffic(JOB, 3, settings=NO_REUSE).sent_bytes == 3 * SIZE * ring
    assert step_traffic(JOB, 2).sent_bytes == 3 * SIZE * ring
    alone = replace(JOB, cluster=Cluster(1, 1, 10**12, None))
    assert all(step_traffic(alone, stage).sent_bytes == 0 for stage in range(4))


def test_what_is_kept_for_the_backward_pass_is_not_gathered_again() -> None:
    gathered = [
        step_traffic(JOB, 3, settings=ZeroSettings(max_reuse_distance=distance)).all_gather_bytes
        for distance in (0, 10**9, 2 * 10**10, 10**12)
    ]
    assert gathered == [2 * SIZE, 2 * SIZE - 10**9, SIZE, SIZE]


def test_accumulation_repeats_what_stages_2_and_3_send() -> None:
    four = replace(JOB, accumulation_steps=4)
    for stage, times in ((0, 1), (1, 1), (2, 4)):
        assert step_traffic(four, stage).all_reduce_bytes == times * SIZE
    assert step_traffic(four, 2).all_gather_bytes == SIZE
    assert step_traffic(four, 3, settings=NO_REUSE).all_gather_bytes == 8 * SIZE


def test_offloading_crosses_the_bus() -> None:
    plain = step_traffic(JOB, 3)
    optimizer = step_traffic(JOB, 3, Offload(optimizer=True))
    everything = step_traffic(JOB, 3, Offload(optimizer=True, parameters=True))
    nvme = step_traffic(JOB, 3, Offload(optimizer=True, parameters=True, nvme=True))
    assert (plain.host_bytes, optimizer.host_bytes, everything.host_bytes) == (0, SIZE // 8, SIZE // 4)
    assert optimizer.nvme_bytes == 0
    assert nvme.nvme_bytes == everything.host_bytes + 24 * 10**10 // 16
    network = parse_network("NVLink4")
    times = [step_seconds(traffic, network, 8) for traffic in (plain, optimizer, everything, nvme)]
    assert times == sorted(times)
    assert len(set(times)) == 4


def test_seconds_are_bytes_over_what_a_network_achieves() -> None:
    traffic = Traffic(10**9, 0, 0, num_ranks=2)
    assert step_seconds(traffic, Network("x", 10**9), 1) == pytest.approx(1 / ACHIEVED_SHARE)


def test_compute_is_six_operations_a_parameter_and_token() -> None:
    # 10^10 parameters, 2048 tokens: 1.2e14 operations, at 40 % of 312 teraflops.
    assert compute_seconds(JOB, 312e12) == pytest.approx(6e10 * 2048 / (312e12 * 0.4))
    recomputing = replace(JOB, recompute_activations=True)
    assert compute_seconds(recomputing, 312e12) == pytest.approx(compute_seconds(JOB, 312e12) * 8 / 6)
    with pytest.raises(ToolkitError, match="speed of a GPU"):
        compute_seconds(JOB, 0)


def test_at_the_break_even_rate_both_take_equally_long() -> None:
    traffic = step_traffic(JOB, 3)
    seconds = compute_seconds(JOB, 312e12)
    rate = break_even_bytes_per_second(traffic, seconds)
    assert step_seconds(traffic, Network("x", rate / ACHIEVED_SHARE), 8) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "gigabytes"),
    [
        ("10GbE", 1.25),
        ("100gbe", 12.5),
        ("400Gb-IB", 50),
        ("8x400Gb-IB", 400),
        ("200Gb-RoCE", 25),
        ("2.5GbE", 0.3125),
        ("NVLink4", 450),
        ("nvlink 3", 300),
        ("PCIe4", 31.5),
        ("PCIe Gen5", 63),
        ("PCIe 4.0", 31.5),
    ],
)
def test_networks_by_name(text: str, gigabytes: float) -> None:
    assert parse_network(text).bytes_per_second == pytest.approx(gigabytes * 1e9)


@pytest.mark.parametrize("text", ["", "fast", "10", "-10GbE", "0GbE", "0x100GbE", "nanGbE", "NVLink9"])
def test_what_is_no_network_is_refused(text: str) -> None:
    with pytest.raises(ToolkitError, match="is not a network"):
        parse_network(text)
