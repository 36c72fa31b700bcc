from __future__ import annotations

import math

import pytest

from ds_toolkit.errors import ToolkitError
from ds_toolkit.plan.failures import MttfOf, caught_share, job_mttf_seconds, observed_mttf_seconds

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
