"""Ranks that do not move: what their guardian notices, says, writes down, and ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fake_rank
import pytest

from ds_toolkit.checkpoint.incident import Hang, Incident, incidents
from ds_toolkit.checkpoint.manifest import Manifest
from ds_toolkit.guardian.arena import Arena
from ds_toolkit.guardian.control import Phase
from ds_toolkit.guardian.ending import GRACE_SECONDS
from ds_toolkit.guardian.hang_wording import Standstill, in_words
from ds_toolkit.guardian.hangs import UNMEASURED_SECONDS, Change, HangWatch
from ds_toolkit.guardian.server import Server
from ds_toolkit.guardian.serving import Guardian
from ds_toolkit.guardian.stacks import Frame, Stacks

JOB_ID = "0000abcd"
HANG_AFTER_SECONDS = 1.0


@pytest.fixture
def fake_job(tmp_path: Path, root: Path) -> Iterator[Any]:
    """Makes a job with a watch; its ranks have done step 3, and can be asked for their stacks."""
    opened = []

    def make(on_hang: str = "report", **changes: Any) -> fake_rank.FakeJob:
        changes = {"hang_after_seconds": HANG_AFTER_SECONDS, "on_hang": on_hang, **changes}
        job = fake_rank.FakeJob(fake_rank.job(tmp_path, JOB_ID, **changes), root)
        opened.append(job)
        for rank in job.ranks:
            rank.offer_stacks()
            rank.listen()
        job.write(3)
        return job

    yield make
    for job in opened:
        job.__exit__()


def await_incident(directory: Path, number: int = 1) -> Incident:
    folder = directory / "incidents"
    for _ in fake_rank._looks(15):
        found = incidents(directory)
        if len(found) == number:
            return found[-1]
    raise AssertionError(f"not {number} incidents: {list(folder.glob('*'))}")


def said(rank: fake_rank.FakeRank) -> list[str]:
    event = rank.hear_said(15)
    assert event["event"] == "say"
    lines: list[str] = event["text"].splitlines()
    return lines


def test_a_hang_is_reported_with_stacks_and_nothing_is_ended(fake_job: Any, tmp_path: Path) -> None:
    job = fake_job()
    for rank in job.ranks:
        rank.phase("BACKWARD", 3, 37)
    job.ranks[0].order("stuck", 5.0)
    incident = await_incident(tmp_path)
    assert (incident.event, incident.outcome, incident.tag, incident.ended) == ("hang", "reported", None, ())
    assert not incident.is_failure
    assert incident.hang is not None
    assert incident.hang.what.startswith("ranks 0, 1 wait in backward of batch 38.")
    assert HANG_AFTER_SECONDS <= incident.hang.still_seconds < HANG_AFTER_SECONDS + 2
    assert [rank.phase for rank in incident.hang.ranks] == ["backward", "backward"]
    stuck, idle = (rank.stacks for rank in incident.hang.ranks)
    assert "in stuck" in stuck
    assert "in main" in idle
    assert incident.what in str(incident)
    job.ranks[0]._answer()
    lines = said(job.ranks[0])
    assert lines[0] == f"HANG: {incident.hang}"
    assert any("in stuck" in line for line in lines)
    assert lines[-1].startswith("the incident, with all stacks, is ")
    assert all(rank.process.poll() is None for rank in job.ranks)


def test_one_report_a_hang_and_a_line_when_it_moves_again(fake_job: Any, tmp_path: Path) -> None:
    job = fake_job()
    for rank in job.ranks:
        rank.phase("STEP", 3, 37)
    await_incident(tmp_path)
    assert said(job.ranks[0])[0].startswith("HANG")
    assert job.ranks[0].hear_said(2.5 * HANG_AFTER_SECONDS) is None
    job.ranks[1].phase("DATA", 4, 38)
    assert said(job.ranks[0]) == ["it moves again"]
    # It stands still again, which is another one.
    await_incident(tmp_path, 2)
    assert said(job.ranks[0])[0].startswith("HANG")


@pytest.mark.parametrize(
    "phases",
    [("SAVE", "SAVE"), ("LOAD", "LOAD"), ("IDLE", "SAVE"), ("BUSY", "BACKWARD"), ("ATTACHED", "STEP")],
)
def test_what_may_take_long_is_no_hang(fake_job: Any, tmp_path: Path, phases: tuple[str, str]) -> None:
    job = fake_job()
    for rank, phase in zip(job.ranks, phases, strict=True):
        rank.phase(phase, 3, 37)
    assert job.ranks[0].hear_said(3 * HANG_AFTER_SECONDS) is None
    assert incidents(tmp_path) == []
    # And it is one when that is over.
    for rank in job.ranks:
        rank.phase("FORWARD", 3, 37)
    await_incident(tmp_path)


def test_a_save_of_one_rank_alone_is_a_hang(fake_job: Any, tmp_path: Path) -> None:
    job = fake_job()
    job.ranks[0].phase("SAVE", 3, 37)
    job.ranks[1].phase("BACKWARD", 3, 37)
    hang = await_incident(tmp_path).hang
    assert hang is not None
    assert hang.what.startswith("rank 0 is saving a checkpoint after 37 batches")
    assert hang.what.endswith("rank 1 waits in backward of batch 38.")


def test_last_words_of_a_hang_end_the_ranks(fake_job: Any, tmp_path: Path) -> None:
    job = fake_job("last-words")
    job.ranks[1].stop()
    job.ranks[0].phase("BACKWARD", 3, 37)
    incident = await_incident(tmp_path)
    assert (incident.event, incident.outcome, incident.tag) == ("hang", "complete", "global_step3")
    assert incident.hang is not None
    assert incident.hang.what == (
        "rank 1 is stopped by a signal, after 0 batches; rank 0 waits in backward of batch 38."
    )
    assert incident.is_failure
    assert incident.was_caught
    assert Manifest.read(tmp_path / "global_step3").kind == "last-words"
    # One that is stopped hears no SIGTERM, and is not given the time for it.
    codes = [rank.process.wait(timeout=GRACE_SECONDS - 1) for rank in job.ranks]
    assert codes == [-signal.SIGTERM, -signal.SIGKILL]
    fake_rank.await_end(*job.guardian)
    assert not job.arena.folder.exists()
    assert len(incidents(tmp_path)) == 1


def test_nothing_is_ended_between_two_batches(fake_job: Any, tmp_path: Path) -> None:
    job = fake_job("last-words")
    for rank in job.ranks:
        rank.phase("DATA", 3, 37)
    incident = await_incident(tmp_path)
    assert incident.outcome == "reported"
    assert incident.why == "Nothing was ended: no rank of this node is inside a step."
    assert incident.hang is not None
    assert "an evaluation" in incident.hang.what
    assert said(job.ranks[0])[0].startswith("HANG")
    assert all(rank.process.poll() is None for rank in job.ranks)
    assert not list(tmp_path.glob("global_step*"))
    # A hang inside a step that follows is another one, and ended.
    job.ranks[0].phase("STEP", 3, 37)
    assert await_incident(tmp_path, 2).outcome == "complete"


def test_a_rank_that_was_stopped_is_not_asked(fake_job: Any, tmp_path: Path) -> None:
    job = fake_job()
    for rank in job.ranks:
        rank.phase("FORWARD", 3, 37)
    job.ranks[0].stop()
    hang = await_incident(tmp_path).hang
    assert hang is not None
    assert hang.ranks[0].stacks == "none: it is stopped by a signal"
    # The first that can speak does.
    assert said(job.ranks[1])[0].startswith("HANG: ")
    os.kill(job.ranks[0].process.pid, signal.SIGCONT)
    assert job.ranks[0].look() == {"frozen": False, "wanted": [0, 0, 0]}


def test_of_several_nodes_each_guardian_knows_its_own(tmp_path: Path, root: Path) -> None:
    changes: dict[str, Any] = {"hang_after_seconds": HANG_AFTER_SECONDS, "on_hang": "last-words"}
    with fake_rank.two_nodes(tmp_path, root, **changes) as (first, second):
        # By its own word the second node's does not hang; it is called to last words all the same.
        for job in (second, first):
            job.write(3)
            job.ranks[0].phase("BUSY", 3, 37)
        first.ranks[0].phase("BACKWARD", 3, 37)
        await_incident(tmp_path, 2)
        assert first.ranks[0].process.wait(timeout=15) == -signal.SIGTERM
        # Its own launcher ends it.
        assert second.ranks[0].process.poll() is None
    hung, called = sorted(incidents(tmp_path), key=lambda incident: incident.node)
    assert (hung.event, called.event, called.hang) == ("hang", "end", None)
    assert hung.hang is not None
    assert hung.hang.what.startswith("rank 0 waits in backward of batch 38. All ranks of this node wait")
    assert hung.tag == called.tag == "global_step3"


class Page:
    """As much of a page as the watch reads."""

    def __init__(self) -> None:
        self.phase, self.step, self.micro_step, self.changed_ns = Phase.DATA, 1, 1, 1


@dataclass
class Rank:
    page: Any
    is_running: bool = True

    def slots(self) -> list[Any]:
        return []


class Watched:
    """A watch of one rank, and its clock."""

    def __init__(self, hang_after_seconds: float | None) -> None:
        self.page, self.now = Page(), 100.0
        self.watch = HangWatch({0: Rank(self.page)}, hang_after_seconds, lambda: self.now)  # type: ignore[dict-item]
        assert self.watch.look() is None

    def wait(self, seconds: float, every: float = 0.5) -> list[Change]:
        found = []
        for _ in range(round(seconds / every)):
            self.now += every
            found.append(self.watch.look())
        return [change for change in found if change is not None]

    def step(self, seconds: float) -> list[Change]:
        found = self.wait(seconds)
        self.page.step += 1
        return [*found, *([change] if (change := self.watch.look()) else [])]


def test_auto_is_ten_median_steps() -> None:
    watched = Watched(None)
    assert watched.watch.hang_after_seconds == UNMEASURED_SECONDS
    for seconds in (20.0, 20.0, 20.0, 90.0, 21.0):
        assert watched.step(seconds) == []
    assert watched.watch.hang_after_seconds == pytest.approx(200.0, abs=5)
    assert watched.wait(199) == []
    assert watched.wait(3) == [Change.HANGS]
    assert watched.step(300) == [Change.MOVES]


def test_auto_is_a_minute_at_least() -> None:
    watched = Watched(None)
    for _ in range(5):
        watched.step(1.0)
    assert watched.watch.hang_after_seconds == 60.0


def test_an_early_step_is_not_taken_for_a_hang_by_auto() -> None:
    """The second step may compile for minutes, and nothing is known of how long a step takes."""
    assert Watched(None).wait(UNMEASURED_SECONDS - 1) == []


def test_a_job_that_was_stopped_as_a_whole_does_not_hang() -> None:
    watched = Watched(60.0)
    assert watched.wait(30) == []
    watched.now += 3600
    assert watched.watch.look() is None
    assert watched.wait(20) == []
    assert watched.wait(10) == [Change.HANGS]


def test_a_rank_that_has_not_made_its_page_is_waited_for() -> None:
    watched = Watched(5.0)
    watched.watch._ranks = {0: Rank(watched.page), 1: Rank(None)}  # type: ignore[dict-item]
    assert watched.wait(60) == []


@pytest.mark.parametrize("moves_meanwhile", [False, True])
def test_what_moved_on_while_it_was_looked_into_is_not_ended(
    tmp_path: Path, root: Path, moves_meanwhile: bool
) -> None:
    arena = Arena.create(fake_rank.job(tmp_path, JOB_ID, on_hang="last-words"), root)
    guardian = Guardian(arena, arena.job(), Server(arena.socket_path), None)
    watched = Watched(5.0)
    guardian._watch = watched.watch
    begun: list[str] = []
    guardian._begin_last_words = lambda why, hang=None: begun.append(why)  # type: ignore[method-assign]
    # Where the threads of a real guardian would be: a hang was seen, then stacks take their time.
    assert watched.wait(6) == [Change.HANGS]
    guardian._deadly_hang = Hang("ranks 0, 1 wait in backward of batch 38.", 6.0, ())
    if moves_meanwhile:
        watched.page.step += 1
    guardian._look_for_hangs()
    assert (begun != []) == (not moves_meanwhile)
    written = incidents(tmp_path)
    assert [incident.outcome for incident in written] == (["reported"] if moves_meanwhile else [])
    assert guardian._deadly_hang is None


SCRIPT = Frame("/home/me/train.py", "61", "main")
BARRIER = (
    Frame("/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", "4812", "barrier"),
    Frame("/env/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", "81", "wrapper"),
    SCRIPT,
)
LOADER = (
    Frame("/env/lib/python3.11/site-packages/torch/utils/data/dataloader.py", "700", "_next_data"),
    SCRIPT,
)
OWN = (Frame("/env/lib/python3.11/site-packages/numpy/x.py", "1", "dot"), SCRIPT)


def standing(rank: int, phase: Phase, batches: int, main: tuple[Frame, ...] = (), **more: Any) -> Standstill:
    return Standstill(rank, phase, batches, Stacks("text", main), **more)


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        (standing(1, Phase.IDLE, 37), "rank 1 left its loop after 37 batches"),
        (
            standing(1, Phase.DATA, 37, BARRIER),
            "rank 1 left its loop after 37 batches and waits in `barrier`, at train.py:61 in main",
        ),
        (
            standing(1, Phase.DATA, 37, LOADER),
            "rank 1 waits for the data of batch 38, at train.py:61 in main",
        ),
        (
            standing(1, Phase.DATA, 37, OWN),
            "rank 1 is between two batches, after 37 batches, at train.py:61 in main",
        ),
        (standing(1, Phase.DATA, 37), "rank 1 is between two batches, after 37 batches"),
        (
            standing(1, Phase.SAVE, 37, BARRIER),
            "rank 1 is saving a checkpoint after 37 batches, at train.py:61 in main",
        ),
        (standing(1, Phase.EVALUATION, 37), "rank 1 is in an evaluation after 37 batches"),
        (standing(1, Phase.FORWARD, 37, OWN), "rank 1 is in forward of batch 38, at train.py:61 in main"),
        (standing(1, Phase.FORWARD, 37, BARRIER), "rank 1 waits in forward of batch 38"),
        (standing(1, Phase.DATA, 37, has_closed=True), "rank 1 has closed the guard"),
    ],
)
def test_who_waits_and_who_is_elsewhere(odd: Standstill, says: str) -> None:
    others = [standing(rank, Phase.BACKWARD, 37, BARRIER) for rank in (0, 2, 3)]
    assert (
        in_words([others[0], odd, *others[1:]], 1) == f"{says}; ranks 0, 2, 3 wait in backward of batch 38."
    )


def test_ranks_in_the_same_place() -> None:
    ranks = [standing(rank, Phase.STEP, 1, BARRIER) for rank in range(2)]
    assert "All ranks wait at the same place" in in_words(ranks, 1)
    assert "for one of another node" in in_words(ranks, 2)
    ranks = [standing(rank, Phase.DATA, 1, BARRIER) for rank in range(2)]
    assert in_words(ranks, 1).startswith(
        "ranks 0, 1 wait in `barrier` between two batches, after 1 batch, at train.py:61 in main. No rank"
    )


def test_a_page_that_is_damaged_ends_no_guardian(fake_job: Any, tmp_path: Path) -> None:
    job = fake_job()
    page = job.arena.rank_folder(1) / "control"
    with page.open("r+b") as file:
        file.seek(4 * 8)
        file.write(b"\xff" * 8)
    for _ in fake_rank._looks(15):
        if "hangs are not looked for any more" in job.arena.log_path.read_text():
            break
    else:
        raise AssertionError(job.arena.log_path.read_text())
    job.ranks[1].phase("DATA", 3)
    job.save("2", "global_step4", 4)
    assert [event["event"] for event in job.hear()] == ["saved", "saved"]


def test_a_phase_of_a_newer_version_is_read() -> None:
    assert Phase(50) is Phase.UNKNOWN
    assert "is between two batches" in in_words([standing(0, Phase.UNKNOWN, 1)], 1)
