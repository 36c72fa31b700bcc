"""How often to save, as the guard's section of a configuration says it."""

from __future__ import annotations

from ds_toolkit.plan.failures import MttfOf, job_mttf_seconds
from ds_toolkit.plan.interval import Saving, plan_interval
from ds_toolkit.plan.job import Job
from ds_toolkit.plan.memory import FP32_BYTES
from ds_toolkit.units import format_bytes, format_seconds

DEFAULT_SAVE_EVERY = "10min"
# What one host writes to shared storage; said in the reason.
_ASSUMED_BYTES_PER_SECOND = 10**9


def saving_interval(job: Job, stage: int, mttf_per_gpu_seconds: float | None) -> tuple[str, str]:
    """The guard's `save_every`, and a line that says why.

    The cost of a checkpoint is the time that one host takes to write its part: fp32 weights and two moments,
    12 bytes a parameter over all hosts, and the weights in training precision.
    """
    if mttf_per_gpu_seconds is None:
        why = "what a failure may cost; --mttf-per-gpu finds the best interval"
        return DEFAULT_SAVE_EVERY, f"a checkpoint every {DEFAULT_SAVE_EVERY}, the last 3 kept: {why}"
    cluster = job.cluster
    optimizer_bytes = 3 * FP32_BYTES * job.model.num_parameters // (cluster.num_nodes if stage else 1)
    host_bytes = optimizer_bytes + job.model.num_parameters * job.precision.num_bytes
    cost_seconds = max(0.1, host_bytes / _ASSUMED_BYTES_PER_SECOND)
    mttf = job_mttf_seconds(mttf_per_gpu_seconds, MttfOf.GPU, cluster.num_nodes, cluster.ranks_per_node)
    interval = plan_interval(Saving(cost_seconds, mttf))
    save_every = _as_setting(interval.seconds)
    reason = (
        f"a checkpoint every {save_every}: of {format_bytes(host_bytes)} a host, written at 1 GB/s in"
        f" {format_seconds(cost_seconds)}, with a failure every {format_seconds(mttf)};"
        f" {interval.useful_share:.1%} of the time is useful then"
    )
    return save_every, reason if interval.warning is None else f"{reason}; {interval.warning}"


def _as_setting(seconds: float) -> str:
    # The optimum is flat: whole minutes, and later hours, are near enough.
    if seconds < 120:
        return f"{max(1, round(seconds))}s"
    return f"{round(seconds / 60)}min" if seconds < 4 * 3600 else f"{round(seconds / 3600)}h"
