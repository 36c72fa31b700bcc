from __future__ import annotations

import math

import pytest

from ds_toolkit.errors import ToolkitError
from ds_toolkit.plan.failures import (
    ASSUMED_FROM,
    Failure,
    MttfOf,
    assumed_mttf_seconds,
    caught_share,
    expected_failures,
    job_mttf_seconds,
    observed_mttf_seconds,
)

HOUR = 3600.0
DAY = 24 * HOUR


def test_the_mttf_of_a_part_is_divided_by_their_number() -> None:
    # Llama 3 405B: 16,384 GPUs, one interruption in 3.09 h, so 5.78 years a GPU.
    assert job_mttf_seconds(5.78 * 365.25 * DAY, MttfOf.GPU, 2048, 8) == pytest.approx(3.093 * HOUR, rel=1e-3)
    assert job_mttf_seconds(DAY / 6.5e-3, MttfOf.NODE, 2048, 8) == pytest.approx(1.803 * HOUR, rel=1e-3)
    assert job_mttf_seconds(DAY / 6.5e-3, MttfOf.NODE, 16_384, 8) == pytest.approx(0.225 * HOUR, rel=2e-3)
    assert job_mttf_seconds(DAY / 6.5e-3, MttfOf.NODE, 128, 8) == pytest.approx(28.8 * HOUR, rel=2e-3)
    assert job_mttf_seconds(HOUR, MttfOf.JOB, 2048, 8) == HOUR


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, 10**400, -(10**400)])
def test_an_mttf_is_above_zero(value: float) -> None:
    with pytest.raises(ToolkitError, match="mean time to failure"):
        job_mttf_seconds(value, MttfOf.JOB, 1, 1)


def test_observation_moves_the_prior() -> None:
    assert observed_mttf_seconds(0, 0) == DAY
    assert observed_mttf_seconds(10 * HOUR, 3) == 8.5 * HOUR
    assert observed_mttf_seconds(1e9, 1000) == pytest.approx(1e6, rel=1e-3)
    with pytest.raises(ToolkitError):
        observed_mttf_seconds(-1, 0)


@pytest.mark.parametrize(
    ("num_caught", "num_missed", "bound"),
    # Beta(1, 1) is uniform; Beta(n + 1, 1) has the distribution x^(n + 1).
    [(0, 0, 0.05), (1, 0, 0.05**0.5), (9, 0, 0.05**0.1), (0, 4, 1 - 0.95**0.2)],
)
def test_the_bound_of_what_is_caught(num_caught: int, num_missed: int, bound: float) -> None:
    assert caught_share(num_caught, num_missed) == pytest.approx(bound, rel=1e-9)


def test_the_bound_never_reaches_one_and_follows_the_evidence() -> None:
    bounds = [caught_share(caught, 1) for caught in (0, 1, 10, 100, 10_000)]
    assert bounds == sorted(bounds)
    assert 0.999 < bounds[-1] < 1
    assert caught_share(800, 200) == pytest.approx(0.8, abs=0.03)
    assert caught_share(800, 200) < 0.8


@pytest.mark.parametrize(
    ("num_gpus", "hours"),
    # The two that were measured, what lies between, twice the larger, and a day at most.
    [(1024, 7.9), (16_384, 3.0931), (4096, math.sqrt(7.9 * 3.0931)), (32_768, 3.0931 / 2), (38, 24), (1, 24)],
)
def test_what_is_assumed_goes_through_what_was_measured(num_gpus: int, hours: float) -> None:
    assert assumed_mttf_seconds(num_gpus) == pytest.approx(hours * HOUR, rel=1e-4)


def test_what_is_assumed_never_rises_with_the_size_and_has_no_jump() -> None:
    counts = [int(1.3**power) + 1 for power in range(50)]
    assumed = [assumed_mttf_seconds(count) for count in counts]
    assert assumed == sorted(assumed, reverse=True)
    for count in (38, 1024, 16_384):
        assert assumed_mttf_seconds(count + 1) == pytest.approx(assumed_mttf_seconds(count), rel=0.02)
    with pytest.raises(ToolkitError, match="number of GPUs"):
        assumed_mttf_seconds(0)


def test_without_failures_the_assumption_counts_as_one() -> None:
    expected = expected_failures([], num_gpus=8, since_seconds=1e9, now_seconds=1e9 + 6 * HOUR)
    assert (expected.mttf_seconds, expected.caught_share) == (30 * HOUR, pytest.approx(0.05))
    assert expected.why == (
        "a failure every 30 h 0 min (0 seen here in 6 h 0 min, and one every 24 h 0 min assumed for 8 GPUs"
        " by 7.9 h at 1,024 GPUs (arXiv 2410.21680), 3.1 h at 16,384 (arXiv 2407.21783), a day at most),"
        " of which last words catch 5% at least (0 of 0 seen)"
    )


def test_failures_shorten_the_time_and_those_caught_are_counted() -> None:
    now = 1e9
    failures = [Failure(now - hours * HOUR, caught) for hours, caught in ((2, True), (10, True), (5, False))]
    expected = expected_failures(failures, num_gpus=1024, since_seconds=now - HOUR, now_seconds=now)
    # Watched since the first failure, which was before the run: (7.9 h + 10 h) / (1 + 3).
    assert expected.mttf_seconds == pytest.approx(17.9 * HOUR / 4)
    assert expected.caught_share == caught_share(2, 1)
    assert "3 seen here in 10 h 0 min" in expected.why
    assert "assumed for 1,024 GPUs" in expected.why
    assert ASSUMED_FROM in expected.why
    assert "(2 of 3 seen)" in expected.why


def test_what_is_given_is_believed_and_without_last_words_none_is_caught() -> None:
    expected = expected_failures(
        [Failure(5.0, True)] * 9,
        num_gpus=8,
        since_seconds=0.0,
        now_seconds=HOUR,
        mttf_seconds=8 * HOUR,
        last_words=False,
    )
    assert (expected.mttf_seconds, expected.caught_share) == (8 * HOUR, 0.0)
    assert expected.why == "a failure every 8 h 0 min (as given)"


def test_a_clock_that_was_set_back_takes_no_time_away() -> None:
    expected = expected_failures([], num_gpus=1, since_seconds=1e9, now_seconds=0.0)
    assert expected.mttf_seconds == DAY
