from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from ds_toolkit.errors import ToolkitError
from ds_toolkit.plan.interval import (
    Saving,
    availability_interval,
    daly_interval,
    efficiency,
    exact_interval,
    plan_interval,
    useful_share,
    young_interval,
)

# Llama 3 405B: 419 interruptions in 54 days.
LLAMA_3 = 54 * 86_400 / 419
NUM_FAILURES = 400_000


@pytest.mark.parametrize(
    ("mttf_minutes", "published"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)], ids=["24 h", "6 h", "15 min"]
)
def test_dalys_published_cases(mttf_minutes: float, published: float) -> None:
    assert daly_interval(5, mttf_minutes) == pytest.approx(published, rel=0.006)
    assert exact_interval(5, mttf_minutes) == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize(
    ("cost", "young", "daly", "waste", "useful", "useful_with_restart"),
    [
        (0.2, 66.74, 66.61, 0.00599, 0.99402, 0.96760),
        (0.5, 105.52, 105.19, 0.00948, 0.99055, 0.96422),
        (2, 211.05, 209.71, 0.01895, 0.98117, 0.95508),
        (5, 333.69, 330.37, 0.02997, 0.97033, 0.94454),
        (30, 817.38, 797.50, 0.07341, 0.92838, 0.90370),
        (60, 1155.95, 1116.29, 0.10381, 0.89975, 0.87583),
        (300, 2584.77, 2388.64, 0.23213, 0.78547, 0.76459),
    ],
)
def test_worked_values_of_a_large_run(
    cost: float, young: float, daly: float, waste: float, useful: float, useful_with_restart: float
) -> None:
    assert young_interval(cost, LLAMA_3) == pytest.approx(young, abs=0.01)
    assert daly_interval(cost, LLAMA_3) == pytest.approx(daly, abs=0.01)
    assert math.sqrt(2 * cost / LLAMA_3) == pytest.approx(waste, abs=1e-5)
    assert efficiency(daly, cost, LLAMA_3) == pytest.approx(useful, abs=1e-5)
    assert efficiency(daly, cost, LLAMA_3, 300) == pytest.approx(useful_with_restart, abs=1e-5)


@pytest.mark.parametrize(
    ("cost", "interval", "mttf_hours"), [(120, 5400, 33.8), (0.2, 216, 32.4)], ids=["before", "after"]
)
def test_what_large_runs_chose_lies_on_youngs_curve(cost: float, interval: float, mttf_hours: float) -> None:
    # DLRover's GLM-65B, with blocking saves and then with saves in memory.
    assert young_interval(cost, mttf_hours * 3600) == pytest.approx(interval, rel=0.002)


def test_spot_instances_fail_often() -> None:
    # 127 preemptions in a day.
    assert young_interval(2, 680.3) == pytest.approx(52.2, abs=0.05)
    assert daly_interval(2, 680.3) == pytest.approx(50.8, abs=0.06)


def test_the_optimum_is_flat() -> None:
    best = daly_interval(60, LLAMA_3)
    assert efficiency(best / 2, 60, LLAMA_3) == pytest.approx(0.878, abs=0.001)
    assert efficiency(best * 2, 60, LLAMA_3) == pytest.approx(0.877, abs=0.001)
    for factor in (2 / 3, 1.4):
        assert efficiency(best * factor, 60, LLAMA_3) > 0.99 * efficiency(best, 60, LLAMA_3)


@pytest.mark.parametrize(
    ("interval_minutes", "ratio"), [(5, 0.7756), (10, 0.8251), (14.71, 0.8294), (20, 0.8203), (60, 0.6654)]
)
def test_the_useful_share_is_the_effective_training_time_ratio(interval_minutes: float, ratio: float) -> None:
    # Kokolis et al. 2024: (1 - (u + T / 2) / M) / (1 + C / T), on 2,048 nodes.
    mttf, cost, restart, interval = 1.803 * 3600, 60, 300, interval_minutes * 60
    assert (1 - (restart + interval / 2) / mttf) / (1 + cost / interval) == pytest.approx(ratio, abs=1e-4)
    share = useful_share(Saving(cost, mttf, restart_seconds=restart), interval)
    # The ratio is the first order of it: it leaves out that a save and a restart may fail, and the second
    # failure within an interval.
    second_order = ((interval + cost + restart) / mttf) ** 2 / 2 + cost / mttf
    assert abs(share - ratio) < second_order
    assert young_interval(cost, mttf) == pytest.approx(14.71 * 60, rel=0.001)


