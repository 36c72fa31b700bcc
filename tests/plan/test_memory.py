from __future__ import annotations

from dataclasses import replace

import pytest

from ds_toolkit.plan.job import Cluster, Job, Model, Precision
from ds_toolkit.plan.memory import (
    Offload,
    activations_bytes,
    bucket_size,
    buffers_bytes,
    prefetch_bucket_size,
    rank_memory,
)

ZERO_PAPER = Job(
    Model(7_500_000_000, 36, 4096, 50_000), Cluster(8, 8, 10**12, 10**13), Precision.FP16, 1, 1, 1
)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_model_states_are_those_of_the_zero_papers_first_figure(stage: int, gigabytes: float) -> None:
    memory = rank_memory(ZERO_PAPER, stage)
    states = memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes
    assert states / 10**9 == pytest.approx(gigabytes, abs=0.05)


def test_fp32_needs_a_master_copy_only_where_zero_makes_one() -> None:
    job = replace(ZERO_PAPER, model=Model(1000, 1, 8, 8), cluster=Cluster(1, 4, 10**12, 10**12))
    job = replace(job, precision=Precision.FP32)
    plain, partitioned = rank_memory(job, 0), rank_memory(job, 1)
    assert (plain.weights_bytes, plain.gradients_bytes, plain.optimizer_bytes) == (4000, 4000, 8000)
    assert (partitioned.weights_bytes, partitioned.optimizer_bytes) == (4000, 250 * 12)


def test_an_uneven_share_is_padded() -> None:
    job = replace(ZERO_PAPER, model=Model(10, 1, 1, 1), cluster=Cluster(1, 4, 10**12, 10**12))
    assert rank_memory(job, 3).weights_bytes == 3 * 2


def test_what_is_offloaded_leaves_the_device_for_the_host() -> None:
    base = rank_memory(ZERO_PAPER, 3)
    optimizer = rank_memory(ZERO_PAPER, 3, Offload(optimizer=True))
    everything = rank_memory(ZERO_PAPER, 3, Offload(optimizer=True, parameters=True))
    assert base.host_bytes == 0
    assert optimizer.optimizer_bytes == 0
    assert optimizer.host_bytes >= base.optimizer_bytes
    assert everything.device_bytes == everything.buffers_bytes + everything.activations_bytes
    assert everything.host_bytes == optimizer.host_bytes + base.weights_bytes


def test_activations_follow_the_megatron_formula() -> None:
    # GPT-3 175B, micro batch 1, sequence 2048: 34 s b h bytes in each of 96 blocks, 4 s b v for the logits.
    job = replace(ZERO_PAPER, model=Model(175 * 10**9, 96, 12288, 51200), sequence_length=2048)
    assert activations_bytes(job) == 96 * 34 * 2048 * 12288 + 4 * 2048 * 51200
    double = activations_bytes(replace(job, precision=Precision.FP32))
    assert double == 96 * 66 * 2048 * 12288 + 4 * 2048 * 51200
    assert activations_bytes(replace(job, micro_batch_size=3)) == 3 * activations_bytes(job)


def test_buckets_never_exceed_the_model_and_are_even() -> None:
    tiny = replace(ZERO_PAPER, model=Model(1001, 1, 8, 8))
    assert (bucket_size(tiny), prefetch_bucket_size(tiny)) == (1000, 12 * 64)
    assert (bucket_size(ZERO_PAPER), prefetch_bucket_size(ZERO_PAPER)) == (500_000_000, 50_000_000)
    assert [buffers_bytes(tiny, stage) for stage in range(4)] == [0, 4000, 4000, (1000 + 1001) * 2]
