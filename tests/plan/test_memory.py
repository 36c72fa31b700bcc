from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ds_toolkit.errors import ToolkitError
from ds_toolkit.plan.job import Cluster, Job, Model, Precision
from ds_toolkit.plan.memory import FRAGMENTATION_SHARE, Offload, activations_bytes, rank_memory
from ds_toolkit.plan.zero import ZeroSettings, share_elements, touched_elements

ZERO_PAPER = Job(
    Model(7_500_000_000, 36, 4096, 50_000), Cluster(8, 8, 10**12, 10**13), Precision.FP16, 1, 1, 1
)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_model_states_are_those_of_the_zero_papers_first_figure(stage: int, gigabytes: float) -> None:
    # The paper's stage 1 keeps all gradients, as DeepSpeed's does where it accumulates.
    job = replace(ZERO_PAPER, accumulation_steps=2) if stage == 1 else ZERO_PAPER
    memory = rank_memory(job, stage).device
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
    # Hardly any activations: the share's gradients, flat and in fp32 stand beside model states.
    job = replace(ZERO_PAPER, model=Model(10**9, 1, 8, 8), cluster=Cluster(1, 2, 10**12, 10**12))
    items = rank_memory(job, 2, settings=ZeroSettings(reduce_bucket_size=2)).device
    assert items.gradients_bytes + items.buffers_bytes + items.activations_bytes == 8 * 5 * 10**8


def test_stage_1_gives_gradients_up_early_only_with_overlap_and_in_one_pass() -> None:
    early, late = ZeroSettings(overlap_comm=True), ZeroSettings()
    everything, share = ZERO_PAPER.model.num_parameters * 2, ZERO_PAPER.model.num_parameters * 2 // 64
    assert rank_memory(ZERO_PAPER, 1, settings=early).device.gradients_bytes == pytest.approx(share, rel=1e-6)
    assert rank_memory(ZERO_PAPER, 1, settings=late).device.gradients_bytes == everything
    accumulating = replace(ZERO_PAPER, accumulation_steps=2)
    assert rank_memory(accumulating, 1, settings=early).device.gradients_bytes == everything


def test_a_norm_in_fp64_counts_where_one_parameter_is_as_large_as_a_share() -> None:
    model = Model(10**9, 1, 8, 8, tensor_sizes=(10**9,))
    job = replace(ZERO_PAPER, model=model, cluster=Cluster(1, 2, 10**12, 10**12))
    items = rank_memory(job, 2, settings=ZeroSettings(reduce_bucket_size=2)).device
    # All of the parameter's gradient, since both shares reach into it, and half of it in fp64.
    beyond_activations = items.gradients_bytes + items.buffers_bytes + items.activations_bytes
    assert beyond_activations == 2 * 10**9 + 8 * 5 * 10**8


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 10**6), min_size=1, max_size=12),
    known=st.booleans(),
    stage=st.integers(0, 3),
    precision=st.sampled_from(list(Precision)),
    passes=st.integers(1, 3),
    ranks=st.integers(1, 64),
    more=st.integers(1, 64),
    offload=st.booleans(),
    # Small buckets let the step decide, those of the model's size the backward pass.
    buckets=st.sampled_from([None, ZeroSettings(reduce_bucket_size=2)]),
)
def test_more_gpus_never_need_more_memory_each_but_for_padding(
    sizes: list[int],
    known: bool,
    stage: int,
    precision: Precision,
    passes: int,
    ranks: int,
    more: int,
    offload: bool,
    buckets: ZeroSettings | None,
) -> None:
    total = sum(sizes)
    # Where a share ends inside a parameter is chance: how much the gradients of stages 1 and 2 reach over.
    model = Model(total, 2, 64, 64, tensor_sizes=tuple(sizes) if known and stage in (0, 3) else ())
    assume(ranks > 1 or stage != 3)  # alone, a rank has nothing to gather
    where = Offload(optimizer=offload and stage > 0)

    def need(num_ranks: int) -> tuple[int, int]:
        cluster = Cluster(1, num_ranks, 10**15, 10**15)
        memory = rank_memory(Job(model, cluster, precision, 1, passes, 16), stage, where, buckets)
        return memory.device.total_bytes, memory.host.total_bytes

    # The whole is padded by two elements a rank at the most, a parameter by one a rank.
    padding_bytes = 64 * (ranks + more) * (len(sizes) + 1)
    for fewer, larger in zip(need(ranks), need(ranks + more), strict=True):
        assert larger <= fewer + padding_bytes
