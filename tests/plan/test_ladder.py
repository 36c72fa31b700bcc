from __future__ import annotations

import pytest

from ds_toolkit.plan.job import Cluster, Job, Model, Precision
from ds_toolkit.plan.ladder import USABLE_FRACTION, choose, ladder

GB = 10**9


def seven_billion(gpu_memory_gb: int | None, host_memory_gb: int | None = 1000, gpus: int = 8) -> Job:
    device = None if gpu_memory_gb is None else gpu_memory_gb * GB
    host = None if host_memory_gb is None else host_memory_gb * GB
    return Job(Model.from_count(7 * GB), Cluster(1, gpus, device, host), Precision.BF16, 1, 1, 2048)


@pytest.mark.parametrize(
    ("gpu_memory_gb", "name"),
    [
        (80, "ZeRO 1"),
        (48, "ZeRO 2"),
        (40, "ZeRO 3"),
        (24, "ZeRO 3, optimizer on host"),
        (14, "ZeRO 3, all states on host"),
    ],
)
def test_the_least_intrusive_rung_that_fits_is_chosen(gpu_memory_gb: int, name: str) -> None:
    chosen = choose(ladder(seven_billion(gpu_memory_gb)))
    assert chosen is not None
    assert chosen.name == name
    assert chosen.device_bytes is not None
    assert chosen.device_bytes <= gpu_memory_gb * GB * USABLE_FRACTION


def test_a_stage_that_was_asked_for_is_kept() -> None:
    rungs = ladder(seven_billion(80))
    for stage, name in ((1, "ZeRO 1"), (2, "ZeRO 2"), (3, "ZeRO 3")):
        chosen = choose(rungs, stage)
        assert chosen is not None
        assert chosen.name == name
    assert choose(rungs, 0) is None
    only_with_offload = choose(ladder(seven_billion(30)), 2)
    assert only_with_offload is not None
    assert only_with_offload.offload.optimizer


def test_what_lacks_is_said_of_the_gpu_and_of_the_host() -> None:
    rungs = {rung.name: rung for rung in ladder(seven_billion(8, host_memory_gb=100))}
    assert rungs["ZeRO 1"].why.endswith("a GPU too much")
    both = rungs["ZeRO 3, all states on host"].why
    assert "a GPU too much" in both
    assert "a host too much" in both
    assert choose(list(rungs.values())) is None


def test_the_host_holds_the_offloaded_shares_of_all_its_ranks() -> None:
    rung = ladder(seven_billion(24))[5]
    assert rung.host_bytes == pytest.approx(7 * GB * 16, rel=0.001)


def test_nothing_is_offloaded_to_a_host_of_unknown_memory() -> None:
    rungs = ladder(seven_billion(24, host_memory_gb=None))
    assert not any(rung.fits for rung in rungs if rung.offload.optimizer)
    assert "not known" in rungs[-1].why


def test_on_a_cpu_all_ranks_share_the_host_and_nothing_is_offloaded() -> None:
    rungs = ladder(seven_billion(None, host_memory_gb=300, gpus=2))
    assert [rung.name for rung in rungs] == ["ZeRO 0", "ZeRO 1", "ZeRO 2", "ZeRO 3"]
    assert all(rung.device_bytes is None for rung in rungs)
    assert all(rung.host_bytes == 2 * rung.memory.device_bytes for rung in rungs)
