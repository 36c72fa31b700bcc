"""Run alone: leaves in one of several ways, and writes what was heard of it to a file.

departing_worker.py WAY FILE
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from pathlib import Path

from ds_toolkit.guardian.control import Leaving
from ds_toolkit.resilience.departure import Departure


def main() -> None:
    way, file = sys.argv[1], Path(sys.argv[2])
    if way == "stacks":
        faulthandler.register(signal.SIGUSR1)
    if way == "own-handler":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))

    def leave(why: Leaving, detail: str) -> None:
        with file.open("a") as heard:
            is_main = threading.current_thread() is threading.main_thread()
            heard.write(f"{why.name} {detail} {'in the main thread' if is_main else 'beside it'}\n")

    departure = Departure(leave)
    if way == "end":
        return
    if way == "exit":
        sys.exit(3)
    if way == "exception":
        raise RuntimeError("CUDA error: an illegal memory access\nand more")
    if way == "closed":
        departure.close()
        return
    if way == "closed-then-signal":
        departure.close()
    file.with_suffix(".ready").touch()
    if way.startswith("forked-worker"):
        # A data loading worker: whatever becomes of it, it does not speak for the rank.
        child = os.fork()
        if child == 0:
            if way.endswith("raises"):
                raise ValueError("of the worker")
            if way.endswith("terminated"):
                time.sleep(60)
            return
        if way.endswith("terminated"):
            os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        expected = {"ends": 0, "raises": 1, "terminated": -signal.SIGTERM}[way.rpartition("-")[2]]
        assert os.waitstatus_to_exitcode(status) == expected
        # Were it heard, it would be by now.
        time.sleep(0.3)
        return
    if way == "stuck":
        # As in a collective: no bytecode of the main thread runs until this lock is released.
        lock = threading.Lock()
        lock.acquire()
        signal.pthread_sigmask(signal.SIG_BLOCK, [])
        time.sleep(0)
        lock.acquire(timeout=60)
        return
    time.sleep(60)


main()
