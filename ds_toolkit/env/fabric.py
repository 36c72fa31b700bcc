"""What this host has: GPUs, memory, processors, InfiniBand devices and network interfaces."""

from __future__ import annotations

import math
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

_NVIDIA_SMI_TIMEOUT_SECONDS = 20
# Without a limit, version 1 of the cgroups reports the largest page-aligned 64-bit number.
_NO_LIMIT_BYTES = 2**60


@dataclass(frozen=True)
class Gpu:
    """One GPU by its name and its whole memory."""

    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Host:
    """What one host has.

    Attributes:
        gpus: in the order of nvidia-smi; empty where there is no such tool or driver.
        memory_bytes: what processes here may use, a cgroup's limit counted; None if unknown.
        num_cpus: processors that this process may use, a cgroup's quota counted.
        infiniband_devices: InfiniBand and RoCE devices, such as mlx5_0.
        network_interfaces: all of them, `lo` included.
    """

    gpus: tuple[Gpu, ...]
    memory_bytes: int | None
    num_cpus: int
    infiniband_devices: tuple[str, ...]
    network_interfaces: tuple[str, ...]


def detect_host(root: Path = Path("/"), nvidia_smi: str = "nvidia-smi") -> Host:
    """Look at this host; `root` is where /proc and /sys are. What cannot be read counts as not there."""
    quota = _cpu_quota(root)
    num_cpus = len(os.sched_getaffinity(0))
    return Host(
        gpus=gpus(nvidia_smi),
        memory_bytes=min(
            filter(None, (_machine_memory_bytes(root), _memory_limit_bytes(root))), default=None
        ),
        num_cpus=num_cpus if quota is None else min(num_cpus, max(1, math.ceil(quota))),
        infiniband_devices=_names(root / "sys/class/infiniband"),
        network_interfaces=_names(root / "sys/class/net"),
    )


def has_infiniband(root: Path = Path("/")) -> bool | None:
    """Whether this host has InfiniBand or RoCE devices; None on one without GPUs, which trains nothing."""
    if not (root / "proc/driver/nvidia").is_dir():
        return None
    return bool(_names(root / "sys/class/infiniband"))


def gpus(nvidia_smi: str = "nvidia-smi") -> tuple[Gpu, ...]:
    """The GPUs of this host as its driver reports them; none where there is no driver."""
    command = [nvidia_smi, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        listing = subprocess.run(
            command, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    # Memory is in MiB; devices that share the host's memory report `[N/A]`.
    rows = re.findall(r"^(.+), *(\d+)$", listing, re.MULTILINE)
    return tuple(Gpu(name, int(mebibytes) * 2**20) for name, mebibytes in rows)


def _machine_memory_bytes(root: Path) -> int | None:
    match = re.search(r"^MemTotal:\s*(\d+) kB", text_of(root / "proc/meminfo"), re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _memory_limit_bytes(root: Path) -> int | None:
    limits = [
        text_of(folder / name).strip()
        for folder, name in [
            *((folder, "memory.max") for folder in cgroup_folders(root)),
            (root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        ]
    ]
    numbers = [int(limit) for limit in limits if limit.isdigit() and int(limit) < _NO_LIMIT_BYTES]
    return min(numbers, default=None)


def _cpu_quota(root: Path) -> float | None:
    quotas = []
    for folder in cgroup_folders(root):
        quota, _, period = text_of(folder / "cpu.max").strip().partition(" ")
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def cgroup_folders(root: Path) -> list[Path]:
    """The folders of this process's cgroup and of those above it, the nearest first (version 2)."""
    # A limit may stand at any level above this process; in a container its own level is the mount's root.
    top = root / "sys/fs/cgroup"
    match = re.search(r"^0::/(.*)$", text_of(root / "proc/self/cgroup"), re.MULTILINE)
    own = top / (match[1] if match else "")
    return [own, *(parent for parent in own.parents if parent == top or top in parent.parents)]


def _names(folder: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(entry.name for entry in folder.iterdir()))
    except OSError:
        return ()


def text_of(path: Path) -> str:
    """The text of one of the kernel's files; empty where there is none."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
