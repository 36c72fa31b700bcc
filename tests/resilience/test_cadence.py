"""When a checkpoint is due, by a clock of our own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import pytest

from ds_toolkit.config.guard_settings import GuardSettings
from ds_toolkit.errors import ToolkitError
from ds_toolkit.plan.failures import Failure, caught_share
from ds_toolkit.plan.interval import Saving, plan_interval, young_interval
from ds_toolkit.resilience import agreement
from ds_toolkit.resilience.cadence import AutoInterval, EverySeconds, EverySteps, Outlook, cadence_for

DAY_SECONDS = 86_400.0


class Clock:
    def __init__(self) -> None:
        self.now_seconds = 1000.0

    def __call__(self) -> float:
        return self.now_seconds


def due_times(
    interval_seconds: float, step_seconds: Callable[[int], float], num_steps: int
) -> tuple[list[float], int]:
    """Seconds from the start at which checkpoints fell due, and how many times the ranks talked."""
    clock, talks = Clock(), 0

    def broadcast(outlook: Outlook) -> Outlook:
        nonlocal talks
        talks += 1
        return outlook

    cadence = EverySeconds(interval_seconds, clock=clock, broadcast=broadcast)
    times = []
    for step in range(1, num_steps + 1):
        clock.now_seconds += step_seconds(step)
        if cadence.due(step):
            times.append(clock.now_seconds - 1000.0)
            cadence.saved(step)
    return times, talks


def test_steps_count_from_the_beginning_of_the_run() -> None:
    cadence = cadence_for(GuardSettings(save_every=50))
    assert isinstance(cadence, EverySteps)
    assert [step for step in range(1, 151) if cadence.due(step)] == [50, 100, 150]


def test_even_steps_are_due_on_time_with_few_talks() -> None:
    times, talks = due_times(60.0, lambda step: 0.1, 6000)
    assert times == pytest.approx([60.0 * n for n in range(1, 11)], abs=0.3)
    assert talks < 6000 / 20


def test_steps_longer_than_the_interval_save_at_each_step() -> None:
    times, _ = due_times(10.0, lambda step: 25.0, 5)
    assert times == [25.0, 50.0, 75.0, 100.0, 125.0]


def test_a_run_that_becomes_slow_is_late_by_a_few_steps_only() -> None:
    times, _ = due_times(600.0, lambda step: 0.1 if step < 300 else 10.0, 600)
    assert 595.0 <= times[0] < 600.0 + 33 * 10.0


def test_a_run_that_becomes_fast_is_on_time() -> None:
    times, _ = due_times(600.0, lambda step: 10.0 if step < 30 else 0.1, 6000)
    assert times[0] == pytest.approx(600.0, abs=1.0)


def test_steps_that_take_no_time_at_all() -> None:
    assert due_times(60.0, lambda step: 0.0, 1000)[0] == []


def test_a_clock_that_jumps_back_delays_and_does_not_break() -> None:
    times, _ = due_times(60.0, lambda step: -30.0 if step == 100 else 1.0, 400)
    assert len(times) in (5, 6)


def test_a_run_that_goes_back_to_an_earlier_step() -> None:
    clock = Clock()
    cadence = EverySeconds(60.0, clock=clock, broadcast=lambda outlook: outlook)
    for step in range(15_000, 15_030):
        clock.now_seconds += 1.0
        assert not cadence.due(step)
    cadence.moved_to(5000)
    due = []
    for step in range(5001, 5101):
        clock.now_seconds += 1.0
        if cadence.due(step):
            due.append(step)
            cadence.saved(step)
    assert due
    assert due[0] < 5040


def test_the_other_ranks_do_what_rank_0_says() -> None:
    told = iter([Outlook(False, 7, 0.001), Outlook(True, 8, 0.001)])
    cadence = EverySeconds(0.001, clock=Clock(), broadcast=lambda outlook: next(told))
    assert [cadence.due(step) for step in range(1, 8)] == [False] * 6 + [True]


class Run:
    """Two ranks with an automatic interval, whose clocks differ; steps take one second by rank 0's."""

    def __init__(self, failures: Callable[[], Sequence[Failure]] = tuple, **settings: object) -> None:
        self.clocks = [Clock(), Clock()]
        self.wall_seconds = 1e9
        self.num_talks = 0
        self.step = 0
        self._told: Outlook | None = None
        given = GuardSettings.model_validate({"save_every": "auto", **settings})
        self.ranks = [
            AutoInterval(
                given,
                num_gpus=8,
                decides=rank == 0,
                failures=failures if rank == 0 else self._nobody_asks,
                clock=self.clocks[rank],
                wall_clock=lambda: self.wall_seconds,
                broadcast=self._tell if rank == 0 else self._hear,
            )
            for rank in (0, 1)
        ]

    def until_due(self, most_steps: int = 10_000) -> int:
        """Steps until a save is due on both ranks."""
        for number in range(1, most_steps + 1):
            self.step += 1
            self.clocks[0].now_seconds += 1.0
            self.clocks[1].now_seconds += 0.25
            due = [rank.due(self.step) for rank in self.ranks]
            assert due[0] == due[1]
            assert self.ranks[0].interval_seconds == self.ranks[1].interval_seconds
            if due[0]:
                return number
        raise AssertionError("never due")

    def save(self, stall_seconds: float, write_seconds: float = 0.0) -> int:
        """A save that costs so much, and the steps until the next is due."""
        self.ranks[0].observe(stall_seconds=stall_seconds, write_seconds=write_seconds)
        # Another rank may have waited for much longer.
        self.ranks[1].observe(stall_seconds=stall_seconds + 99, write_seconds=write_seconds)
        for rank in self.ranks:
            rank.saved(self.step)
        return self.until_due()

    @property
    def interval_seconds(self) -> float:
        return self.ranks[0].interval_seconds

    def _tell(self, outlook: Outlook) -> Outlook:
        self.num_talks += 1
        self._told = outlook
        return outlook

    def _hear(self, outlook: Outlook) -> Outlook:
        assert self._told is not None
        return self._told

    def _nobody_asks(self) -> Sequence[Failure]:
        raise AssertionError("rank 0 alone reads the failures")


