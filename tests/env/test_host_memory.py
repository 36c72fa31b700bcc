"""What may still be taken: the least of the host's memory and every limit above this process."""

from __future__ import annotations

from pathlib import Path

from ds_toolkit.env.host_memory import free_memory_bytes


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_host_without_limits(tmp_path: Path) -> None:
    assert free_memory_bytes(tmp_path) is None
    write(tmp_path, "proc/meminfo", "MemTotal: 900 kB\nMemAvailable:     800 kB\n")
    assert free_memory_bytes(tmp_path) == 800 * 1024
    write(tmp_path, "sys/fs/cgroup/memory.max", "max\n")
    write(tmp_path, "sys/fs/cgroup/memory.current", "5\n")
    assert free_memory_bytes(tmp_path) == 800 * 1024


def test_a_limit_at_any_level(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", "MemAvailable: 800 kB\n")
    write(tmp_path, "proc/self/cgroup", "0::/job/step\n")
    write(tmp_path, "sys/fs/cgroup/job/memory.max", "100000\n")
    write(tmp_path, "sys/fs/cgroup/job/memory.current", "70000\n")
    assert free_memory_bytes(tmp_path) == 30000
    # Pages of files that nobody has used lately go first.
    write(tmp_path, "sys/fs/cgroup/job/memory.stat", "anon 50000\ninactive_file 20000\nactive_file 7\n")
    assert free_memory_bytes(tmp_path) == 50000
    write(tmp_path, "sys/fs/cgroup/job/step/memory.max", "10000\n")
    write(tmp_path, "sys/fs/cgroup/job/step/memory.current", "12000\n")
    assert free_memory_bytes(tmp_path) == 0


def test_the_first_version_of_cgroups(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory"
    write(tmp_path, "proc/meminfo", "MemAvailable: 800 kB\n")
    write(tmp_path, f"{folder}/memory.limit_in_bytes", "60000\n")
    write(tmp_path, f"{folder}/memory.usage_in_bytes", "50000\n")
    write(tmp_path, f"{folder}/memory.stat", "inactive_file 1\ntotal_inactive_file 4000\n")
    assert free_memory_bytes(tmp_path) == 14000


def test_this_machine() -> None:
    free = free_memory_bytes()
    assert free is not None
    assert free > 2**20
