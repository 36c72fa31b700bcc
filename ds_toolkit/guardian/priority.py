"""The guardian gives way to the ranks while it writes a periodic checkpoint, but not for last words.

Two things of Linux: each thread has a nice value of its own (setpriority(2), "C library/kernel differences"),
and where sessions share the processors (sched(7), "The autogroup feature") that counts inside the session
alone, and the session has one as well. The session's may be lowered again without a privilege, the thread's
may not.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

# A tenth of what a thread gets that trains.
_NICE = 10
_SESSION = Path("/proc/self/autogroup")


def give_way_in_this_thread() -> None:
    """The calling thread gives way from now on, for good."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def give_way(gives_way: bool) -> None:
    """Whether all of this session gives way to others; does nothing where sessions share nothing."""
    with contextlib.suppress(OSError):
        _SESSION.write_text(str(_NICE if gives_way else 0))
