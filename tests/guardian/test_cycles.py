"""Jobs that begin and die again and again leave nothing behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import fake_rank
import jobs
import psutil

from ds_toolkit.checkpoint.newest import survey
from ds_toolkit.checkpoint.sweeping import sweep
from ds_toolkit.checkpoint.verify import verify_crcs
from ds_toolkit.guardian.arena import Arena
from ds_toolkit.guardian.arenas import arenas, sweep_arenas
from ds_toolkit.guardian.client import start_guardian

NUM_CYCLES = 30


def guardians(root: Path) -> list[int]:
    """Processes that serve arenas of a root, or were about to."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if any(word.startswith(os.fspath(root)) for word in process.info["cmdline"] or [])
    ]


def begin(directory: Path, root: Path, cycle: int) -> fake_rank.FakeJob:
    """A job with one checkpoint on disk and a newer step in its slots; a run tidies the directory first."""
    sweep(directory)
    sweep_arenas(directory, root)
    job = fake_rank.FakeJob(fake_rank.job(directory, f"{cycle:08x}", keep_last=2), root)
    job.save(f"{cycle + 1:08x}", f"global_step{10 * cycle + 1}", 10 * cycle + 1)
    assert [event["event"] for event in job.hear()] == ["saved", "saved"]
    job.write(10 * cycle + 2)
    return job


def end(job: fake_rank.FakeJob, cycle: int) -> int:
    """Kill ranks, the guardian or both, and return the step that the next job is to find."""
    if cycle % 3 != 0:
        os.kill(job.guardian[0], signal.SIGKILL)
        fake_rank.await_end(*job.guardian)
    if cycle % 3 == 1:
        for rank in job.ranks:
            rank.kill()
        return 10 * cycle + 1
    if cycle % 3 == 2:
        job.start()
    job.ranks[cycle % 2].kill()
    assert job.ranks[1 - cycle % 2].hear(15)["event"] == "done"
    job.ranks[1 - cycle % 2].kill()
    fake_rank.await_end(*job.guardian)
    return 10 * cycle + 2


def test_thirty_starts_and_kills_leave_nothing(tmp_path: Path, root: Path) -> None:
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    for cycle in range(NUM_CYCLES):
        job = begin(tmp_path, root, cycle)
        step = end(job, cycle)
        # Not by leaving the block, which would clean up.
        for rank in job.ranks:
            assert rank.process.stdin is not None
            assert rank.process.stdout is not None
            rank.process.stdin.close()
            rank.process.stdout.close()
        newest = survey(tmp_path)[0][0]
        assert newest.step == step
        assert newest.manifest is not None
        assert verify_crcs(newest.folder, newest.manifest.files) == []
        assert guardians(root) == []
        # An arena whose guardian was killed as well is removed by the next job.
        assert len(list(arenas(root))) == (1 if cycle % 3 == 1 else 0)
    sweep_arenas(tmp_path, root)
    assert list(root.iterdir()) == []
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    sweep(tmp_path)
    left = {path.name for path in tmp_path.glob(".*")}
    assert left <= {".ds_toolkit.guardian.lock"}, left
    assert len(survey(tmp_path)[0]) <= 3


def test_an_arena_in_use_is_left_alone(tmp_path: Path, root: Path) -> None:
    """Of another job of this user: while its guardian lives, while a rank does, and before it has any."""
    unborn = Arena.create(fake_rank.job(tmp_path, "0000aaaa"), root)
    with fake_rank.FakeJob(fake_rank.job(tmp_path, "0000abcd"), root) as job:
        job.write(1)
        os.kill(job.guardian[0], signal.SIGKILL)
        fake_rank.await_end(*job.guardian)
        assert sweep_arenas(tmp_path, root) == []
        assert job.arena.folder.is_dir()
        assert unborn.folder.is_dir()
        job.start()
        os.kill(job.guardian[0], signal.SIGSTOP)
        job.ranks[0].kill()
        job.ranks[1].kill()
        sweep_arenas(tmp_path, root)
        assert job.arena.folder.is_dir(), "last words were still to be spoken"
        os.kill(job.guardian[0], signal.SIGCONT)
        fake_rank.await_end(*job.guardian)


def test_an_arena_of_another_container_is_left_alone(tmp_path: Path, root: Path) -> None:
    """Its processes are not to be seen from here, so they only look as if they had ended."""
    with fake_rank.FakeJob(fake_rank.job(tmp_path, "0000abcd"), root) as job:
        os.kill(job.guardian[0], signal.SIGKILL)
        fake_rank.await_end(*job.guardian)
        for rank in job.ranks:
            rank.kill()
        (job.arena.folder / "pid_namespace").write_text("pid:[1]")
        assert sweep_arenas(tmp_path, root) == []
        assert job.arena.folder.is_dir()


def test_a_dead_job_of_another_directory_has_a_day(tmp_path: Path, root: Path) -> None:
    """A run there may still make a checkpoint of what it left."""
    with fake_rank.FakeJob(fake_rank.job(tmp_path, "0000abcd"), root) as job:
        os.kill(job.guardian[0], signal.SIGKILL)
        fake_rank.await_end(*job.guardian)
        for rank in job.ranks:
            rank.kill()
        assert sweep_arenas(tmp_path / "other", root) == []
        fake_rank.make_older(job.arena, 24 * 3600 + 1)
        assert len(sweep_arenas(tmp_path / "other", root)) == 1
        assert not job.arena.folder.exists()


def test_a_goodbye_to_the_guardian_before_counts(tmp_path: Path, root: Path) -> None:
    """One that says it is done just when the guardian is lost has not died."""
    with fake_rank.FakeJob(fake_rank.job(tmp_path, "0000abcd"), root) as job:
        job.write(1)
        os.kill(job.guardian[0], signal.SIGKILL)
        fake_rank.await_end(*job.guardian)
        assert "GuardianGoneError" in job.ranks[1].goodbye()["error"]
        job.ranks[1].kill()
        start_guardian(job.arena)
        job.ranks[0].connect()
        job.ranks[0].goodbye()
        jobs.wait_until(lambda: not job.arena.folder.exists(), 15, "the end of the guardian")
    assert not (tmp_path / "incidents").exists()