@pytest.mark.parametrize("ratio", [1e-15, 1e-6, 0.01, 0.3, 1, 2, 5, 30, 50, 1000])
def test_the_exact_interval_is_lamberts_and_never_beaten(ratio: float) -> None:
    interval = exact_interval(ratio, 1)
    # w = T - 1 solves w e^w = -e^(-1 - C).
    assert (interval - 1) * math.exp(interval - 1) == pytest.approx(-math.exp(-1 - ratio))
    if ratio < 0.01:
        assert interval == pytest.approx(young_interval(ratio, 1), rel=1e-3)
    best = efficiency(interval, ratio, 1)
    for factor in (0.9, 0.99, 1.01, 1.1):
        assert efficiency(interval * factor, ratio, 1) <= best * (1 + 1e-12)


def test_a_save_dearer_than_two_mttfs_is_made_once_a_mttf() -> None:
    assert daly_interval(20, 10) == 10
    assert daly_interval(1000, 10) == 10


def test_the_availability_optimum() -> None:
    assert availability_interval(60, 300, LLAMA_3) == pytest.approx(1232.95, abs=0.01)


@pytest.mark.parametrize(
    ("caught", "interval"),
    [(0, 1155.9), (0.5, 1634.8), (0.8, 2584.8), (0.9, 3655.4), (0.95, 5169.6), (0.99, 11559.5)],
)
def test_last_words_stretch_the_interval(caught: float, interval: float) -> None:
    assert young_interval(60, LLAMA_3, caught) == pytest.approx(interval, abs=0.1)
    planned = plan_interval(Saving(60, LLAMA_3, caught_share=caught))
    assert planned.seconds == pytest.approx(interval, rel=0.06 if caught < 0.95 else 0.3)
    assert planned.seconds >= exact_interval(60, LLAMA_3)


def test_an_asynchronous_save_costs_its_stall_and_its_slowdown() -> None:
    saving = Saving(stall_seconds=0.5, mttf_seconds=LLAMA_3, write_seconds=60, slowdown=0.05)
    assert saving.cost_seconds == 3.5
    assert young_interval(saving.cost_seconds, LLAMA_3) == pytest.approx(279.19, abs=0.01)
    assert plan_interval(saving).unbounded_seconds == pytest.approx(279.19, rel=0.01)
    longer_write = dataclasses.replace(saving, write_seconds=120, slowdown=0.025)
    assert plan_interval(longer_write).seconds == plan_interval(saving).seconds


def test_what_a_write_in_flight_costs() -> None:
    # Simulated elsewhere: 2.929 %; C / T + (T / 2 + w) / M gives 2.973 %.
    saving = Saving(2, LLAMA_3, write_seconds=120)
    assert 1 - useful_share(saving, young_interval(2, LLAMA_3)) == pytest.approx(0.0293, abs=5e-4)


@pytest.mark.parametrize(
    ("caught", "at_best", "at_youngs"), [(0.8, 0.04381, 0.05809), (0.95, 0.02045, 0.04993)]
)
def test_last_words_pay_only_if_the_interval_follows(caught: float, at_best: float, at_youngs: float) -> None:
    saving = Saving(60, LLAMA_3, caught_share=caught)
    stretched = useful_share(saving, young_interval(60, LLAMA_3, caught))
    assert 1 - stretched == pytest.approx(at_best, abs=4e-3)
    assert 1 - useful_share(saving, young_interval(60, LLAMA_3)) == pytest.approx(at_youngs, abs=4e-3)


def test_bounds_are_kept_and_named() -> None:
    saving = Saving(0.05, LLAMA_3, write_seconds=120)
    planned = plan_interval(saving)
    assert planned.unbounded_seconds == pytest.approx(33.4, abs=0.1)
    assert (planned.seconds, planned.bound) == (120, "a write must end before the next may start")
    assert plan_interval(dataclasses.replace(saving, writes_in_flight=2)).seconds == 60
    assert plan_interval(dataclasses.replace(saving, step_seconds=150)).seconds == 150
    assert plan_interval(dataclasses.replace(saving, budget=0.0001)).seconds == pytest.approx(500)
    longest = plan_interval(Saving(60, LLAMA_3, longest_seconds=600))
    assert (longest.seconds, longest.bound) == (600, "the longest interval allowed")
    # What is impossible beats what is not wanted.
    assert plan_interval(dataclasses.replace(saving, longest_seconds=30)).seconds == 120
    assert plan_interval(Saving(60, LLAMA_3)).bound is None


def test_generations_cover_the_write_in_flight() -> None:
    assert plan_interval(Saving(60, LLAMA_3)).generations == 1
    assert plan_interval(Saving(0.05, LLAMA_3, write_seconds=120)).generations == 2
    assert plan_interval(Saving(0.05, LLAMA_3, write_seconds=120, writes_in_flight=3)).generations == 4


