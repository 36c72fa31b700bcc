"""Periodic checkpoints are written while the ranks leave processors idle; last words do not wait for that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jobs

SCRIPT = """
import os, threading
from pathlib import Path
from ds_toolkit.guardian.priority import give_way, give_way_in_this_thread

def look():
    session = Path("/proc/self/autogroup")
    nice_of_session = session.read_text().split()[-1] if session.exists() else "none"
    print(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), nice_of_session)

def work():
    give_way_in_this_thread()
    look()

thread = threading.Thread(target=work)
thread.start()
thread.join()
for gives_way in (True, False):
    give_way(gives_way)
    look()
"""


def test_one_thread_gives_way_and_the_session_for_a_while() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=jobs.REPOSITORY,
        start_new_session=True,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    has_sessions = Path("/proc/self/autogroup").exists()
    expected = [("10", "0"), ("0", "10"), ("0", "0")]
    assert done.stdout.splitlines() == [
        f"{thread} {session if has_sessions else 'none'}" for thread, session in expected
    ]
