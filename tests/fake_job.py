"""A job without torch: a rank of its own, a real guardian, and a death.

    fake_job.py DIRECTORY STEP

The rank fills a slot of the step and dies by SIGKILL a second later. Its guardian, stopped by then, begins
its last words another second later.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import fake_rank

from ds_toolkit.guardian.arena import Arena, arena_root

arena = Arena.create(fake_rank.job(Path(sys.argv[1]), uuid.uuid4().hex[:8], nodes=(0,)), arena_root())
rank = fake_rank.Rank(arena, 0, num_slots=3)
rank.start()
rank.connect()
rank.write(int(sys.argv[2]))
# Long enough to be seen from outside.
time.sleep(1)
guardian = arena.guardian()
assert guardian is not None
os.kill(guardian[0], signal.SIGSTOP)
# No variable marks it as a part of the job.
later = ["/bin/sh", "-c", f"sleep 1; kill -CONT {guardian[0]}"]
subprocess.Popen(later, env={}, start_new_session=True)
os.kill(os.getpid(), signal.SIGKILL)
