"""The memory ladder: what to turn on next when memory is short, the least intrusive thing first."""

from __future__ import annotations

from dataclasses import dataclass

from ds_toolkit.plan.job import Cluster, Job
from ds_toolkit.plan.memory import Offload, RankMemory, rank_memory
from ds_toolkit.units import format_bytes

# The rest is for the CUDA context, kernels' workspace and fragmentation; on a host, for what else runs.
USABLE_FRACTION = 0.9


@dataclass(frozen=True)
class Rung:
    """One way to run the job.

    Attributes:
        name: what to call it.
        stage: the ZeRO stage.
        offload: what lies in host memory.
        memory: the need of one rank.
        device_bytes: the need of one GPU; None where the CPU does the work.
        host_bytes: the need of one host.
        fits: whether both needs are met.
        why: the need that decides, against what there is.
    """

    name: str
    stage: int
    offload: Offload
    memory: RankMemory
    device_bytes: int | None
    host_bytes: int
    fits: bool
    why: str


_RUNGS = (
    ("ZeRO 0", 0, Offload()),
    ("ZeRO 1", 1, Offload()),
    ("ZeRO 2", 2, Offload()),
    ("ZeRO 3", 3, Offload()),
    ("ZeRO 2, optimizer on host", 2, Offload(optimizer=True)),
    ("ZeRO 3, optimizer on host", 3, Offload(optimizer=True)),
    ("ZeRO 3, all states on host", 3, Offload(optimizer=True, parameters=True)),
)


def ladder(job: Job) -> list[Rung]:
    """Every rung for this job, in the order to climb; without GPUs there is nothing to offload from.

    ZeRO 1 moves no more bytes than plain data parallelism, ZeRO 2 the same, ZeRO 3 half as many again (ZeRO,
    arXiv 1910.02054, section 7); offloading adds a trip over PCIe and a slower optimizer to each step.
    """
    return [
        _rung(name, stage, offload, job)
        for name, stage, offload in _RUNGS
        if job.cluster.has_gpus or offload == Offload()
    ]


def choose(rungs: list[Rung], stage: int | None = None) -> Rung | None:
    """The first rung that fits, of one stage if it is given; None if none does.

    Without a stage ZeRO 0 is passed over: ZeRO 1 costs the same communication and less memory.
    """
    candidates = [rung for rung in rungs if (rung.stage == stage if stage is not None else rung.stage > 0)]
    return next((rung for rung in candidates if rung.fits), None)


def _rung(name: str, stage: int, offload: Offload, job: Job) -> Rung:
    memory = rank_memory(job, stage, offload)
    ranks_per_node = job.cluster.ranks_per_node
    device_bytes = memory.device_bytes if job.cluster.has_gpus else None
    host_bytes = (memory.host_bytes if job.cluster.has_gpus else memory.device_bytes) * ranks_per_node
    lack = _lack(device_bytes, host_bytes, job.cluster)
    enough = _comparison(device_bytes, host_bytes, job.cluster)
    return Rung(name, stage, offload, memory, device_bytes, host_bytes, lack is None, lack or enough)


def _lack(device_bytes: int | None, host_bytes: int, cluster: Cluster) -> str | None:
    lacks = []
    for need_bytes, have_bytes, place in (
        (device_bytes, cluster.device_memory_bytes, "GPU"),
        (host_bytes, cluster.host_memory_bytes, "host"),
    ):
        if not need_bytes:
            continue
        if have_bytes is None:
            lacks.append(f"the memory of a {place} is not known")
        elif need_bytes > have_bytes * USABLE_FRACTION:
            lacks.append(f"{format_bytes(need_bytes - have_bytes * USABLE_FRACTION)} a {place} too much")
    return ", ".join(lacks) or None


def _comparison(device_bytes: int | None, host_bytes: int, cluster: Cluster) -> str:
    if device_bytes is not None and cluster.device_memory_bytes is not None:
        return f"{device_bytes / cluster.device_memory_bytes:.1%} of a GPU"
    return f"{host_bytes / (cluster.host_memory_bytes or host_bytes):.1%} of a host"