def test_steps_are_whole_and_at_least_one() -> None:
    planned = plan_interval(Saving(60, LLAMA_3))
    assert planned.steps(8.855) == 126
    assert planned.steps(1e6) == 1
    with pytest.raises(ToolkitError, match="step time"):
        planned.steps(0)


@pytest.mark.parametrize(("cost", "warned"), [(0.49, False), (0.5, True), (3, True)])
def test_a_save_of_half_a_mttf_is_warned_about(cost: float, warned: bool) -> None:
    planned = plan_interval(Saving(cost, 1))
    assert (planned.warning is not None) is warned
    assert 0 <= planned.useful_share < 1


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Saving)])
def test_no_number_that_is_none_is_taken(field: str, value: float) -> None:
    with pytest.raises(ToolkitError):
        Saving(**{"stall_seconds": 60.0, "mttf_seconds": 1000.0, field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["stall_seconds", "mttf_seconds", "writes_in_flight", "budget"])
def test_zero_is_refused_where_it_would_divide(field: str) -> None:
    with pytest.raises(ToolkitError):
        Saving(**{"stall_seconds": 60.0, "mttf_seconds": 1000.0, field: 0})  # type: ignore[arg-type]


@pytest.mark.parametrize("function", [young_interval, daly_interval, exact_interval])
@pytest.mark.parametrize("numbers", [(0, 1), (1, 0), (-1, 1), (math.nan, 1), (1, math.nan), (math.inf, 1)])
def test_formulas_refuse_what_is_no_time(function: object, numbers: tuple[float, float]) -> None:
    with pytest.raises(ToolkitError):
        function(*numbers)  # type: ignore[operator]


def simulated_share(saving: Saving, interval: float, gaps: np.ndarray, caught: np.ndarray) -> float:
    """The useful share over a history of failures, step by step rather than by formula.

    `gaps` are the seconds from one failure to the next; a restart that is hit by a failure starts again.
    """
    start = saving.restart_seconds + np.where(np.roll(caught, 1), saving.last_words_seconds, 0.0)
    at_work = np.maximum(gaps - start, 0.0)
    cycle = interval + saving.cost_seconds
    durable = np.floor(np.maximum(at_work - saving.write_seconds, 0.0) / cycle) * interval
    whole, rest = np.divmod(at_work, cycle)
    trained = whole * interval + np.minimum(rest, interval)
    if saving.step_seconds:
        trained = np.floor(trained / saving.step_seconds) * saving.step_seconds
    return float(np.where(caught, trained, durable).sum() / gaps.sum())


def simulated_optimum(saving: Saving, around: float) -> tuple[float, float]:
    """Where the useful share of a seeded history peaks, and the peak: a parabola over log interval.

    All intervals meet the same failures, so that chance moves the curve up and down but not its shape.
    """
    random = np.random.default_rng(20_240_417)
    gaps = random.exponential(saving.mttf_seconds, NUM_FAILURES)
    caught = random.random(NUM_FAILURES) < saving.caught_share
    logs = np.log(around) + np.linspace(-0.5, 0.5, 41)
    shares = [simulated_share(saving, interval, gaps, caught) for interval in np.exp(logs)]
    cubic = np.polynomial.Polynomial.fit(logs, shares, 4)
    fine = np.linspace(logs[0], logs[-1], 4001)
    best = int(np.argmax(cubic(fine)))
    return float(np.exp(fine[best])), float(cubic(fine[best]))


@pytest.mark.parametrize(
    "saving",
    [
        Saving(60, LLAMA_3),
        Saving(300, LLAMA_3, restart_seconds=300),
        Saving(300, 900, restart_seconds=600),
        Saving(2, LLAMA_3, write_seconds=120, restart_seconds=60),
        Saving(0.5, LLAMA_3, write_seconds=60, slowdown=0.05),
        Saving(60, LLAMA_3, caught_share=0.8, restart_seconds=60, step_seconds=9, last_words_seconds=20),
        Saving(60, LLAMA_3, caught_share=0.5, step_seconds=9),
    ],
    ids=["blocking", "restart", "one in three", "behind", "slowdown", "last words", "half caught"],
)
def test_the_planned_optimum_is_the_one_that_failures_find(saving: Saving) -> None:
    planned = plan_interval(saving)
    # Started off the mark, so that the peak is not where the search was centred.
    found, peak = simulated_optimum(saving, around=planned.unbounded_seconds * 1.15)
    assert planned.unbounded_seconds == pytest.approx(found, rel=0.02)
    assert useful_share(saving, planned.unbounded_seconds) == pytest.approx(peak, rel=0.005)


def test_the_simulation_would_notice_another_optimum() -> None:
    saving = Saving(300, 900)
    found, _ = simulated_optimum(saving, around=exact_interval(300, 900))
    assert young_interval(300, 900) != pytest.approx(found, rel=0.02)
