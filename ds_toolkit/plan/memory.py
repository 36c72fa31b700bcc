"""Bytes that one rank needs, by what they are for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ds_toolkit.plan.job import Job, Precision
from ds_toolkit.plan.zero import (
    ZeroSettings,
    flat_elements,
    largest_tensor,
    persistent_elements,
    share_elements,
    touched_elements,
)

FP32_BYTES = 4
# Adam keeps a mean and a variance of each gradient in fp32.
_MOMENT_BYTES = 2 * FP32_BYTES
# Norms of gradients are computed in fp64.
_NORM_BYTES = 8
# Our assumption for PyTorch's caching allocator; the ZeRO paper (section 3.2) saw far more in extreme cases.
FRAGMENTATION_SHARE = 0.05
# DeepSpeed's default of offload_optimizer.buffer_count: swap buffers in host memory.
_NVME_BUFFER_COUNT = 4


@dataclass(frozen=True)
class Offload:
    """What moves from the GPU to the memory of its host, or through it to NVMe."""

    optimizer: bool = False
    parameters: bool = False
    nvme: bool = False


@dataclass(frozen=True)
class Items:
    """Bytes by what they are for, at the highest point of each."""

    weights_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_bytes: int = 0
    buffers_bytes: int = 0
    activations_bytes: int = 0
    fragmentation_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All of them."""
        return (
            self.weights_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.buffers_bytes
            + self.activations_bytes
            + self.fragmentation_bytes
        )


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank: on its device, in its host's memory and on its host's NVMe."""

    device: Items
    host: Items = Items()
    nvme_bytes: int = 0


def rank_memory(
    job: Job, stage: int, offload: Offload = Offload(), settings: ZeroSettings | None = None
) -> RankMemory:
    """What one rank needs at a ZeRO stage with Adam; of unequal ranks, the one that needs most.

    Model states after Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054, section 3.1 and figure 1): weights
    and gradients of the training precision, and K bytes of optimizer state a parameter: fp32 master weights
    and two fp32 moments, K = 12. Stage 1 divides the optimizer state by the number of data-parallel ranks,
    stage 2 the gradients too, stage 3 the weights too. In fp32 plain Adam needs no master copy, yet
    DeepSpeed's ZeRO optimizers make one.
    """
    settings = settings or ZeroSettings.fitted(job)
    host, nvme_bytes = _offloaded(job, stage, offload)
    activations = activations_bytes(job)
    gradients = _gradients_bytes(job, stage, offload, settings)
    # In the step activations are gone; what it needs beyond them and the gradients is called a buffer.
    in_step = _step_gradients_bytes(job, stage, offload, settings) - gradients - activations
    device = Items(
        weights_bytes=0 if offload.parameters else _weights_bytes(job, stage, settings),
        gradients_bytes=gradients,
        optimizer_bytes=0 if offload.optimizer else _optimizer_bytes(job, stage),
        buffers_bytes=max(_buffers_bytes(job, stage, offload, settings), in_step),
        activations_bytes=activations,
    )
    if job.cluster.has_gpus:
        fragmentation = round(device.total_bytes * FRAGMENTATION_SHARE)
        device = Items(**{**vars(device), "fragmentation_bytes": fragmentation})
    return RankMemory(device, host, nvme_bytes)


def _weights_bytes(job: Job, stage: int, settings: ZeroSettings) -> int:
    model, ranks, number_bytes = job.model, job.cluster.world_size, job.precision.num_bytes
    if stage == 0:
        return model.num_parameters * number_bytes
    if stage < 3:
        return flat_elements(model.num_parameters, ranks) * number_bytes
    # A single rank's share is whole already.
    whole = persistent_elements(model, settings.persistence_threshold, ranks) if ranks > 1 else 0
    return (share_elements(model, ranks, stage) + whole) * number_bytes


def _gradients_bytes(job: Job, stage: int, offload: Offload, settings: ZeroSettings) -> int:
    """Gradients at the highest point of a step, in the training precision.

    Stage 1 reduces, and gives up what belongs to others, only once accumulation is over, and without overlap
    not before the backward pass is (DeepSpeed's stage_1_and_2.py, `process_gradients`). Stage 2 holds the
    share accumulated so far beside the one that the running backward pass fills. With the optimizer on the
    host only a bucket's gradients are on the device where each bucket is given up as it is reduced.
    """
    model, ranks, number_bytes = job.model, job.cluster.world_size, job.precision.num_bytes
    if stage < 2 and not _reduces_early(job, stage, settings):
        return model.num_parameters * number_bytes
    if offload.optimizer:
        return 0
    if stage < 3:
        copies = 1 if job.accumulation_steps == 1 else 2
        return touched_elements(model, ranks) * number_bytes * copies
    return share_elements(model, ranks, stage) * number_bytes


def _reduces_early(job: Job, stage: int, settings: ZeroSettings) -> bool:
    # Whether gradients of other ranks are given up while the backward pass still runs.
    return stage > 1 or (stage == 1 and settings.overlap_comm and job.accumulation_steps == 1)


def _optimizer_bytes(job: Job, stage: int) -> int:
    has_master = stage > 0 or job.precision is not Precision.FP32
    share = share_elements(job.model, job.cluster.world_size, stage)
    return share * (_MOMENT_BYTES + FP32_BYTES * has_master)


def _offloaded(job: Job, stage: int, offload: Offload) -> tuple[Items, int]:
    """What lies in host memory and on NVMe.

    Beside the optimizer state, the CPU optimizer's fp32 gradients. Stages 1 and 2 keep a copy of the share in
    training precision to send back, a staging buffer of the largest parameter, and while stage 2 accumulates
    the gradients of all parameters that reach into the share; stage 3 accumulates in a flat buffer.
    """
    if not offload.optimizer:
        return Items(), 0
    model, ranks, number_bytes = job.model, job.cluster.world_size, job.precision.num_bytes
    share = share_elements(model, ranks, stage)
    gradients, buffers, nvme_bytes = share * FP32_BYTES, 0, 0
    if stage < 3:
        buffers = share * number_bytes + largest_tensor(model) * number_bytes
        if stage == 2 and job.accumulation_steps > 1:
            gradients += touched_elements(model, ranks) * number_bytes
    else:
        gradients += share * number_bytes
    optimizer = _optimizer_bytes(job, stage)
    weights = share * number_bytes if offload.parameters else 0
    if offload.nvme:
        nvme_bytes = optimizer + share * FP32_BYTES + weights
        swapped = min(share, ZeroSettings().sub_group_size)
        buffers += _NVME_BUFFER_COUNT * swapped * FP32_BYTES
        gradients, optimizer, weights = share * number_bytes, 0, 0
    return Items(weights, gradients, optimizer, buffers), nvme_bytes


def _buffers_bytes(job: Job, stage: int, offload: Offload, settings: ZeroSettings) -> int:
    """DeepSpeed's own buffers on the device in the forward and backward passes.

    Stages 1 to 3 reduce gradients from a flat buffer of `reduce_bucket_size` elements, made whole whatever
    the model's size, and a bucket is copied to be reduced (stage_1_and_2.py, `allreduce_bucket`;
    coalesced_collectives.py, `reduce_scatter_coalesced`); below stage 3 there are two where communication
    overlaps. A gradient that no longer fits into the bucket waits beside it. Offloading adds a staging
    buffer of the largest parameter. Stage 3 also holds, gathered, the weights of the layer at work, of what
    is prefetched, and at the turn of the forward pass of what the backward pass needs again within the reuse
    distance, which is passed twice.
    """
    model, ranks, number_bytes = job.model, job.cluster.world_size, job.precision.num_bytes
    if stage == 0:
        return 0
    bucket, waiting = settings.reduce_bucket_size, largest_tensor(model)
    if stage < 3:
        staging = waiting if offload.optimizer else 0
        flat = (bucket * settings.overlap_comm + waiting + staging) * number_bytes
        return flat + _reducing_bytes(job, stage, offload, settings)
    # Alone, a rank has nothing to gather; what stays whole is counted as weights.
    whole = persistent_elements(model, settings.persistence_threshold, ranks)
    gathered = (
        model.largest_layer_parameters + settings.prefetch_bucket_size + settings.max_reuse_distance // 2
    )
    gathered = min(gathered, share_elements(model, ranks, stage) * ranks - whole) if ranks > 1 else 0
    norm_bytes = _norm_bytes(job, stage) if offload.optimizer else 0
    return (2 * bucket + waiting + gathered) * number_bytes + norm_bytes


def _reducing_bytes(job: Job, stage: int, offload: Offload, settings: ZeroSettings) -> int:
    """What stages 1 and 2 hold of a bucket while they reduce it and take out of it what is theirs.

    The bucket, then its copy; with the optimizer on the host, then the norm of a parameter's gradient in fp64
    (`set_norm_for_param_grad_in_gpu`). Where stage 1 still holds all gradients those in the bucket are
    counted already, and its share is copied out of them before the rest is given up
    (`copy_grads_in_partition`).
    """
    model, ranks, number_bytes = job.model, job.cluster.world_size, job.precision.num_bytes
    bucket = settings.reduce_bucket_size * number_bytes
    largest = [bucket]
    if offload.optimizer:
        largest.append(_norm_bytes(job, stage))
    if _reduces_early(job, stage, settings):
        return bucket + max(largest)
    if not offload.optimizer:
        largest.append(touched_elements(model, ranks) * number_bytes)
    return max(largest)


def _norm_bytes(job: Job, stage: int) -> int:
    # The norm of what a rank has of a gradient is computed from a copy in fp64 (zero/utils.py,
    # `get_norm_dtype`). Stage 3 cuts each gradient, stages 1 and 2 all of them as one.
    largest, ranks = largest_tensor(job.model), job.cluster.world_size
    share = share_elements(job.model, ranks, stage)
    return min(math.ceil(largest / ranks) if stage == 3 else largest, share) * _NORM_BYTES


def _step_gradients_bytes(job: Job, stage: int, offload: Offload, settings: ZeroSettings) -> int:
    """Gradients, and what is made of them, on the device when the optimizer steps.

    Stages 1 and 2 flatten their share and then turn it into fp32, with the gradients it is made of beside
    both (stage_1_and_2.py, `step`); stage 3 does so with one sub-group (stage3.py,
    `_prepare_fp32_grad_for_sub_group`); it keeps its bucket, but has given up the weights that it kept whole.
    Stage 0 holds all gradients twice: in fp32 training in the flat copy that they are reduced in (engine.py,
    `allreduce_bucket`), in 16-bit training in fp32 (unfused_optimizer.py, `step`), and a third time where the
    optimizer is fused, as on GPUs: flat (fused_optimizer.py, `step`).
    """
    model, ranks, number_bytes = job.model, job.cluster.world_size, job.precision.num_bytes
    in_16_bits = job.precision is not Precision.FP32
    if stage == 0:
        copies = 2 if in_16_bits and job.cluster.has_gpus else 1
        return model.num_parameters * (number_bytes + FP32_BYTES * copies)
    if offload.optimizer:
        return 0
    share = share_elements(model, ranks, stage)
    flat_bytes = number_bytes + FP32_BYTES * in_16_bits
    if stage < 3:
        gradients = touched_elements(model, ranks) * number_bytes
        return gradients + max(share * flat_bytes, _norm_bytes(job, stage))
    whole = persistent_elements(model, settings.persistence_threshold, ranks) if ranks > 1 else 0
    kept = share + settings.reduce_bucket_size - whole
    return kept * number_bytes + min(share, settings.sub_group_size) * flat_bytes


def activations_bytes(job: Job) -> int:
    """Bytes that the forward pass keeps for backward.

    Korthikanti et al. 2022 (arXiv 2205.05198): a block keeps sbh(34 + 5as/h) bytes in 16-bit training
    (equation 1); the second term is the attention scores, which fused attention kernels do not keep
    (selective recomputation, equation 6), leaving 34sbh: 32sbh of 16-bit numbers, so twice that in fp32, and
    2sbh of one-byte dropout masks. With full recomputation a block keeps its input alone, 2sbh in 16 bits,
    and one block at a time is whole (section 5). The logits add 4sbv, in fp32 (section 4.3).

    Of the 16h numbers that a token leaves in a block, 9h are the feed-forward part's: its input and two of
    width 4h. With k experts a token there are 3kh instead, each expert's input and its output before and
    after it is weighted; the router's input, h; and four of the width that the token passes, which is what
    gated experts keep. This is what transformers keeps with its grouped experts; the tests measure it.
    """
    tokens = job.micro_batch_size * job.sequence_length
    hidden, experts = job.model.hidden_size, job.model.experts
    numbers = 16 * hidden
    if experts is not None:
        numbers += (3 * experts.experts_per_token + 1) * hidden + 4 * experts.active_width - 9 * hidden
    block = tokens * (numbers * job.precision.num_bytes + 2 * hidden)
    kept = job.model.num_layers * block
    if job.recompute_activations:
        inputs = job.model.num_layers * tokens * job.model.hidden_size * job.precision.num_bytes
        kept = min(kept, inputs + block)
    return kept + tokens * job.model.vocabulary_size * FP32_BYTES
