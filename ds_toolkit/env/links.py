"""How fast this host's links to other hosts are."""

from __future__ import annotations

import re
from pathlib import Path

from ds_toolkit.env.interfaces import is_virtual


def fastest_links(root: Path = Path("/")) -> str | None:
    """The links to other hosts, as `4x200Gb-IB` or `25GbE`; None where the kernel does not tell.

    All active InfiniBand and RoCE ports together, since NCCL uses them all; else the fastest interface that
    is up, since sockets go over one. `root` is where /sys is.
    """
    rates = [
        float(match[1])
        for port in sorted((root / "sys/class/infiniband").glob("*/ports/*"))
        if "ACTIVE" in _text(port / "state")
        for match in [re.match(r"\s*(\d+(?:\.\d+)?) Gb/sec", _text(port / "rate"))]
        if match
    ]
    if rates:
        count = f"{len(rates)}x" if len(rates) > 1 else ""
        return f"{count}{min(rates):g}Gb-IB"
    speeds = [
        int(speed)
        for interface in (root / "sys/class/net").glob("*")
        if not is_virtual(interface.name) and _text(interface / "operstate").strip() == "up"
        for speed in [_text(interface / "speed").strip()]
        if speed.isdigit() and int(speed) > 0
    ]
    return f"{max(speeds) / 1000:g}GbE" if speeds else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
