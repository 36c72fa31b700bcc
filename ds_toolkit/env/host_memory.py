"""How much memory processes here may still take, before the kernel or a cgroup's limit ends one of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from ds_toolkit.env.fabric import cgroup_folders, text_of

# Names of: the limit, what is used, and in `memory.stat` the part of it that the kernel gives up first.
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def free_memory_bytes(root: Path = Path("/")) -> int | None:
    """The least of what the host has available and every cgroup above this process; None if unknown.

    Sources: MemAvailable in proc(5); the kernel's Documentation/admin-guide/cgroup-v2.rst and
    cgroup-v1/memory.rst. Pages of files that nobody has used lately count as free.

    Args:
        root: of the file system, for tests.
    """
    available = re.search(r"^MemAvailable:\s*(\d+) kB", text_of(root / "proc/meminfo"), re.MULTILINE)
    found = [int(available[1]) * 1024] if available else []
    found += _free_in_cgroups(root)
    return min(found, default=None)


def _free_in_cgroups(root: Path) -> Iterator[int]:
    folders = [(folder, _VERSION_2) for folder in cgroup_folders(root)]
    for folder, names in [*folders, (root / "sys/fs/cgroup/memory", _VERSION_1)]:
        limit, used = (text_of(folder / name).strip() for name in names[:2])
        if limit.isdigit() and used.isdigit():
            given_up = re.search(rf"^{names[2]} (\d+)$", text_of(folder / "memory.stat"), re.MULTILINE)
            yield max(0, int(limit) - int(used) + (int(given_up[1]) if given_up else 0))
