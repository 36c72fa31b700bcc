"""Two kinds of checkpoint: cheap ones in memory for most failures, dear ones on disk for the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ds_toolkit.plan.failures import positive, share
from ds_toolkit.plan.interval import young_interval


@dataclass(frozen=True)
class TwoLevels:
    """Intervals of both levels, in seconds, and what they cost.

    Attributes:
        memory_seconds: between checkpoints in memory.
        disk_seconds: between checkpoints on disk.
        memory_per_disk: checkpoints in memory for each one on disk, rounded.
        overhead: expected share of time that saving and lost work cost, restarts not counted.
        warning: why not to trust it; None if nothing speaks against it.
    """

    memory_seconds: float
    disk_seconds: float
    memory_per_disk: int
    overhead: float
    warning: str | None


def plan_two_levels(
    memory_cost_seconds: float,
    disk_cost_seconds: float,
    mttf_seconds: float,
    soft_share: float,
    caught_share: float = 0.0,
) -> TwoLevels:
    """The best pair of intervals when a `soft_share` of the failures leaves the host's memory intact.

    Benoit, Cavelan, Le Fevre, Robert, Sun 2017 (IEEE Transactions on Computers, "Towards Optimal Multi-Level
    Checkpointing"): each level keeps Young's interval for the failures that need it, T = sqrt(2 C / rate),
    and the overheads sqrt(2 C rate) add up. Last words catch soft failures only.

    Raises:
        ToolkitError: a time that is not above zero, a share outside [0, 1).
    """
    soft = positive(share(soft_share, "share of soft failures"), "share of soft failures")
    soft_mttf = positive(mttf_seconds, "mean time to failure") / soft
    hard_mttf = mttf_seconds / (1 - soft)
    memory = young_interval(memory_cost_seconds, soft_mttf, caught_share)
    disk = young_interval(disk_cost_seconds, hard_mttf)
    uncaught = 1 - caught_share
    overhead = math.sqrt(2 * memory_cost_seconds * uncaught / soft_mttf) + math.sqrt(
        2 * disk_cost_seconds / hard_mttf
    )
    warning = None
    if memory_cost_seconds > disk_cost_seconds:
        warning = (
            f"a checkpoint in memory costs {memory_cost_seconds:g} s, more than one on disk"
            f" ({disk_cost_seconds:g} s), which survives more failures: one level, on disk, is better"
        )
    return TwoLevels(memory, disk, max(1, round(disk / memory)), overhead, warning)
