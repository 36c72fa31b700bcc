"""Ranks and guardian die together: what they left in memory is still worth a checkpoint."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import jobs
from simple_runs import WORKER, arenas_of, report_of, whole_steps

from ds_toolkit.guardian.arena import Arena
from ds_toolkit.guardian.control import CONTROL_NAME, ControlBlock


def have_begun(arena: Arena) -> bool:
    return all((arena.rank_folder(rank) / CONTROL_NAME).exists() for rank in (0, 1))


def pages(arena: Arena) -> list[ControlBlock]:
    return [ControlBlock(arena.rank_folder(rank), writable=False) for rank in (0, 1)]


def test_slots_outlive_ranks_and_guardian(tmp_path: Path) -> None:
    directory = tmp_path / "ckpt"
    command = jobs.torchrun_command(WORKER, directory, "100000", "100000", "--snapshots")
    with jobs.Job(command) as job:
        jobs.wait_until(lambda: arenas_of(directory), 60, "the arena")
        arena = Arena(arenas_of(directory)[0])
        jobs.wait_until(lambda: have_begun(arena), 60, "the pages of both ranks")
        jobs.wait_until(lambda: all(page.step >= 12 for page in pages(arena)), 60, "twelve steps")
        guardian = arena.guardian()
        assert guardian is not None
        # It sees nothing of what follows.
        os.kill(guardian[0], signal.SIGSTOP)
        for page in pages(arena):
            os.kill(page.process[0], signal.SIGKILL)
        os.kill(guardian[0], signal.SIGKILL)
        job.wait(60)
    done = min(page.step for page in pages(arena))
    assert whole_steps(directory) == []
    assert arenas_of(directory) == [arena.folder]
    steps = str(done + 3)
    resumed = report_of(jobs.run(jobs.torchrun_command(WORKER, directory, steps, "100000", "--snapshots")))
    assert resumed["kind"] == "memory", resumed
    assert done - 1 <= resumed["resumed"] <= done + 1
    assert arenas_of(directory) == []
    straight = report_of(jobs.run(jobs.torchrun_command(WORKER, tmp_path / "other", steps, "100000")))
    assert resumed["losses"] == straight["losses"][-len(resumed["losses"]) :]
    assert resumed["fingerprint"] == straight["fingerprint"]
