"""DS10x: batch sizes and how they multiply."""

from __future__ import annotations

from collections.abc import Iterator

from ds_toolkit.config.consumers import Consumer
from ds_toolkit.config.rules.registry import rule
from ds_toolkit.config.subject import Config, json_pointer
from ds_toolkit.findings import Severity
from ds_toolkit.rules import Problem

TOTAL = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
BATCH_SIZES = frozenset({"train_batch_size", MICRO, "gradient_accumulation_steps"})
ACCUMULATION = "gradient_accumulation_steps"


@rule("DS101", "no-batch-size", Severity.ERROR)
def no_batch_size(config: Config) -> Iterator[Problem]:
    """Neither the whole batch nor the micro batch is given, and DeepSpeed stops at the start.

    One of `train_batch_size` and `train_micro_batch_size_per_gpu` is enough;
    `gradient_accumulation_steps` alone gives nothing. Lightning fills in the micro batch by itself.

    Bad:
        {"gradient_accumulation_steps": 2}
    Good:
        {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    """
    filled_in = config.consumer is Consumer.LIGHTNING
    if not filled_in and config.data.get(TOTAL) is None and config.data.get(MICRO) is None:
        yield Problem("", "no batch size is given", f"set `{MICRO}`, or `{TOTAL}`")


@rule("DS102", "batch-sizes-disagree", Severity.ERROR)
def batch_sizes_disagree(config: Config) -> Iterator[Problem]:
    """The whole batch is not micro batch x accumulation x ranks, and DeepSpeed stops at the start.

    What is not given DeepSpeed computes by division without a remainder, and then finds the disagreement.
    With an unknown number of ranks only what no number could mend is reported. Ranks that share a sequence or
    a layer count once.

    Bad (world_size=7):
        {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 18}
    Bad:
        {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}
    Good (world_size=8):
        {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 16}
    """
    total, micro, accumulation = (config.integer(key) for key in (TOTAL, MICRO, ACCUMULATION))
    ranks = config.data_parallel_size
    factors = [micro, accumulation, ranks]
    # A number below 1 is another matter than a product that does not come out.
    if total is None or total < 1 or any(factor is not None and factor < 1 for factor in factors):
        return
    product = 1
    for factor in factors:
        product *= factor or 1
    known_whole = None not in factors
    if total % product == 0 and (not known_whole or total == product):
        return
    names = ("micro batch", "accumulation", "ranks")
    terms = " x ".join(f"{name} {value}" for name, value in zip(names, factors, strict=True) if value)
    relation = "is not" if known_whole else "is not a multiple of"
    yield Problem(
        json_pointer(TOTAL),
        f"`{TOTAL}` {total} {relation} {terms} = {product}",
        _nearest_fix(total, product, micro, ranks) if known_whole else _multiples_fix(total, product),
    )


@rule("DS103", "batch-size-below-one", Severity.ERROR)
def batch_size_below_one(config: Config) -> Iterator[Problem]:
    """A batch size is zero or negative, and DeepSpeed stops at the start.

    Bad:
        {"train_micro_batch_size_per_gpu": 0}
    Bad:
        {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": -1}
    Good:
        {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
    """
    for key in (TOTAL, MICRO, ACCUMULATION):
        value = config.data.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and value < 1:
            yield Problem(json_pointer(key), f"`{key}` is {value}", "write 1 or more")


@rule("DS104", "ranks-do-not-divide", Severity.ERROR)
def ranks_do_not_divide(config: Config) -> Iterator[Problem]:
    """The number of ranks is no multiple of those that share a sequence or a layer.

    Bad (world_size=6):
        {"train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": 4}
    Bad (world_size=6):
        {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 4}}
    Good (world_size=8):
        {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 4}}
    """
    size = config.model_parallel_size
    if config.world_size is None or config.world_size % size == 0:
        return
    in_sequence = "sequence_parallel_size" in config.data
    pointer = json_pointer("sequence_parallel_size") if in_sequence else "/tensor_parallel/autotp_size"
    below = config.world_size - config.world_size % size
    near = f"{below} or {below + size}" if below else f"{size}"
    yield Problem(
        pointer, f"{config.world_size} ranks are no multiple of {size}", f"use {near} ranks, or share less"
    )


def _multiples_fix(total: int, product: int) -> str:
    below = max(total // product, 1) * product
    return f"set it to {below} or {below + product}, or leave it out"


def _nearest_fix(total: int, product: int, micro: int | None, ranks: int | None) -> str:
    """The product itself, and the accumulation whose product comes nearest to what was asked for."""
    fix = f"set it to {product}, or leave it out"
    step = (micro or 1) * (ranks or 1)
    accumulation = max(round(total / step), 1)
    if accumulation * step != product:
        fix += f"; {accumulation * step} would need `{ACCUMULATION}` {accumulation}"
    return fix
