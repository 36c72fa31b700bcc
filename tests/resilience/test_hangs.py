"""Real engines that stand still, and what is said of it."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import jobs
import pytest

from ds_toolkit.checkpoint.incident import Hang, Incident, incidents

WORKER = Path(__file__).with_name("hang_worker.py")
START_SECONDS = 90.0


def await_incident(job: jobs.Job, directory: Path, timeout_seconds: float = START_SECONDS) -> Incident:
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        if found := incidents(directory):
            return found[0]
        assert job.process.poll() is None, job.output()[-6000:]
        time.sleep(0.05)
    raise AssertionError(f"nothing was said within {timeout_seconds} s\n{job.output()[-6000:]}")


def await_file(job: jobs.Job, path: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not path.exists():
        assert job.process.poll() is None, job.output()[-6000:]
        assert time.monotonic() < deadline, f"no {path.name}\n{job.output()[-6000:]}"
        time.sleep(0.05)


class Stories:
    """A job that stands still several times, helped on its way by what a test would do at each."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.uneven_seconds = 0.0
        self.output = ""

    def run(self) -> None:
        names = ["checks", "slow", "evaluation", "stuck_loader", "stopped", "uneven"]
        command = jobs.torchrun_command(WORKER, self.root, *names)
        with jobs.Job(command, log=self.root / "log") as job:
            await_incident(job, self.root / "stuck_loader")
            (self.root / "stuck_loader.go").touch()
            await_file(job, self.root / "stopped.pid1")
            await_file(job, self.root / "stopped.pid0")
            stopped = int((self.root / "stopped.pid1").read_text())
            os.kill(stopped, signal.SIGSTOP)
            await_incident(job, self.root / "stopped")
            os.kill(stopped, signal.SIGCONT)
            (self.root / "stopped.go").touch()
            await_file(job, self.root / "uneven.left1")
            begun = time.monotonic()
            await_incident(job, self.root / "uneven")
            self.uneven_seconds = time.monotonic() - begun
            # The line comes after the incident.
            jobs.wait_until(lambda: "left its loop" in job.output(), 10, "the line in the log")
            self.output = job.output()
            assert job.process.poll() is None

    def hang(self, name: str) -> Hang:
        (incident,) = incidents(self.root / name)
        assert (incident.event, incident.outcome) == ("hang", "reported")
        assert incident.hang is not None
        return incident.hang


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Stories:
    told = Stories(tmp_path_factory.mktemp("hangs"))
    told.run()
    return told


def test_what_is_slow_is_no_hang(stories: Stories) -> None:
    assert (stories.root / "slow.done").exists()
    assert (stories.root / "slow" / "slow").is_dir()
    assert incidents(stories.root / "slow") == []


def test_a_long_evaluation_is_reported_and_never_ended(stories: Stories) -> None:
    assert (stories.root / "evaluation.done").exists()
    hang = stories.hang("evaluation")
    assert hang.what.startswith("ranks 0, 1 are between two batches, after 2 batches, at hang_worker.py:")
    assert "in evaluation" in hang.what
    assert hang.what.endswith(
        "No rank is inside a step: an evaluation, or other work of the program, looks the same."
    )
    assert "it moves again" in stories.output


def test_a_stuck_data_loader(stories: Stories) -> None:
    assert (stories.root / "stuck_loader.done").exists()
    hang = stories.hang("stuck_loader")
    assert hang.what.startswith("rank 1 waits for the data of batch 4, at hang_worker.py:")
    assert " in train; rank 0 waits in " in hang.what
    assert hang.what.endswith(" of batch 4.")
    assert all("hang_worker.py" in rank.stacks for rank in hang.ranks)
    assert "torch/utils/data/dataloader.py" in hang.ranks[1].stacks


def test_a_stopped_rank(stories: Stories) -> None:
    assert (stories.root / "stopped.done").exists()
    hang = stories.hang("stopped")
    assert "rank 1 is stopped by a signal" in hang.what
    assert hang.ranks[1].stacks == "none: it is stopped by a signal"
    assert "hang_worker.py" in hang.ranks[0].stacks


def test_uneven_batches_name_the_rank_that_ran_out(stories: Stories) -> None:
    assert (stories.root / "uneven.left1").exists()
    assert not (stories.root / "uneven.left0").exists()
    assert stories.uneven_seconds < 15
    hang = stories.hang("uneven")
    assert hang.what.startswith("rank 1 left its loop after 37 batches; rank 0 waits in ")
    assert hang.what.endswith(" of batch 38.")
    assert f"HANG: {hang}" in stories.output
    # Both stand in C, and their stacks are there.
    assert all("hang_worker.py" in rank.stacks for rank in hang.ranks)
    assert "in close" in hang.ranks[1].stacks


def test_last_words_of_a_hang_and_a_resume_that_is_bit_identical(tmp_path: Path) -> None:
    """Rank 0 alone saves by DeepSpeed's own call, for which it waits for the others."""
    directory = tmp_path / "rank_0_saves"
    with jobs.Job(jobs.torchrun_command(WORKER, tmp_path, "rank_0_saves"), log=tmp_path / "log") as job:
        finished = job.wait(120)
    assert finished.exit_code != 0
    (incident,) = incidents(directory)
    assert (incident.event, incident.outcome, incident.tag) == ("hang", "complete", "global_step4")
    assert incident.hang is not None
    assert incident.hang.what.startswith("rank 0 is saving a checkpoint after 8 batches, at hang_worker.py:")
    assert "rank 1 waits in " in incident.hang.what
    assert f"HANG: {incident.hang}" in finished.output
    assert "in save_checkpoint" in incident.hang.ranks[0].stacks
    jobs.run(jobs.torchrun_command(WORKER, tmp_path, "reference", "goes_on")).check()
    for rank in range(2):
        undisturbed = json.loads((tmp_path / f"undisturbed.result{rank}").read_text())
        resumed = json.loads((tmp_path / f"rank_0_saves.result{rank}").read_text())
        assert resumed["resumed"] == [4, "last-words"]
        assert resumed["losses"] == undisturbed["losses"][8:]
        assert resumed["fingerprint"] == undisturbed["fingerprint"]
