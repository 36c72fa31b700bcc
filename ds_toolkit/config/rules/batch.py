"""DS1xx: batch sizes and how they multiply."""

from __future__ import annotations

from collections.abc import Iterator

from ds_toolkit.config.rules.registry import rule
from ds_toolkit.config.subject import Config, json_pointer
from ds_toolkit.findings import Severity
from ds_toolkit.rules import Problem

TOTAL = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"


@rule("DS101", "no-batch-size", Severity.ERROR)
def no_batch_size(config: Config) -> Iterator[Problem]:
    """Neither the whole batch nor the micro batch is given, and DeepSpeed stops at the start.

    One of `train_batch_size` and `train_micro_batch_size_per_gpu` is enough;
    `gradient_accumulation_steps` alone gives nothing.

    Bad:
        {"gradient_accumulation_steps": 2}
    Good:
        {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    """
    if config.data.get(TOTAL) is None and config.data.get(MICRO) is None:
        yield Problem("", "no batch size is given", f"set `{MICRO}`, or `{TOTAL}`")


@rule("DS102", "batch-sizes-disagree", Severity.ERROR)
def batch_sizes_disagree(config: Config) -> Iterator[Problem]:
    """The whole batch is not micro batch x accumulation x ranks, and DeepSpeed stops at the start.

    What is not given DeepSpeed computes by division without a remainder, and then finds the disagreement.
    With an unknown number of ranks only what no number could mend is reported.

    Bad (world_size=7):
        {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 18}
    Bad:
        {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}
    Good (world_size=8):
        {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 16}
    """
    total, micro, accumulation = (config.integer(key) for key in (TOTAL, MICRO, ACCUMULATION))
    factors = [micro, accumulation, config.world_size]
    # A number below 1 is another matter than a product that does not come out.
    if total is None or any(factor is not None and factor < 1 for factor in factors):
        return
    product = 1
    for factor in factors:
        product *= factor or 1
    known_whole = None not in factors
    if total > 0 and total % product == 0 and (not known_whole or total == product):
        return
    names = ("micro batch", "accumulation", "ranks")
    terms = " x ".join(f"{name} {value}" for name, value in zip(names, factors, strict=True) if value)
    relation = "is not" if known_whole else "is not a multiple of"
    below = max(total // product, 1) * product
    near = f"{product}" if known_whole else f"{below} or {below + product}"
    yield Problem(
        json_pointer(TOTAL),
        f"`{TOTAL}` {total} {relation} {terms} = {product}",
        f"set it to {near}, or leave it out",
    )
