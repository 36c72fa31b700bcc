"""Who is told when a process is told to end, with several guards that come and go in any order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import jobs
import pytest

PROGRAM = """
import os, signal, sys, time
from ds_toolkit.resilience.departure import Departure

def departure(name):
    # In one piece: several speak at once.
    return Departure(lambda why, detail: os.write(1, f"{{name}} {{why.name}} {{detail}}\\n".encode()))

{body}
os.kill(os.getpid(), signal.{signal})
time.sleep(20)
"""


def end(body: str, with_signal: str = "SIGTERM") -> tuple[int, list[str]]:
    """Exit code, and what was printed, of a program that is told to end."""
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(body=body, signal=with_signal)],
        env={**os.environ, "PYTHONPATH": os.fspath(jobs.REPOSITORY), "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    return finished.returncode, sorted(finished.stdout.splitlines())


@pytest.mark.parametrize("with_signal", ["SIGTERM", "SIGUSR1"])
def test_one_is_told(with_signal: str) -> None:
    code, told = end("one = departure('one')", with_signal)
    assert (code, told) == (128 + signal.Signals[with_signal], [f"one SIGNAL {with_signal}"])


def test_all_that_are_open_are_told() -> None:
    code, told = end("one, other = departure('one'), departure('other')")
    assert (code, told) == (143, ["one SIGNAL SIGTERM", "other SIGNAL SIGTERM"])


@pytest.mark.parametrize("first", ["one", "other"])
def test_one_is_told_after_another_has_closed(first: str) -> None:
    """Two engines with a guard each, one of which is done."""
    left = {"one": "other", "other": "one"}[first]
    code, told = end(f"one, other = departure('one'), departure('other'); {first}.close()")
    assert (code, told) == (143, [f"{left} SIGNAL SIGTERM"])


def test_after_the_last_has_closed_a_signal_ends_the_process_as_ever() -> None:
    body = "one, other = departure('one'), departure('other'); one.close(); other.close()"
    assert end(body) == (-signal.SIGTERM, [])
    assert end(f"{body}; again = departure('again')") == (143, ["again SIGNAL SIGTERM"])


def test_a_listener_of_the_program_is_left_alone() -> None:
    body = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); one = departure('one')"
    assert end(body) == (5, ["one END "])
