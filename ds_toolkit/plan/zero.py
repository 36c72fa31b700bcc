"""How ZeRO cuts a model, and the sizes that a configuration gives to its buffers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ds_toolkit.plan.job import Job, Model

# DeepSpeed's defaults for zero_optimization, in elements.
DEFAULT_BUCKET_SIZE = 500_000_000
DEFAULT_PREFETCH_BUCKET_SIZE = 50_000_000
DEFAULT_PERSISTENCE_THRESHOLD = 100_000
DEFAULT_REUSE_DISTANCE = 1_000_000_000
DEFAULT_SUB_GROUP_SIZE = 1_000_000_000


@dataclass(frozen=True)
class ZeroSettings:
    """Sizes in elements, by the names that `zero_optimization` has for them.

    Attributes:
        reduce_bucket_size: of the flat buffer that gradients are reduced from.
        prefetch_bucket_size: gathered ahead at stage 3.
        persistence_threshold: parameters with no more elements stay whole at stage 3.
        max_reuse_distance: a parameter that is needed again within as many is not given up at stage 3.
        sub_group_size: that stage 3 optimizes at a time.
        overlap_comm: whether reducing overlaps the backward pass, from a second buffer.
    """

    reduce_bucket_size: int = DEFAULT_BUCKET_SIZE
    prefetch_bucket_size: int = DEFAULT_PREFETCH_BUCKET_SIZE
    persistence_threshold: int = DEFAULT_PERSISTENCE_THRESHOLD
    max_reuse_distance: int = DEFAULT_REUSE_DISTANCE
    sub_group_size: int = DEFAULT_SUB_GROUP_SIZE
    overlap_comm: bool = False

    @classmethod
    def fitted(cls, job: Job) -> ZeroSettings:
        """DeepSpeed's defaults, or less where the model is smaller than they are.

        A bucket is allocated whole whatever the model's size, so it is no larger than the model, and even.
        No more than one block (12 h^2) is gathered ahead. In a small model the default threshold would keep
        matrices whole; ten rows of the residual stream let biases and norms stay whole and nothing else.
        """
        num_parameters, width = job.model.num_parameters, job.model.hidden_size
        matrices_are_partitioned = width**2 > DEFAULT_PERSISTENCE_THRESHOLD
        return cls(
            reduce_bucket_size=max(2, min(DEFAULT_BUCKET_SIZE, num_parameters) // 2 * 2),
            prefetch_bucket_size=min(DEFAULT_PREFETCH_BUCKET_SIZE, 12 * width**2, num_parameters),
            persistence_threshold=DEFAULT_PERSISTENCE_THRESHOLD if matrices_are_partitioned else 10 * width,
            # Without streams nothing can overlap.
            overlap_comm=job.cluster.has_gpus,
        )


def flat_elements(num_parameters: int, num_ranks: int) -> int:
    """Elements of the flat tensor that stages 1 and 2 cut: padded to a multiple of two elements a rank.

    DeepSpeed's stage_1_and_2.py: `nccl_start_alignment_factor` is 2, so that shares start at 4 bytes.
    """
    unit = 2 * num_ranks
    return math.ceil(num_parameters / unit) * unit


def share_elements(model: Model, num_ranks: int, stage: int) -> int:
    """Elements of one rank's share, padding included: all of them at stage 0.

    Stages 1 and 2 cut the flat tensor of all parameters, stage 3 pads and cuts each parameter.
    """
    if stage == 0:
        return model.num_parameters
    if stage < 3:
        return flat_elements(model.num_parameters, num_ranks) // num_ranks
    sizes = model.tensor_sizes or (model.num_parameters,)
    return sum(math.ceil(size / num_ranks) for size in sizes)


def touched_elements(model: Model, num_ranks: int) -> int:
    """Elements of all parameters that reach into one rank's share of stages 1 and 2, of the rank with most.

    DeepSpeed keeps their gradients whole (stage_1_and_2.py, `copy_grads_in_partition`). Where the sizes of
    parameters are not known it is the share itself.
    """
    share = share_elements(model, num_ranks, 2)
    if not model.tensor_sizes:
        return share
    touched = [0] * num_ranks
    start = 0
    for size in model.tensor_sizes:
        for rank in range(start // share, (start + size - 1) // share + 1):
            touched[rank] += size
        start += size
    return max(touched)


def persistent_elements(model: Model, threshold: int, num_ranks: int) -> int:
    """Elements, padded, of the parameters that stage 3 keeps whole; 0 where sizes are not known."""
    return sum(math.ceil(size / num_ranks) * num_ranks for size in model.tensor_sizes if size <= threshold)


def largest_tensor(model: Model) -> int:
    """Elements of the largest parameter: the embedding or a block's widest matrix where it is not known."""
    guess = max(4 * model.hidden_size**2, model.vocabulary_size * model.hidden_size)
    return max(model.tensor_sizes, default=min(model.num_parameters, guess))