def planned(stall_seconds: float, write_seconds: float = 0.0, mttf_seconds: float = DAY_SECONDS) -> float:
    saving = Saving(
        stall_seconds,
        mttf_seconds,
        write_seconds=write_seconds,
        slowdown=0.05,
        step_seconds=1.0,
        caught_share=caught_share(0, 0),
        last_words_seconds=write_seconds,
    )
    return plan_interval(saving).seconds


def test_until_a_save_is_measured_the_first_interval_holds() -> None:
    run = Run()
    assert run.until_due() == 600 == AutoInterval.FIRST_SECONDS
    for rank in run.ranks:
        rank.saved(run.step)  # given up: nothing was measured
    assert run.until_due() == 600


def test_a_measured_save_sets_the_interval_on_all_ranks() -> None:
    run = Run()
    run.until_due()
    steps = run.save(0.5, 60.0)
    # 0.5 s of waiting and 5 % of 60 s, a failure a day, 5 % of which are counted on as caught.
    assert steps == pytest.approx(planned(0.5, 60.0), abs=1.0)
    assert steps == pytest.approx(young_interval(3.5, DAY_SECONDS, 0.05), rel=0.02)
    assert run.num_talks < run.step / 20


def test_the_change_and_its_reason_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    with caplog.at_level(logging.INFO, "ds_toolkit"):
        run.until_due()
        assert caplog.messages == []
        run.save(0.5, 60.0)
        run.save(0.5, 60.0)
    assert caplog.messages == [
        "a checkpoint every 13 min 16 s from now on, not 10 min 0 s: a save costs 3.5 s (500 ms of waiting,"
        " and 5% of 1 min 0 s of writing); a failure every 24 h 0 min (0 seen here in 0 ms, and one every"
        " 24 h 0 min assumed for 8 GPUs by 7.9 h at 1,024 GPUs (arXiv 2410.21680), 3.1 h at 16,384 (arXiv"
        " 2407.21783), a day at most), of which last words catch 5% at least (0 of 0 seen)"
    ]


def test_the_first_measurement_is_logged_even_if_little_changes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ds_toolkit"):
        run = Run()
        run.until_due()
        run.save(2.05)
    assert run.interval_seconds == pytest.approx(600.0, rel=0.05)
    assert len(caplog.messages) == 1
    # Of a save that is all waiting nothing is written behind the loop.
    assert "a save costs 2.0 s; a failure" in caplog.messages[0]


def test_an_interval_that_is_nearly_as_good_stays() -> None:
    run = Run()
    run.until_due()
    run.save(4.0)
    before = run.interval_seconds
    run.save(5.0)  # 4.25 s on average: 3 % more
    assert run.interval_seconds == before
    run.save(9.0)  # 5.44 s: 17 % more than at first
    assert run.interval_seconds == pytest.approx(planned(5.4375), rel=1e-3)


def test_failures_of_the_directory_are_asked_for_after_each_save(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Failure] = []
    run = Run(lambda: seen)
    run.until_due()
    run.save(2.0)
    rare = run.interval_seconds
    seen += [Failure(run.wall_seconds, False)] * 24
    with caplog.at_level(logging.INFO, "ds_toolkit"):
        run.save(2.0)
    # 25 failures a day instead of one, and less hope for last words.
    assert run.interval_seconds == pytest.approx(rare / 5, rel=0.05)
    assert "24 seen here" in caplog.messages[0]


