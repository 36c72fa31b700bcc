"""When a checkpoint is due, by a clock of our own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ds_toolkit.config.guard_settings import GuardSettings
from ds_toolkit.resilience.cadence import EverySeconds, EverySteps, cadence_for


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

    def broadcast(outlook: tuple[bool, int]) -> tuple[bool, int]:
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
    told = iter([(False, 7), (True, 8)])
    cadence = EverySeconds(0.001, clock=Clock(), broadcast=lambda outlook: next(told))
    assert [cadence.due(step) for step in range(1, 8)] == [False] * 6 + [True]
