"""What this host's kernel says of processes that it ended: its log and the counters of this control group."""

from __future__ import annotations

import os
import re
from pathlib import Path

_MAX_BYTES = 2**22
_EVENT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
CGROUP = Path("/sys/fs/cgroup")


def kernel_log() -> bytes:
    """The kernel's ring buffer, where this user may read it; else nothing."""
    try:
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return b""
    records = []
    size = 0
    try:
        while size < _MAX_BYTES:
            try:
                record = os.read(descriptor, 8192)
            except BrokenPipeError:
                # Records were overwritten meanwhile; the next read goes on behind them.
                continue
            records.append(record.partition(b";")[2])
            size += len(record)
    except OSError:
        pass
    finally:
        os.close(descriptor)
    return b"".join(records)


def cgroup_kills(cgroup: Path = CGROUP) -> int | None:
    """How many processes this control group's limit has ended so far; None where it is not told."""
    for name in ("memory.events", "memory/memory.oom_control"):
        try:
            match = _EVENT.search((cgroup / name).read_text())
        except (OSError, UnicodeDecodeError):
            continue
        if match is not None:
            return int(match[1])
    return None