def test_what_last_words_have_caught_makes_saves_rarer() -> None:
    missed = Run(lambda: [Failure(1e9, False)] * 24)
    caught = Run(lambda: [Failure(1e9, True)] * 24)
    deaf = Run(lambda: [Failure(1e9, True)] * 24, snapshot_every=0)
    for run in (missed, caught, deaf):
        run.until_due()
        run.save(2.0)
    factor = (1 - caught_share(24, 0)) ** -0.5
    assert factor > 2.9
    assert caught.interval_seconds == pytest.approx(factor * deaf.interval_seconds, rel=0.03)
    assert missed.interval_seconds == pytest.approx(deaf.interval_seconds, rel=0.01)


def test_a_given_mttf_overrules_the_failures() -> None:
    run = Run(lambda: [Failure(1e9, False)] * 24, mttf="24h", snapshot_every=0)
    run.until_due()
    run.save(2.0)
    assert run.interval_seconds == pytest.approx(young_interval(2.0, DAY_SECONDS), rel=0.01)


def test_bounds_hold_and_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ds_toolkit"):
        for run, cost, seconds in (
            (Run(mttf="2000h"), (60.0, 0.0), AutoInterval.LONGEST_SECONDS),
            (Run(overhead_budget=0.001), (2.0, 0.0), 2000.0),
            (Run(mttf="1h"), (0.001, 300.0), 500.0),
            (Run(mttf="60s", overhead_budget=0.9), (0.01, 30.0), 30.0),
        ):
            run.until_due()
            run.save(*cost)
            assert run.interval_seconds == pytest.approx(seconds, rel=1e-3)
    assert [message.rpartition(" would be best, but ")[2] for message in caplog.messages] == [
        "the longest interval allowed",
        "saving may not cost more",
        "saving may not cost more",
        "a write must end before the next may start",
    ]


def test_a_save_that_costs_most_of_the_time_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(mttf="100s")
    run.until_due()
    with caplog.at_level(logging.INFO, "ds_toolkit"):
        run.save(60.0)
    assert "make saving cheaper" in caplog.messages[0]


def test_a_save_that_took_no_time_at_all_has_an_interval_too() -> None:
    run = Run()
    run.until_due()
    assert 5 < run.save(0.0) < 30


def test_failures_that_cannot_be_read_are_those_read_last(caplog: pytest.LogCaptureFixture) -> None:
    answers = iter([[Failure(1e9, False)] * 24, ToolkitError("cut short"), OSError("stale handle")])

    def failures() -> Sequence[Failure]:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    run = Run(failures)
    run.until_due()
    run.save(2.0)
    before = run.interval_seconds
    run.save(2.0)
    run.save(2.0)
    assert run.interval_seconds == before
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [
        f"the failures of this directory cannot be read: {why}" for why in ("cut short", "stale handle")
    ]


def test_the_record_may_begin_before_the_run() -> None:
    clock = Clock()
    cadence = AutoInterval(
        GuardSettings(save_every="auto", snapshot_every=0),
        num_gpus=8,
        decides=True,
        since_seconds=1e9 - 3 * DAY_SECONDS,
        clock=clock,
        wall_clock=lambda: 1e9,
        broadcast=lambda outlook: outlook,
    )
    cadence.observe(stall_seconds=2.0, write_seconds=0.0)
    clock.now_seconds += 1.0
    cadence.due(1)
    # A day is assumed, three went by.
    assert cadence.interval_seconds == pytest.approx(young_interval(2.0, 4 * DAY_SECONDS), rel=0.01)


@pytest.mark.parametrize(("rank", "asked"), [(0, 1), (1, 0)])
def test_auto_asks_for_failures_on_rank_0(rank: int, asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "rank", lambda: rank)
    monkeypatch.setattr(agreement, "world_size", lambda: 2)
    calls: list[int] = []

    def failures() -> Sequence[Failure]:
        calls.append(1)
        return ()

    cadence = cadence_for(GuardSettings(save_every="auto"), failures=failures)
    assert isinstance(cadence, AutoInterval)
    monkeypatch.setattr(cadence, "_broadcast", lambda outlook: outlook)
    cadence.observe(stall_seconds=1.0, write_seconds=0.0)
    cadence.due(1)
    assert len(calls) == asked


def test_other_cadences_hear_of_saves_and_stay_as_they_are() -> None:
    for settings in (GuardSettings(save_every=5), GuardSettings(save_every="1h")):
        cadence = cadence_for(settings)
        cadence.observe(stall_seconds=99.0, write_seconds=99.0)
    assert isinstance(cadence, EverySeconds)
    assert cadence.interval_seconds == 3600.0
