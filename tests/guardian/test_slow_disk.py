"""A disk that takes what is written slowly: checkpoints wait for each other, and none of them is torn."""

from __future__ import annotations

import time
from pathlib import Path

import fake_rank
import jobs
import mounts
import pytest
import simple_runs

from ds_toolkit.checkpoint.incident import incidents

MEGABYTE = 10**6


def test_a_save_that_is_still_written_delays_the_next_one(tmp_path: Path) -> None:
    """With real engines: the loop goes on beside the write, and nothing is missing in the end."""
    with mounts.slow(tmp_path / "disk", 4 * MEGABYTE) as disk:
        # 4 MB a rank and checkpoint, and forty steps that take less than writing two of them.
        command = jobs.torchrun_command(simple_runs.WORKER, disk / "ckpt", "40", "4", "--big", "--snapshots")
        finished = jobs.run(command)
        simple_runs.report_of(finished)
        waits = [
            line for line in finished.output.splitlines() if "waits: the last one is being written" in line
        ]
        assert waits, finished.output
        assert "is missing" not in finished.output
        assert "in the background" in finished.output
        whole = simple_runs.whole_steps(disk / "ckpt")
        assert whole[0] == 40
        assert whole == sorted(path_steps(disk / "ckpt"), reverse=True), "what is there is whole"


def path_steps(directory: Path) -> list[int]:
    return [int(path.name.removeprefix("global_step")) for path in directory.glob("global_step*")]


@pytest.mark.parametrize("is_saving", [False, True])
def test_last_words_that_come_too_late_leave_what_there_was(
    tmp_path: Path, root: Path, is_saving: bool
) -> None:
    with mounts.slow(tmp_path / "disk", 100 * MEGABYTE) as disk:
        directory = disk / "ckpt"
        directory.mkdir()
        with fake_rank.FakeJob(fake_rank.job(directory, "0000abcd", deadline_seconds=3.0), root) as job:
            job.save("00000001", "global_step1", 1)
            assert [event["event"] for event in job.hear()] == ["saved", "saved"]
            rate = disk.with_name("disk_behind") / ".bytes_per_second"
            # 300 kB are to be written within 3 s.
            rate.write_text("30000")
            if is_saving:
                job.save("00000002", "global_step2", 2)
                fake_rank.await_file(next(iter(wait_for_partial(directory))))
            job.write(3)
            begun = time.monotonic()
            job.ranks[0].kill()
            heard = job.ranks[1].hear(30)
            took_seconds = time.monotonic() - begun
            while heard["event"] != "done":
                assert heard["event"] == "failed", heard
                heard = job.ranks[1].hear(30)
                took_seconds = time.monotonic() - begun
            assert heard["tag"] is None
            # A write that has begun cannot be called back: one file of 50 kB takes 1.7 s.
            assert took_seconds < 3.0 + 2.5
            job.ranks[1].kill()
            fake_rank.await_end(*job.guardian)
        (incident,) = incidents(directory)
        assert incident.outcome == "failed"
        assert "the time for writing a checkpoint is over" in incident.why
        assert incident.seconds is None
        assert not incident.was_caught
        assert simple_runs.whole_steps(directory) == [1]
        assert path_steps(directory) == [1]
        assert (directory / "latest").read_text() == "global_step1"
        assert not list(directory.glob(".*.partial"))


def wait_for_partial(directory: Path) -> list[Path]:
    """Files of the checkpoint that is being written."""
    jobs.wait_until(lambda: list(directory.glob(".*.partial/*.pt")), 15, "the checkpoint that is written")
    return list(directory.glob(".*.partial"))
