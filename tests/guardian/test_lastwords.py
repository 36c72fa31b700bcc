"""Real processes that die, and what their guardian makes of their slots."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fake_rank
import pytest

from ds_toolkit.checkpoint import commit
from ds_toolkit.checkpoint.incident import Incident, incidents
from ds_toolkit.checkpoint.manifest import Manifest, RunShape
from ds_toolkit.checkpoint.newest import survey
from ds_toolkit.checkpoint.verify import verify_crcs
from ds_toolkit.guardian.agreeing import Agreement, Order, Report, order_for
from ds_toolkit.guardian.arena import Arena, Job
from ds_toolkit.guardian.lastwords import LastWords
from ds_toolkit.guardian.ranks import LocalRank

JOB_ID = "0000abcd"


def the_incident(directory: Path) -> Incident:
    (incident,) = incidents(directory)
    return incident


def check_step(directory: Path, tag: str, step: int, kind: str = "last-words") -> None:
    """The tag is whole, and every byte is of that step."""
    manifest = Manifest.read(directory / tag)
    assert (manifest.step, manifest.kind) == (step, kind)
    assert manifest.files
    assert verify_crcs(directory / tag, manifest.files) == []
    for file in manifest.files:
        assert (directory / tag / file.name).read_bytes() == fake_rank.content(file.name, step)


def tags(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if "step" in path.name)


def latest(directory: Path) -> str | None:
    path = directory / "latest"
    return path.read_text() if path.exists() else None


def test_a_killed_rank_costs_nothing_that_all_had(tmp_path: Path, root: Path) -> None:
    with fake_rank.FakeJob(fake_rank.job(tmp_path, JOB_ID), root) as job:
        job.write(6)
        job.write(7)
        job.ranks[0].write(8)
        job.ranks[1].kill()
        heard = job.ranks[0].hear(15)
        assert (heard["event"], heard["tag"]) == ("done", "global_step7")
        check_step(tmp_path, "global_step7", 7)
        assert latest(tmp_path) == "global_step7"
        assert job.ranks[0].look()["frozen"]
        job.ranks[0].kill()
        fake_rank.await_end(*job.guardian)
        assert not job.arena.folder.exists()
    incident = the_incident(tmp_path)
    assert [(end.rank, end.how) for end in incident.ended] == [(1, "died")]
    assert [(place.step, place.whole_step) for place in incident.ranks] == [(8, 8), (7, 7)]
    assert (incident.outcome, incident.tag, incident.last_step) == ("complete", "global_step7", 7)
    assert incident.was_caught
    assert incident.is_failure
    assert incident.seconds is not None
    assert incident.seconds < 2


def test_ranks_that_are_killed_together(tmp_path: Path, root: Path) -> None:
    with fake_rank.FakeJob(fake_rank.job(tmp_path, JOB_ID), root) as job:
        job.write(3)
        for rank in job.ranks:
            rank.process.kill()
        fake_rank.await_end(*job.guardian)
        assert not job.arena.folder.exists()
    check_step(tmp_path, "global_step3", 3)


def test_a_slot_that_its_rank_was_writing_when_it_died_is_not_used(tmp_path: Path, root: Path) -> None:
    with fake_rank.FakeJob(fake_rank.job(tmp_path, JOB_ID), root, num_slots=2) as job:
        job.write(5)
        job.write(6)
        job.ranks[0].write(7)
        job.ranks[1].begin(7)
        job.ranks[1].kill()
        assert job.ranks[0].hear(15)["tag"] == "global_step6"
    check_step(tmp_path, "global_step6", 6)
    assert tags(tmp_path) == ["global_step6"]


def test_a_slot_that_a_stopped_rank_was_writing_is_not_used(tmp_path: Path, root: Path) -> None:
    of_job = fake_rank.job(tmp_path, JOB_ID, deadline_seconds=4.0)
    with fake_rank.FakeJob(of_job, root, num_slots=2) as job:
        job.write(5)
        job.write(6)
        job.ranks[1].write(7)
        job.ranks[0].begin(7)
        job.ranks[0].stop()
        job.ranks[1].kill()
        fake_rank.await_file(tmp_path / "latest")
    check_step(tmp_path, "global_step6", 6)


def test_a_slot_whose_files_are_missing_is_not_used(tmp_path: Path, root: Path) -> None:
    with fake_rank.FakeJob(fake_rank.job(tmp_path, JOB_ID), root) as job:
        job.write(6)
        job.write(7)
        next(job.arena.slot_folder(1, 1).glob("*optim*")).unlink()
        job.ranks[1].kill()
        assert job.ranks[0].hear(15)["tag"] == "global_step6"
    check_step(tmp_path, "global_step6", 6)


def test_a_rank_that_raised_hears_when_all_is_written(tmp_path: Path, root: Path) -> None:
    with fake_rank.FakeJob(fake_rank.job(tmp_path, JOB_ID), root) as job:
        job.write(5)
        job.ranks[1].leave("exception", "ValueError: loss is nan")
        for heard in job.hear():
            assert (heard["event"], heard["tag"]) == ("done", "global_step5")
        check_step(tmp_path, "global_step5", 5)
        for rank in job.ranks:
            rank.end()
        fake_rank.await_end(*job.guardian)
    (end,) = the_incident(tmp_path).ended
    assert (end.rank, end.how, end.detail) == (1, "exception", "ValueError: loss is nan")
    assert "rank 1" in str(the_incident(tmp_path))


def test_goodbye_of_all_leaves_nothing(tmp_path: Path, root: Path) -> None:
    with fake_rank.FakeJob(fake_rank.job(tmp_path, JOB_ID), root) as job:
        job.write(5)
        job.ranks[0].goodbye()
        job.ranks[0].end()
        assert job.ranks[1].hear(0.5) is None
        job.ranks[1].goodbye()
        fake_rank.await_end(*job.guardian)
        assert not job.arena.folder.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_ends_without_closing_its_guard(tmp_path: Path, root: Path) -> None:
    """Ranks come to their end one after the other; the first is not the death of the others."""
    with fake_rank.FakeJob(fake_rank.job(tmp_path, JOB_ID), root) as job:
        job.write(5)
        job.ranks[0].leave("end")
        time.sleep(0.6)
        job.ranks[1].write(6)
        job.ranks[0].write(6)
        job.ranks[1].leave("end")
        assert [heard["tag"] for heard in job.hear()] == ["global_step6"] * 2
    check_step(tmp_path, "global_step6", 6, kind="final")
    assert not the_incident(tmp_path).is_failure


def test_a_death_among_ranks_that_end_is_no_good_end(tmp_path: Path, root: Path) -> None:
    with fake_rank.FakeJob(fake_rank.job(tmp_path, JOB_ID), root) as job:
        job.write(5)
        job.ranks[0].leave("end")
        job.ranks[1].kill()
        assert job.ranks[0].hear(15)["tag"] == "global_step5"
    check_step(tmp_path, "global_step5", 5)
    assert the_incident(tmp_path).is_failure


def test_a_death_before_any_slot_was_whole(tmp_path: Path, root: Path) -> None:
    with fake_rank.FakeJob(fake_rank.job(tmp_path, JOB_ID), root) as job:
        job.ranks[0].begin(1)
        job.ranks[0].kill()
        heard = job.ranks[1].hear(15)
        assert heard["tag"] is None
        assert "no rank has a whole snapshot" in heard["why"]
    incident = the_incident(tmp_path)
    assert (incident.outcome, incident.tag, incident.was_caught) == ("impossible", None, False)
    assert tags(tmp_path) == []


def test_weights_alone_are_never_resumed_from(tmp_path: Path, root: Path) -> None:
    with fake_rank.FakeJob(fake_rank.job(tmp_path, JOB_ID), root) as job:
        job.write(1)
        for rank in job.ranks:
            rank.save("0000000a", "global_step1", 1)
        job.ranks[0].write(2)
        job.ranks[0].write(3)
        for _ in range(3):
            job.ranks[1].begin(9)
        job.ranks[1].kill()
        while (heard := job.ranks[0].hear(15))["event"] != "done":
            pass
        assert heard["tag"] == "weights-only-step3"
    check_step(tmp_path, "weights-only-step3", 3, kind="weights-only")
    assert [path.name for path in (tmp_path / "weights-only-step3").glob("*.pt")] == [
        "mp_rank_00_model_states.pt"
    ]
    assert latest(tmp_path) is None
    candidates, (passed_over,) = survey(tmp_path)
    assert candidates == []
    assert "weights alone" in str(passed_over)
    assert not the_incident(tmp_path).was_caught


def test_what_is_no_checkpoint_at_any_step(tmp_path: Path, root: Path) -> None:
    with fake_rank.FakeJob(fake_rank.job(tmp_path, JOB_ID, stage=3), root) as job:
        job.ranks[0].write(3)
        job.ranks[1].write(4)
        job.ranks[1].kill()
        assert job.ranks[0].hear(15)["tag"] is None
    incident = the_incident(tmp_path)
    assert incident.outcome == "impossible"
    assert "Nothing can be written" in incident.why
    assert tags(tmp_path) == []


def test_a_step_that_was_just_saved_is_not_written_again(tmp_path: Path, root: Path) -> None:
    with fake_rank.FakeJob(fake_rank.job(tmp_path, JOB_ID), root) as job:
        job.stop_guardian()
        job.save("0000000a", "best", 5)
        job.continue_guardian()
        assert job.ranks[0].hear(15)["event"] == "saved"
        job.ranks[1].kill()
        assert job.ranks[0].hear(15)["tag"] == "best"
    assert the_incident(tmp_path).outcome == "there already"
    assert the_incident(tmp_path).was_caught
    check_step(tmp_path, "best", 5, kind="periodic")
    assert tags(tmp_path) == []


def test_a_death_while_a_save_is_written_lets_it_end_first(tmp_path: Path, root: Path) -> None:
    with fake_rank.FakeJob(fake_rank.job(tmp_path, JOB_ID), root) as job:
        job.save("0000000a", "best", 5)
        job.ranks[1].kill()
        assert job.ranks[0].hear(15)["event"] == "saved"
        assert job.ranks[0].hear(15)["tag"] == "best"
    check_step(tmp_path, "best", 5, kind="periodic")
    assert tags(tmp_path) == []


class SavingAtWork:
    """A save of step 5 that ends when it is waited for, or does not."""

    step_in_work = 5

    def __init__(self, directory: Path, shape: RunShape, ends: bool) -> None:
        self._partial = commit.PartialTag(directory, "best", commit.new_save_id())
        self._shape, self._ends = shape, ends
        self.was_stopped = False

    def wait(self, timeout_seconds: float) -> bool:
        assert 1 < timeout_seconds <= 20
        if self._ends:
            commit.begin(self._partial)
            for rank in (0, 1):
                commit.seal(self._partial, rank, 5, self._shape, [])
            commit.commit(self._partial, kind="periodic", patience_seconds=0)
        return self._ends

    def stop(self, timeout_seconds: float) -> bool:
        self.was_stopped = True
        return True


@pytest.mark.parametrize("ends", [True, False])
def test_a_save_at_work_is_waited_for_and_given_up_in_the_end(tmp_path: Path, root: Path, ends: bool) -> None:
    job = fake_rank.job(tmp_path, JOB_ID)
    arena = Arena.create(job, root)
    ranks = {}
    for number in (0, 1):
        fake_rank.Rank(arena, number, 2).write(5)
        ranks[number] = LocalRank(number, arena)
        ranks[number].meet()
        ranks[number].ended()
    saving = SavingAtWork(tmp_path, job.shape, ends)
    outcome = LastWords(arena, job, ranks, saving).speak()  # type: ignore[arg-type]
    assert saving.was_stopped is not ends
    assert (outcome.outcome, outcome.tag) == (
        ("there already", "best") if ends else ("complete", "global_step5")
    )


def test_a_checkpoint_of_an_earlier_run_does_not_count(tmp_path: Path, root: Path) -> None:
    """Training may have gone on from before it: what this run made of the step is another state."""
    for job_id, kind in (("0000abcd", "periodic"), ("0000abce", "last-words")):
        with fake_rank.FakeJob(fake_rank.job(tmp_path, job_id), root) as job:
            if kind == "periodic":
                job.save("0000000a", "global_step5", 5)
                assert job.ranks[0].hear(15)["event"] == "saved"
            else:
                job.write(5)
                job.ranks[1].kill()
                assert job.ranks[0].hear(15)["tag"] == "global_step5"
        check_step(tmp_path, "global_step5", 5, kind=kind)


def test_a_directory_that_is_gone_ends_it_all_the_same(tmp_path: Path, root: Path) -> None:
    directory = tmp_path / "checkpoints"
    with fake_rank.FakeJob(fake_rank.job(directory, JOB_ID), root) as job:
        job.write(5)
        directory.rename(tmp_path / "lost")
        job.ranks[1].kill()
        assert "directory is gone" in job.ranks[0].hear(15)["why"]
        job.ranks[0].kill()
        fake_rank.await_end(*job.guardian)
    assert not directory.exists()


class TestTwoNodes:
    def test_both_follow_one_order(self, tmp_path: Path, root: Path) -> None:
        with fake_rank.two_nodes(tmp_path, root) as (first, second):
            for job in (first, second):
                job.write(4)
            first.write(5)
            second.ranks[0].kill()
            assert first.hear()[0]["tag"] == "global_step4"
            fake_rank.await_end(*second.guardian)
        check_step(tmp_path, "global_step4", 4)
        assert tags(tmp_path) == ["global_step4"]
        on_nodes = sorted(incidents(tmp_path), key=lambda incident: incident.node)
        assert [(at.node, at.outcome) for at in on_nodes] == [(0, "complete"), (1, "complete")]
        assert [len(at.ended) for at in on_nodes] == [0, 1]
        assert all(at.is_failure for at in on_nodes)

    def test_a_node_that_says_nothing_is_waited_for_half_of_the_time(
        self, tmp_path: Path, root: Path
    ) -> None:
        with fake_rank.two_nodes(tmp_path, root, stage=0, deadline_seconds=6.0) as (first, second):
            for job in (first, second):
                job.write(4)
            second.stop_guardian()
            begun = time.monotonic()
            first.ranks[0].leave("exception", "boom")
            assert first.hear()[0]["tag"] == "global_step4"
            assert 2.8 < time.monotonic() - begun < 6.0
            # It wakes too late: it finds the order, and writes nothing.
            second.continue_guardian()
            assert second.hear()[0]["tag"] == "global_step4"
        check_step(tmp_path, "global_step4", 4)

    def test_the_node_of_rank_0_is_lost(self, tmp_path: Path, root: Path) -> None:
        with fake_rank.two_nodes(tmp_path, root, stage=0, deadline_seconds=6.0) as (first, second):
            for job in (first, second):
                job.write(4)
            os.kill(first.guardian[0], signal.SIGKILL)
            first.ranks[0].kill()
            second.ranks[0].leave("exception", "boom")
            assert second.hear()[0]["tag"] == "global_step4"
        check_step(tmp_path, "global_step4", 4)
        assert not (tmp_path / ".ds_toolkit.guardian.lock").exists()

    def test_weights_of_a_lost_node_are_missing(self, tmp_path: Path, root: Path) -> None:
        with fake_rank.two_nodes(tmp_path, root, stage=3, deadline_seconds=2.0) as (first, second):
            for job in (first, second):
                job.write(4)
            second.stop_guardian()
            first.ranks[0].kill()
            fake_rank.await_end(*first.guardian)
        assert tags(tmp_path) == []
        assert the_incident(tmp_path).outcome == "impossible"

    def test_all_come_to_their_end(self, tmp_path: Path, root: Path) -> None:
        with fake_rank.two_nodes(tmp_path, root) as (first, second):
            for job in (first, second):
                job.write(4)
            first.ranks[0].leave("end")
            time.sleep(1.5)
            second.ranks[0].leave("end")
            assert [job.hear()[0]["tag"] for job in (first, second)] == ["global_step4"] * 2
        check_step(tmp_path, "global_step4", 4, kind="final")
        assert not any(incident.is_failure for incident in incidents(tmp_path))


def test_of_all_that_decide_at_once_one_is_followed(tmp_path: Path) -> None:
    of_nodes = [fake_rank.job(tmp_path, JOB_ID, nodes=(0, 1, 2, 3), node=node) for node in range(4)]
    (tmp_path / ".last_words" / JOB_ID).mkdir(parents=True)
    for _ in range(25):
        meet = threading.Barrier(4)

        def decide(job: Job, meet: threading.Barrier = meet) -> tuple[Order, Order]:
            own = order_for(job, [Report(job.node, {}, {}, False)])
            meet.wait()
            return own, Agreement(job).settle(own)

        with ThreadPoolExecutor(4) as pool:
            orders = list(pool.map(decide, of_nodes))
        followed = {order.save_id for _, order in orders}
        assert len(followed) == 1
        assert followed <= {own.save_id for own, _ in orders}
        (tmp_path / ".last_words" / JOB_ID / "decision.json").unlink()
    assert list((tmp_path / ".last_words" / JOB_ID).iterdir()) == []
