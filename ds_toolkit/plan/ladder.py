"""The memory ladder: what to turn on next when memory is short, the least intrusive thing first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ds_toolkit.plan.communication import step_seconds, step_traffic
from ds_toolkit.plan.job import Cluster, Job
from ds_toolkit.plan.memory import Offload, RankMemory, rank_memory
from ds_toolkit.plan.network import Network
from ds_toolkit.units import format_bytes

# The rest is for the CUDA context and kernels' workspace; on a host, for what else runs.
USABLE_FRACTION = 0.95
USABLE_HOST_FRACTION = 0.9

_IN_MEMORY = Offload()
_OPTIMIZER = Offload(optimizer=True)
_ALL_STATES = Offload(optimizer=True, parameters=True)
_ALL_ON_NVME = Offload(optimizer=True, parameters=True, nvme=True)


@dataclass(frozen=True)
class Rung:
    """One way to run the job.

    Attributes:
        name: what to call it.
        stage: the ZeRO stage.
        offload: what lies in host memory or on NVMe.
        job: the job as it runs here: the micro batch, and whether activations are computed again.
        memory: the need of one rank.
        device_bytes: the need of one GPU; None where the CPU does the work.
        host_bytes: the need of one host.
        nvme_bytes: what lies on one host's NVMe.
        communication_seconds: of one optimizer step; None where the network is not known.
        fits: whether both needs are met.
        why: the need that decides, against what there is.
    """

    name: str
    stage: int
    offload: Offload
    job: Job
    memory: RankMemory
    device_bytes: int | None
    host_bytes: int
    nvme_bytes: int
    communication_seconds: float | None
    fits: bool
    why: str


def ladder(
    job: Job, network: Network | None = None, *, stage: int | None = None, nvme: bool = False
) -> list[Rung]:
    """Every rung for this job, in the order to climb; without GPUs there is nothing to offload from.

    Partitioning costs communication alone. A smaller micro batch with as many more accumulation steps keeps
    the result and uses the GPU less well. Recomputing activations costs a third of the compute (Korthikanti
    et al. 2022, arXiv 2205.05198, section 5). Offloading adds trips over the bus and an optimizer on the CPU.

    Args:
        job: with the micro batch that is wished for.
        network: the slowest that a collective crosses.
        stage: take the rungs beyond partitioning for this stage, not for stages 2 and 3.
        nvme: whether there is an NVMe drive to offload to.
    """
    return list(_climb(job, network, stage, nvme))


def choose(rungs: list[Rung], stage: int | None = None) -> Rung | None:
    """The first rung that fits, of one stage if it is given; None if none does.

    Without a stage ZeRO 0 is passed over: ZeRO 1 needs less memory.
    """
    candidates = [rung for rung in rungs if (rung.stage == stage if stage is not None else rung.stage > 0)]
    return next((rung for rung in candidates if rung.fits), None)


def _climb(job: Job, network: Network | None, stage: int | None, nvme: bool) -> Iterator[Rung]:
    highest = 3 if stage is None else stage
    for plain in range(4):
        yield _rung(plain, _IN_MEMORY, job, network)
    if job.micro_batch_size > 1:
        yield _largest_micro_batch(highest, _IN_MEMORY, _halved(job), network)
    recomputing = replace(job, recompute_activations=True)
    yield _largest_micro_batch(highest, _IN_MEMORY, recomputing, network)
    if not job.cluster.has_gpus:
        return
    for offloading in (2, 3) if stage is None else (highest,):
        if offloading > 0:
            yield _largest_micro_batch(offloading, _OPTIMIZER, recomputing, network)
    if highest == 3:
        yield _largest_micro_batch(3, _ALL_STATES, recomputing, network)
        if nvme:
            yield _largest_micro_batch(3, _ALL_ON_NVME, recomputing, network)


def _halved(job: Job) -> Job:
    # The smallest prime factor keeps the global batch what it was.
    size = job.micro_batch_size
    factor = next(factor for factor in range(2, size + 1) if size % factor == 0)
    return replace(job, micro_batch_size=size // factor, accumulation_steps=job.accumulation_steps * factor)


def _largest_micro_batch(stage: int, offload: Offload, job: Job, network: Network | None) -> Rung:
    rung = _rung(stage, offload, job, network)
    while not rung.fits and job.micro_batch_size > 1:
        job = _halved(job)
        rung = _rung(stage, offload, job, network)
    return rung


def _rung(stage: int, offload: Offload, job: Job, network: Network | None) -> Rung:
    memory, cluster = rank_memory(job, stage, offload), job.cluster
    device_bytes = memory.device.total_bytes if cluster.has_gpus else None
    one_rank_bytes = memory.host.total_bytes if cluster.has_gpus else memory.device.total_bytes
    host_bytes = one_rank_bytes * cluster.ranks_per_node
    seconds = None
    if network is not None:
        seconds = step_seconds(step_traffic(job, stage, offload), network, cluster.ranks_per_node)
    lack = _lack(device_bytes, host_bytes, cluster)
    return Rung(
        name=_name(stage, offload, job),
        stage=stage,
        offload=offload,
        job=job,
        memory=memory,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        nvme_bytes=memory.nvme_bytes * cluster.ranks_per_node,
        communication_seconds=seconds,
        fits=lack is None,
        why=lack or _comparison(device_bytes, host_bytes, cluster),
    )


def _name(stage: int, offload: Offload, job: Job) -> str:
    parts = [f"ZeRO {stage}"]
    if offload.optimizer:
        place = "NVMe" if offload.nvme else "host"
        parts.append(f"{'all states' if offload.parameters else 'optimizer'} on {place}")
    if job.recompute_activations:
        parts.append("activations recomputed")
    return ", ".join([*parts, f"micro batch {job.micro_batch_size} x {job.accumulation_steps}"])


def _lack(device_bytes: int | None, host_bytes: int, cluster: Cluster) -> str | None:
    lacks = []
    for need_bytes, have_bytes, fraction, place in (
        (device_bytes, cluster.device_memory_bytes, USABLE_FRACTION, "GPU"),
        (host_bytes, cluster.host_memory_bytes, USABLE_HOST_FRACTION, "host"),
    ):
        if not need_bytes:
            continue
        if have_bytes is None:
            lacks.append(f"the memory of a {place} is not known")
        elif need_bytes > have_bytes * fraction:
            lacks.append(f"{format_bytes(need_bytes - have_bytes * fraction)} a {place} too much")
    return ", ".join(lacks) or None


def _comparison(device_bytes: int | None, host_bytes: int, cluster: Cluster) -> str:
    if device_bytes is not None and cluster.device_memory_bytes is not None:
        return f"{device_bytes / cluster.device_memory_bytes:.1%} of a GPU"
    return f"{host_bytes / (cluster.host_memory_bytes or host_bytes):.1%} of a host"
