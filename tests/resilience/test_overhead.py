"""Which steps get a snapshot, by measurements of our own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_toolkit.config.guard_settings import GuardSettings
from ds_toolkit.resilience import agreement
from ds_toolkit.resilience.overhead import MOST_STEPS, FixedPace, SnapshotPace, fewest_steps, pace_for

SECONDS = st.floats(min_value=1e-4, max_value=10.0)
BUDGETS = st.floats(min_value=1e-3, max_value=0.99)


class Run:
    """Two ranks; a step takes `step_seconds`, longer by `slower_seconds` where a copy runs beside it."""

    def __init__(
        self,
        budget: float,
        *,
        step_seconds: float = 1.0,
        slower_seconds: float = 0.0,
        stall_seconds: float = 0.0,
    ) -> None:
        self.step_seconds: Callable[[int], float] = lambda step: step_seconds
        self.slower_seconds, self.stall_seconds = slower_seconds, stall_seconds
        self.snapshots: list[int] = []
        self.num_talks = 0
        self.step = 0
        self._told: Any = None
        self.first = SnapshotPace(budget, decides=True, broadcast=self._tell)
        self.second = SnapshotPace(budget, decides=False, broadcast=lambda _: self._told)

    def train(self, num_steps: int) -> list[int]:
        """The steps, of so many, that got a snapshot."""
        begin = len(self.snapshots)
        for _ in range(num_steps):
            copying = bool(self.snapshots) and self.snapshots[-1] == self.step
            self.step += 1
            took = self.step_seconds(self.step) + copying * self.slower_seconds
            self.first.observe(step_seconds=took, stall_seconds=copying * self.stall_seconds)
            # Another rank sees other times, and its opinion does not count.
            self.second.observe(step_seconds=7 * took, stall_seconds=9.0)
            due = self.first.due(self.step)
            assert self.second.due(self.step) == due
            assert self.second.snapshot_every == self.first.snapshot_every
            if due:
                self.snapshots.append(self.step)
        return self.snapshots[begin:]

    def _tell(self, told: tuple[int, int]) -> tuple[int, int]:
        self.num_talks += 1
        self._told = told
        return told


@settings(deadline=None)
@given(cost_seconds=SECONDS, step_seconds=SECONDS, budget=BUDGETS)
def test_the_smallest_number_within_the_budget(
    cost_seconds: float, step_seconds: float, budget: float
) -> None:
    steps = fewest_steps(cost_seconds, step_seconds, budget)
    assert 1 <= steps <= MOST_STEPS

    def is_within(count: int) -> bool:
        return cost_seconds / (count * step_seconds) <= budget * (1 + 1e-6)

    assert is_within(steps) or steps == MOST_STEPS
    assert (
        steps == 1
        or not is_within(steps - 1)
        or cost_seconds / (steps - 1) / step_seconds > budget * (1 - 1e-6)
    )


@pytest.mark.parametrize(
    ("cost_seconds", "step_seconds", "budget", "steps"),
    [
        (0.03, 1.0, 0.03, 1),
        (0.06, 1.0, 0.03, 2),
        (0.07, 1.0, 0.01, 7),  # 7.000000000000001 in floating point
        (0.0601, 1.0, 0.03, 3),
        (0.0, 1.0, 0.03, 1),
        (0.0, 0.0, 0.03, 1),
        (1e9, 1.0, 0.03, MOST_STEPS),
        (1.0, 0.0, 0.03, MOST_STEPS),
    ],
)
def test_numbers_of_steps(cost_seconds: float, step_seconds: float, budget: float, steps: int) -> None:
    assert fewest_steps(cost_seconds, step_seconds, budget) == steps


@settings(max_examples=40, deadline=None)
@given(
    budget=st.floats(min_value=0.005, max_value=0.5),
    step_seconds=SECONDS,
    stall=st.floats(min_value=0, max_value=0.5),
    slower=st.floats(min_value=0, max_value=0.5),
)
def test_a_steady_run_ends_up_within_the_budget(
    budget: float, step_seconds: float, stall: float, slower: float
) -> None:
    run = Run(
        budget,
        step_seconds=step_seconds,
        stall_seconds=stall * step_seconds,
        slower_seconds=slower * step_seconds,
    )
    run.train(120)
    every = run.first.snapshot_every
    assert every == fewest_steps((stall + slower) * step_seconds, step_seconds, budget)
    assert run.first.slowdown is not None
    assert run.first.slowdown <= budget + 1e-6
    assert run.first.slowdown == pytest.approx((stall + slower) / every, abs=1e-6)
    began = run.step
    taken = run.train(200)
    assert len(taken) == pytest.approx(200 / every, abs=5)
    assert all(step % every == 0 for step in taken)
    # Cost over the time of training alone, as the budget is meant; one snapshot may be too many in 200 steps.
    assert len(taken) * (stall + slower) <= 200 * budget + stall + slower
    assert began == 120


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(1e-3, 5.0), st.floats(0.0, 1.0)), min_size=150, max_size=150), BUDGETS)
def test_ranks_agree_whatever_is_measured(measured: list[tuple[float, float]], budget: float) -> None:
    run = Run(budget)
    run.step_seconds = lambda step: measured[step - 1][0]
    for step in range(150):
        run.stall_seconds = measured[step][1]
        run.train(1)
    assert 1 <= run.first.snapshot_every <= MOST_STEPS
    assert run.num_talks == 3


def test_it_begins_with_every_second_step_and_says_so_when_it_knows(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(0.03, step_seconds=0.5, slower_seconds=0.03, stall_seconds=0.01)
    with caplog.at_level(logging.INFO, "ds_toolkit"):
        assert run.train(50) == list(range(2, 51, 2))
        assert run.first.slowdown == pytest.approx(0.04)
        assert caplog.messages == []
        assert run.train(150)[-1] == 198
    assert run.first.snapshot_every == 3
    assert caplog.messages == [
        "a snapshot every 3 steps from now on, not every 2 steps: one costs 40 ms (10 ms of waiting, 30 ms"
        " of slower computing) beside a step of 500 ms, so that 2.7% of the time goes into them; the budget"
        " is 3.0%"
    ]


def test_what_was_right_from_the_beginning_is_said_too(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(0.03, stall_seconds=0.05)
    with caplog.at_level(logging.INFO, "ds_toolkit"):
        run.train(300)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("a snapshot every 2 steps from now on, not every 2 steps: ")


def test_where_every_step_has_a_snapshot_some_go_without_to_be_compared_with() -> None:
    run = Run(0.03, stall_seconds=0.001)
    run.train(100)
    assert run.first.snapshot_every == 1
    assert sorted(set(range(101, 301)) - set(run.train(200))) == [150, 200, 250, 300]
    # Copies become dear: the steps without one are what tells.
    run.slower_seconds = 0.5
    run.train(150)
    assert run.first.snapshot_every == 17


def test_a_run_that_becomes_slow_as_a_whole_is_not_taken_for_dear_copies() -> None:
    run = Run(0.03, stall_seconds=0.001)
    run.train(300)
    run.step_seconds = lambda step: 5.0
    run.train(300)
    assert run.first.snapshot_every == 1


def test_a_slow_step_now_and_then_counts_for_nothing() -> None:
    run = Run(0.03, stall_seconds=0.001)
    run.step_seconds = lambda step: 60.0 if step % 9 == 0 else 1.0
    run.train(500)
    assert run.first.snapshot_every == 1


def test_a_rare_long_stall_counts() -> None:
    run = Run(0.03)
    for step in range(300):
        run.stall_seconds = 3.2 if step % 16 == 0 else 0.0
        run.train(1)
    assert run.first.snapshot_every > 3


def test_a_copy_that_seems_to_make_steps_faster_pays_for_no_stall() -> None:
    run = Run(0.03, stall_seconds=0.1, slower_seconds=-0.1)
    run.train(120)
    assert run.first.snapshot_every == 4


def test_nothing_is_decided_before_enough_steps_of_both_kinds() -> None:
    pace = SnapshotPace(0.03, decides=True, broadcast=lambda told: told)
    # The first step has no copy beside it.
    for step in range(1, 2 * SnapshotPace.LEAST_SAMPLES + 2):
        assert pace.slowdown is None
        pace.observe(step_seconds=1.0, stall_seconds=1.0)
        pace.due(step)
    assert pace.slowdown is not None
    assert pace.snapshot_every == 2


def test_steps_that_take_no_time_decide_nothing() -> None:
    run = Run(0.03, step_seconds=0.0, stall_seconds=1.0)
    run.train(200)
    assert (run.first.snapshot_every, run.first.slowdown) == (2, None)


def test_a_run_that_goes_back_looks_again_at_once() -> None:
    run = Run(0.03, stall_seconds=0.3)
    run.train(101)
    assert run.first.snapshot_every == 10
    for pace in (run.first, run.second):
        pace.moved_to(7)
    run.step, run.snapshots, talks = 7, [], run.num_talks
    assert run.train(30) == [10, 20, 30]
    assert run.num_talks == talks + 1


def test_after_going_back_the_first_step_has_no_copy_beside_it() -> None:
    pace = SnapshotPace(0.03, decides=True, broadcast=lambda told: told)
    assert pace.due(2)
    pace.moved_to(0)
    for step in range(1, 40):
        pace.observe(step_seconds=1.0, stall_seconds=0.2 if step % 2 and step > 1 else 5.0)
        pace.due(step)
    # Stalls are those of odd steps, each after an even one with its snapshot, but for the first.
    assert pace.slowdown == pytest.approx(0.1)


def test_a_fixed_pace() -> None:
    pace = pace_for(GuardSettings(snapshot_every=5))
    assert isinstance(pace, FixedPace)
    pace.observe(step_seconds=1.0, stall_seconds=99.0)
    pace.moved_to(3)
    assert [step for step in range(1, 16) if pace.due(step)] == [5, 10, 15]
    never = pace_for(GuardSettings(snapshot_every=0))
    assert not any(never.due(step) for step in range(1, 16))


@pytest.mark.parametrize(("rank", "every"), [(0, 1), (1, 2)])
def test_auto_is_decided_on_rank_0(rank: int, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "rank", lambda: rank)
    pace = pace_for(GuardSettings(snapshot_every="auto", overhead_budget=0.5))
    assert isinstance(pace, SnapshotPace)
    monkeypatch.setattr(pace, "_broadcast", lambda told: told)
    for step in range(1, 100):
        pace.observe(step_seconds=1.0, stall_seconds=0.4)
        pace.due(step)
    assert pace.snapshot_every == every
