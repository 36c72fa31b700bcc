"""Global batch sizes that stay the same over many numbers of GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ds_toolkit.errors import ToolkitError

_LARGEST_SEARCH = 20_000_000


@dataclass(frozen=True)
class BatchPlan:
    """One global batch size and where it works.

    Attributes:
        global_batch_size: samples of one optimizer step, at most what was allowed.
        settings: for each number of GPUs that works, the micro batch size and the accumulation steps.
        left_out: the numbers of GPUs of the range that it does not work for.
    """

    global_batch_size: int
    settings: dict[int, tuple[int, int]]
    left_out: tuple[int, ...]


def plan_batch(max_batch_size: int, micro_batch_sizes: Sequence[int], num_gpus: Iterable[int]) -> BatchPlan:
    """The batch size that works for the most numbers of GPUs; of several, the largest one.

    A batch works for n GPUs if it is micro batch x accumulation x n with one of the micro batches; the
    largest of them is taken, since it uses the GPU best. All sizes up to the limit are tried: DeepSpeed's
    removed `elasticity` section looked at multiples of highly composite numbers only.

    Raises:
        ToolkitError: a number below 1, no micro batch or GPU, or no size that works at all.
    """
    sizes = sorted(set(micro_batch_sizes), reverse=True)
    counts = sorted(set(num_gpus))
    for values, noun in (
        ([max_batch_size], "largest batch"),
        (sizes, "micro batch"),
        (counts, "number of GPUs"),
    ):
        if not values or min(values) < 1:
            raise ToolkitError(f"the {noun} is {min(values) if values else 'missing'}", fix="give 1 or more")
    if max_batch_size * len(counts) > _LARGEST_SEARCH:
        raise ToolkitError(
            "the search is too large",
            why=f"{max_batch_size} batch sizes x {len(counts)} numbers of GPUs",
            fix="give a smaller --max-batch or a narrower --gpus",
        )
    best, most = 0, 0
    working = [0] * (max_batch_size + 1)
    for count in counts:
        works = {
            multiple for size in sizes for multiple in range(count * size, max_batch_size + 1, count * size)
        }
        for batch in works:
            working[batch] += 1
    for batch in range(1, max_batch_size + 1):
        if working[batch] >= most and working[batch]:
            best, most = batch, working[batch]
    if not best:
        raise ToolkitError(
            "no batch size works",
            why=f"one pass over {counts[0]} GPUs is {counts[0] * sizes[-1]} samples at the least",
            fix="allow a larger --max-batch or a smaller micro batch",
        )
    settings = {
        count: (size, best // (size * count))
        for count in counts
        for size in [next((size for size in sizes if best % (size * count) == 0), 0)]
        if size
    }
    return BatchPlan(best, settings, tuple(count for count in counts if count not in settings))
