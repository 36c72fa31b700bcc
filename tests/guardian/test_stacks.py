"""Processes that are asked for their stacks, and what is left alone by that."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from typing import Any

import jobs
import pytest

from ds_toolkit.guardian.control import StacksOffer
from ds_toolkit.guardian.processes import start_ticks
from ds_toolkit.guardian.stacks import Stacks, stacks_of

PROGRAM = """
import faulthandler, os, signal, sys, threading, time
from ds_toolkit.guardian import stacks

{before}
offer = stacks.offer_stacks()
assert stacks.offer_stacks() is offer
print(offer and (offer.signal, offer.descriptor, offer.main_thread), flush=True)
threading.Thread(target=lambda: sys.stdin.readline(), name="second", daemon=True).start()

def stuck():
    # As in a collective: the main thread runs no bytecode.
    lock = threading.Lock()
    lock.acquire()
    lock.acquire(timeout=30)

{body}
"""


class Program:
    """A process with an offer; leaving the block ends it."""

    def __init__(self, before: str = "", body: str = "stuck()") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(before=before, body=body)],
            env={**os.environ, "PYTHONPATH": os.fspath(jobs.REPOSITORY)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdout is not None
        offered: Any = ast.literal_eval(self.process.stdout.readline())
        self.offer = None if offered is None else StacksOffer(*offered)

    def ask(self) -> Stacks:
        ticks = start_ticks(self.process.pid)
        assert ticks is not None
        return stacks_of({7: (self.process.pid, ticks, self.offer)})[7]

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=10)


def test_the_stacks_of_a_process_whose_main_thread_is_stuck() -> None:
    with Program() as program:
        jobs.wait_until(lambda: [f.function for f in program.ask().main][:1] == ["stuck"], 10, "stuck")
        # As often as one likes; each answer is of its own moment.
        answer = program.ask()
        assert [frame.function for frame in answer.main] == ["stuck", "<module>"]
        assert answer.text.count("Current thread") == 1
        assert "in <lambda>" in answer.text
        assert answer.why_none == ""
        assert program.process.poll() is None


def test_what_the_program_has_told_faulthandler_stays() -> None:
    before = "faulthandler.enable(); faulthandler.register(signal.SIGUSR1, file=sys.stdout, chain=False)"
    with Program(before, "print(faulthandler.is_enabled(), flush=True); stuck()") as program:
        assert program.process.stdout is not None
        assert program.process.stdout.readline() == "True\n"
        jobs.wait_until(lambda: program.ask().main, 10, "an answer")
        program.process.send_signal(signal.SIGUSR1)
        assert "most recent call first" in program.process.stdout.readline()
        assert "most recent call first" in program.ask().text


@pytest.mark.parametrize(
    "taken",
    [
        "signal.signal(n, lambda *_: None)",
        "signal.signal(n, signal.SIG_IGN)",
        "signal.pthread_sigmask(signal.SIG_BLOCK, [n])",
        "faulthandler.register(n)",
    ],
)
def test_a_signal_that_somebody_uses_is_not_taken(taken: str) -> None:
    with Program() as program:
        assert program.offer is not None
        usual = program.offer.signal
    with Program(f"n = {usual}; {taken}") as program:
        assert program.offer is not None
        assert program.offer.signal == usual + 1
    with Program(f"for n in range({usual}, signal.SIGRTMAX + 1): {taken}") as program:
        assert program.offer is None
        assert program.ask().why_none == "it had no signal to spare"


def test_a_process_that_listens_no_more_is_not_ended_by_being_asked() -> None:
    with Program(body="faulthandler.unregister(offer.signal); print('now', flush=True); stuck()") as program:
        assert program.process.stdout is not None
        assert program.process.stdout.readline() == "now\n"
        assert program.ask().why_none == "it does not listen to the signal any more"
        assert program.process.poll() is None


def test_a_process_that_does_not_answer() -> None:
    body = "signal.pthread_sigmask(signal.SIG_BLOCK, [offer.signal]); print('now', flush=True); stuck()"
    # All threads block it, the second one included.
    before = "import threading; threading.Thread.start = lambda self: None"
    with Program(before, body) as program:
        assert program.process.stdout is not None
        assert program.process.stdout.readline() == "now\n"
        assert program.ask().why_none == "it gave no answer within 2 s"


def test_a_process_that_is_gone() -> None:
    with Program() as program:
        ticks = start_ticks(program.process.pid)
        program.process.kill()
        program.process.wait(timeout=10)
        answer = stacks_of({0: (program.process.pid, ticks or 0, program.offer)})[0]
        assert answer.text == ""
        assert answer.why_none
