"""Ending ranks that hang, once their last words are spoken."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection

from ds_toolkit.guardian.journal import note
from ds_toolkit.guardian.processes import is_alive, process_state
from ds_toolkit.guardian.ranks import LocalRank

GRACE_SECONDS = 5.0
_LOOK_SECONDS = 0.05


def end_ranks(ranks: Collection[LocalRank]) -> None:
    """SIGTERM, and SIGKILL to those that are still there five seconds later, or that are stopped."""
    processes = [known.process for known in ranks if known.process is not None and not known.said_goodbye]
    for pid, ticks in processes:
        number = signal.SIGKILL if process_state(pid) in ("T", "t") else signal.SIGTERM
        _send(pid, ticks, number)
    deadline = time.monotonic() + GRACE_SECONDS
    while any(is_alive(*process) for process in processes) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
    for pid, ticks in processes:
        _send(pid, ticks, signal.SIGKILL)


def _send(pid: int, ticks: int, number: signal.Signals) -> None:
    with contextlib.suppress(OSError):
        if is_alive(pid, ticks):
            note(f"{number.name} to process {pid}, which hangs")
            os.kill(pid, number)
