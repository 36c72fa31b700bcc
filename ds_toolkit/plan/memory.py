"""Bytes that one rank needs, by what they are for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ds_toolkit.plan.job import Job, Precision

_FP32_BYTES = 4
# Adam keeps a mean and a variance of each gradient in fp32.
_MOMENT_BYTES = 2 * _FP32_BYTES
# DeepSpeed's defaults for zero_optimization, in elements.
DEFAULT_BUCKET_SIZE = 500_000_000
DEFAULT_PREFETCH_BUCKET_SIZE = 50_000_000


@dataclass(frozen=True)
class Offload:
    """What moves from the GPU to the memory of its host."""

    optimizer: bool = False
    parameters: bool = False


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank, on its device and, where something is offloaded, in its host's memory."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    buffers_bytes: int
    activations_bytes: int
    host_bytes: int = 0

    @property
    def device_bytes(self) -> int:
        """All that lies on the device at the highest point of a step."""
        return (
            self.weights_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.buffers_bytes
            + self.activations_bytes
        )


def rank_memory(job: Job, stage: int, offload: Offload = Offload()) -> RankMemory:
    """What one rank needs at a ZeRO stage with Adam.

    Model states after Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054, section 3.1 and figure 1): weights
    and gradients of the training precision, and K bytes of optimizer state a parameter: fp32 master weights
    and two fp32 moments, K = 12. Stage 1 divides the optimizer state by the number of data-parallel ranks,
    stage 2 the gradients too, stage 3 the weights too. In fp32 plain Adam needs no master copy, yet
    DeepSpeed's ZeRO optimizers make one. What is divided is padded to whole elements.
    """
    num_parameters, ranks = job.model.num_parameters, job.cluster.world_size
    number_bytes = job.precision.num_bytes
    shard = math.ceil(num_parameters / ranks)
    has_master = stage > 0 or job.precision is not Precision.FP32
    optimizer = (shard if stage >= 1 else num_parameters) * (_MOMENT_BYTES + _FP32_BYTES * has_master)
    gradients = (shard if stage >= 2 else num_parameters) * number_bytes
    weights = (shard if stage >= 3 else num_parameters) * number_bytes
    host = 0
    if offload.optimizer:
        # Gradients of the shard follow in fp32: the CPU optimizer reads them from the host.
        host += optimizer + shard * _FP32_BYTES
        optimizer = 0
        gradients = 0 if stage >= 2 else gradients
    if offload.parameters:
        host += weights
        weights = 0
    return RankMemory(weights, gradients, optimizer, buffers_bytes(job, stage), activations_bytes(job), host)


def buffers_bytes(job: Job, stage: int) -> int:
    """Bytes of DeepSpeed's own buffers, with the bucket sizes that `bucket_size` and its siblings give.

    Stages 1 to 3 reduce gradients from a flat buffer of `reduce_bucket_size` elements, made whole at the
    start; below stage 3 there are two of them, for communication that overlaps. Stage 3 also holds, gathered,
    the weights of the layer at work and of what is prefetched.
    """
    number_bytes = job.precision.num_bytes
    if stage == 0:
        return 0
    if stage < 3:
        return 2 * bucket_size(job) * number_bytes
    gathered = job.model.largest_layer_parameters + prefetch_bucket_size(job)
    return (bucket_size(job) + min(gathered, job.model.num_parameters)) * number_bytes


def bucket_size(job: Job) -> int:
    """Elements of a bucket: DeepSpeed's default, or the model's where it is smaller; an even number."""
    return max(2, min(DEFAULT_BUCKET_SIZE, job.model.num_parameters) // 2 * 2)


def prefetch_bucket_size(job: Job) -> int:
    """Elements to gather ahead: DeepSpeed's default, or one block's weights (12 h^2) where they are fewer."""
    return min(DEFAULT_PREFETCH_BUCKET_SIZE, 12 * job.model.hidden_size**2, job.model.num_parameters)


def activations_bytes(job: Job) -> int:
    """Bytes that the forward pass keeps for backward, with attention scores recomputed.

    Korthikanti et al. 2022 (arXiv 2205.05198): a block keeps sbh(34 + 5as/h) bytes in 16-bit training
    (equation 1); the second term is the attention scores, which fused attention kernels do not keep
    (selective recomputation, equation 6), leaving 34sbh: 32sbh of 16-bit numbers, so twice that in fp32, and
    2sbh of one-byte dropout masks. The logits add 4sbv, in fp32 (section 4.3).
    """
    tokens = job.micro_batch_size * job.sequence_length
    bytes_per_element = 16 * job.precision.num_bytes + 2
    blocks = job.model.num_layers * tokens * job.model.hidden_size * bytes_per_element
    return blocks + tokens * job.model.vocabulary_size * _FP32_BYTES
