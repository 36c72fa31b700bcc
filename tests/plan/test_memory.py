from __future__ import annotations

from dataclasses import replace

import pytest

from ds_toolkit.errors import ToolkitError
from ds_toolkit.plan.job import Cluster, Job, Model, Precision
from ds_toolkit.plan.memory import FRAGMENTATION_SHARE, Offload, activations_bytes, rank_memory
from ds_toolkit.plan.zero import ZeroSettings, share_elements, touched_elements

ZERO_PAPER = Job(
    Model(7_500_000_000, 36, 4096, 50_000), Cluster(8, 8, 10**12, 10**13), Precision.FP16, 1, 1, 1
)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_model_states_are_those_of_the_zero_papers_first_figure(stage: int, gigabytes: float) -> None:
    memory = rank_memory(ZERO_PAPER, stage).device
    states = memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes
    assert states / 10**9 == pytest.approx(gigabytes, abs=0.05)


def test_fp32_needs_a_master_copy_only_where_zero_makes_one() -> None:
    job = replace(ZERO_PAPER, model=Model(1000, 1, 8, 8), cluster=Cluster(1, 4, 10**12, 10**12))
    job = replace(job, precision=Precision.FP32)
    plain, partitioned = rank_memory(job, 0).device, rank_memory(job, 1).device
    assert (plain.weights_bytes, plain.gradients_bytes, plain.optimizer_bytes) == (4000, 4000, 8000)
    assert (partitioned.weights_bytes, partitioned.optimizer_bytes) == (4000, 250 * 12)


def test_an_uneven_share_is_padded() -> None:
    whole = Model(10, 1, 1, 1)
    in_parts = replace(whole, tensor_sizes=(1, 2, 7))
    # Ten elements for four ranks: a multiple of eight is sixteen; each part alone takes 1 + 1 + 2.
    assert [share_elements(in_parts, 4, stage) for stage in range(4)] == [10, 4, 4, 4]
    assert [share_elements(whole, 4, stage) for stage in range(4)] == [10, 4, 4, 3]
    # The third share, elements 8 to 11, holds the end of the last part, whose gradient stays whole.
    assert touched_elements(in_parts, 4) == 10
    assert touched_elements(whole, 4) == 4


def test_sizes_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ToolkitError, match="2 tensors hold 3 parameters, not 4"):
        Model(4, 1, 1, 1, tensor_sizes=(1, 2))


def test_what_is_offloaded_leaves_the_device_for_the_host() -> None:
    base = rank_memory(ZERO_PAPER, 3)
    optimizer = rank_memory(ZERO_PAPER, 3, Offload(optimizer=True))
    everything = rank_memory(ZERO_PAPER, 3, Offload(optimizer=True, parameters=True))
    assert base.host.total_bytes == 0
    assert optimizer.device.optimizer_bytes == 0
    assert optimizer.host.optimizer_bytes == base.device.optimizer_bytes
    assert optimizer.device.weights_bytes == base.device.weights_bytes
    assert everything.device.weights_bytes == 0
    assert everything.host.weights_bytes == base.device.weights_bytes
    on_nvme = rank_memory(ZERO_PAPER, 3, Offload(optimizer=True, parameters=True, nvme=True))
    assert on_nvme.device == everything.device
    assert on_nvme.nvme_bytes > base.device.optimizer_bytes
    assert on_nvme.host.optimizer_bytes == on_nvme.host.weights_bytes == 0


def test_fragmentation_is_a_share_of_all_else_on_gpus_only() -> None:
    items = rank_memory(ZERO_PAPER, 2).device
    rest = items.total_bytes - items.fragmentation_bytes
    assert items.fragmentation_bytes == pytest.approx(FRAGMENTATION_SHARE * rest, abs=1)
    on_cpu = replace(ZERO_PAPER, cluster=Cluster(1, 2, None, 10**12))
    assert rank_memory(on_cpu, 2).device.fragmentation_bytes == 0


def test_activations_follow_the_megatron_formula() -> None:
    # GPT-3 175B, micro batch 1, sequence 2048: 34 s b h bytes in each of 96 blocks, 4 s b v for the logits.
    job = replace(ZERO_PAPER, model=Model(175 * 10**9, 96, 12288, 51200), sequence_length=2048)
    assert activations_bytes(job) == 96 * 34 * 2048 * 12288 + 4 * 2048 * 51200
    double = activations_bytes(replace(job, precision=Precision.FP32))
    assert double == 96 * 66 * 2048 * 12288 + 4 * 2048 * 51200
    assert activations_bytes(replace(job, micro_batch_size=3)) == 3 * activations_bytes(job)


def test_recomputed_activations_are_the_inputs_of_blocks_and_one_block() -> None:
    job = replace(ZERO_PAPER, model=Model(175 * 10**9, 96, 12288, 51200), sequence_length=2048)
    recomputed = replace(job, recompute_activations=True)
    inputs_and_block = (96 * 2 + 34) * 2048 * 12288
    assert activations_bytes(recomputed) == inputs_and_block + 4 * 2048 * 51200
    one_layer = replace(recomputed, model=Model(10**9, 1, 12288, 51200))
    assert activations_bytes(one_layer) <= activations_bytes(replace(one_layer, recompute_activations=False))


def test_buckets_never_exceed_the_model_and_are_even() -> None:
    tiny = ZeroSettings.fitted(replace(ZERO_PAPER, model=Model(1001, 1, 8, 8)))
    assert (tiny.reduce_bucket_size, tiny.prefetch_bucket_size) == (1000, 12 * 64)
    assert tiny.persistence_threshold == 80
    assert ZeroSettings.fitted(ZERO_PAPER) == ZeroSettings(overlap_comm=True)


def test_the_step_counts_where_it_needs_more_than_the_backward_pass() -> None:
    # Hardly any activations: fp32 gradients of the share stand beside weights and optimizer state.
    job = replace(ZERO_PAPER, model=Model(10**9, 1, 8, 8), cluster=Cluster(1, 2, 10**12, 10**12))
    items = rank_memory(job, 2, settings=ZeroSettings(reduce_bucket_size=2)).device
    assert items.gradients_bytes + items.buffers_bytes + items.activations_bytes == 4 * 5 * 10**8
