from __future__ import annotations

import os
from pathlib import Path

from ds_toolkit.env.fabric import Gpu, detect_host, has_infiniband


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def fake_tool(folder: Path, script: str) -> str:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    return str(tool)


def test_gpus_are_what_the_driver_lists(tmp_path: Path) -> None:
    rows = "NVIDIA H200, 143771\nGH200, rev 2, 97871\nNVIDIA Thor, [N/A]"
    tool = fake_tool(tmp_path, f"[ $1 = --query-gpu=name,memory.total ] && printf '%s\\n' '{rows}'")
    assert detect_host(tmp_path, tool).gpus == (
        Gpu("NVIDIA H200", 143771 * 2**20),
        Gpu("GH200, rev 2", 97871 * 2**20),
    )


def test_without_a_tool_or_a_driver_there_are_no_gpus(tmp_path: Path) -> None:
    assert detect_host(tmp_path, "no-such-tool").gpus == ()
    assert detect_host(tmp_path, fake_tool(tmp_path, "echo 'X, 1'; exit 9")).gpus == ()


def test_an_empty_root_is_a_host_of_which_little_is_known(tmp_path: Path) -> None:
    host = detect_host(tmp_path, "no-such-tool")
    assert (host.memory_bytes, host.infiniband_devices, host.network_interfaces) == (None, (), ())
    assert host.num_cpus == len(os.sched_getaffinity(0))


def test_the_least_limit_on_the_way_up_holds(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", "MemTotal:       16384 kB\nMemFree: 1 kB\n")
    assert detect_host(tmp_path, "none").memory_bytes == 16384 * 1024
    write(tmp_path, "proc/self/cgroup", "1:cpu:/x\n0::/job/step\n")
    write(tmp_path, "sys/fs/cgroup/job/step/memory.max", "max\n")
    assert detect_host(tmp_path, "none").memory_bytes == 16384 * 1024
    write(tmp_path, "sys/fs/cgroup/job/memory.max", "4096\n")
    assert detect_host(tmp_path, "none").memory_bytes == 4096
    write(tmp_path, "sys/fs/cgroup/memory.max", "1024\n")
    assert detect_host(tmp_path, "none").memory_bytes == 1024


def test_the_older_cgroup_counts_unless_it_sets_no_limit(tmp_path: Path) -> None:
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert detect_host(tmp_path, "none").memory_bytes is None
    write(tmp_path, "proc/meminfo", "MemTotal: 16384 kB\n")
    assert detect_host(tmp_path, "none").memory_bytes == 16384 * 1024
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", "2048\n")
    assert detect_host(tmp_path, "none").memory_bytes == 2048


def test_a_quota_of_processors_counts(tmp_path: Path) -> None:
    write(tmp_path, "sys/fs/cgroup/cpu.max", "50000 100000\n")
    assert detect_host(tmp_path, "none").num_cpus == 1
    write(tmp_path, "sys/fs/cgroup/cpu.max", "max 100000\n")
    assert detect_host(tmp_path, "none").num_cpus == len(os.sched_getaffinity(0))


def test_devices_are_the_names_in_sys(tmp_path: Path) -> None:
    for name in ("class/infiniband/mlx5_1", "class/infiniband/mlx5_0", "class/net/lo", "class/net/eth0"):
        (tmp_path / "sys" / name).mkdir(parents=True)
    host = detect_host(tmp_path, "none")
    assert host.infiniband_devices == ("mlx5_0", "mlx5_1")
    assert host.network_interfaces == ("eth0", "lo")


def test_infiniband_is_unknown_on_a_host_without_gpus(tmp_path: Path) -> None:
    assert has_infiniband(tmp_path) is None
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    assert has_infiniband(tmp_path) is False
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert has_infiniband(tmp_path) is True
