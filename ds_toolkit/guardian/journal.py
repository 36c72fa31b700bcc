"""What the guardian has to say: lines on its standard error, which is the log in the arena."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback


def note(text: str) -> None:
    """One thing that happened, with the time."""
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    # The log lies on tmpfs, which may be full: no reason to fail at what is being told.
    with contextlib.suppress(OSError):
        print(f"{now} guardian {os.getpid()}: {text}", file=sys.stderr, flush=True)


def note_failure(text: str) -> None:
    """The same with the traceback of the exception that is being handled: a mistake of ours."""
    note(f"{text}\n{traceback.format_exc()}")
