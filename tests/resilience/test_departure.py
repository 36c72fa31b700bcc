"""Whatever ends a rank, short of a kill, is heard first; and what the program does itself stays its own."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import jobs
import pytest

WORKER = Path(__file__).with_name("departing_worker.py")


def leave(tmp_path: Path, way: str, sent: int | None = None) -> tuple[int, list[str]]:
    """How it ended, and what was heard."""
    heard = tmp_path / "heard"
    with jobs.Job([sys.executable, WORKER, way, heard]) as job:
        if sent is not None:
            jobs.wait_until(heard.with_suffix(".ready").exists, 60, "the worker")
            os.kill(job.process.pid, sent)
        finished = job.wait(60)
    return finished.exit_code, heard.read_text().splitlines() if heard.exists() else []


@pytest.mark.parametrize(
    ("way", "exit_code", "heard"),
    [
        ("end", 0, ["END  in the main thread"]),
        ("exit", 3, ["END  in the main thread"]),
        ("exception", 1, ["EXCEPTION RuntimeError: CUDA error: an illegal memory access in the main thread"]),
        ("closed", 0, []),
        ("forked-worker-ends", 0, ["END  in the main thread"]),
        ("forked-worker-raises", 0, ["END  in the main thread"]),
        ("forked-worker-terminated", 0, ["END  in the main thread"]),
    ],
)
def test_an_end_of_the_program(tmp_path: Path, way: str, exit_code: int, heard: list[str]) -> None:
    assert leave(tmp_path, way) == (exit_code, heard)


@pytest.mark.parametrize("way", ["idle", "stuck"])
@pytest.mark.parametrize(("sent", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_a_signal(tmp_path: Path, way: str, sent: signal.Signals, exit_code: int) -> None:
    assert leave(tmp_path, way, sent) == (exit_code, [f"SIGNAL {sent.name} beside it"])


def test_a_program_that_handles_the_signal_itself_is_left_alone(tmp_path: Path) -> None:
    assert leave(tmp_path, "own-handler", signal.SIGTERM) == (7, ["END  in the main thread"])


def test_a_signal_that_prints_stacks_goes_on_printing_stacks(tmp_path: Path) -> None:
    """faulthandler's handlers are none that Python knows of."""
    heard = tmp_path / "heard"
    with jobs.Job([sys.executable, WORKER, "stacks", heard]) as job:
        jobs.wait_until(heard.with_suffix(".ready").exists, 60, "the worker")
        os.kill(job.process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        assert job.process.poll() is None
        os.kill(job.process.pid, signal.SIGTERM)
        finished = job.wait(60)
    assert finished.exit_code == 143
    assert "most recent call first" in finished.output
    assert heard.read_text().split() == ["SIGNAL", "SIGTERM", "beside", "it"]


def test_after_close_the_signal_is_what_it_was(tmp_path: Path) -> None:
    assert leave(tmp_path, "closed-then-signal", signal.SIGTERM) == (-signal.SIGTERM, [])
