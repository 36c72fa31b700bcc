"""How often a job fails: from a part's MTTF or from what was seen, and how many last words catch."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ds_toolkit.errors import ToolkitError
from ds_toolkit.units import format_seconds

ASSUMED_FROM = "7.9 h at 1,024 GPUs (arXiv 2410.21680), 3.1 h at 16,384 (arXiv 2407.21783), a day at most"

_BISECTIONS = 60
_DAY_SECONDS = 86_400.0
# Kokolis et al. 2024 measured the one; Llama 3 had 419 interruptions in 54 days.
_FEWER_GPUS, _FEWER_MTTF_SECONDS = 1024, 7.9 * 3600
_MORE_GPUS, _MORE_MTTF_SECONDS = 16_384, 54 * _DAY_SECONDS / 419


class MttfOf(str, Enum):
    """What a mean time to failure was stated for."""

    GPU = "gpu"
    NODE = "node"
    JOB = "job"


def positive(value: float, noun: str) -> float:
    """The value, if it is a finite number above zero.

    Raises:
        ToolkitError: it is zero, negative, infinite or not a number.
    """
    if not (_is_finite(value) and value > 0):
        raise ToolkitError(f"the {noun} is {_shown(value)}", fix="give a finite number above zero")
    return value


def not_negative(value: float, noun: str) -> float:
    """The value, if it is a finite number of zero or more.

    Raises:
        ToolkitError: it is negative, infinite or not a number.
    """
    if not (_is_finite(value) and value >= 0):
        raise ToolkitError(f"the {noun} is {_shown(value)}", fix="give a finite number, zero or more")
    return value


def share(value: float, noun: str) -> float:
    """The value, if it lies in [0, 1).

    Raises:
        ToolkitError: it does not.
    """
    if not 0 <= value < 1:
        raise ToolkitError(f"the {noun} is {value:g}", fix="give a share from 0 up to, not including, 1")
    return value


def _is_finite(value: float) -> bool:
    # Whole numbers beyond the range of floats raise where floats would be infinite.
    return abs(value) <= sys.float_info.max


def _shown(value: float) -> str:
    return f"{value:g}" if _is_finite(value) or isinstance(value, float) else "beyond all numbers"


def job_mttf_seconds(mttf_seconds: float, of: MttfOf, num_nodes: int, gpus_per_node: int) -> float:
    """The whole job's MTTF in seconds, when any failed part ends the job.

    Failures of n equal and independent parts that fail at a constant rate add up: M = M_part / n. A rate
    seen on a whole cluster may mislead about few parts (128 nodes at 6.5 failures in 1,000 node days should
    run 28.8 h; 7.9 h were measured: Kokolis et al. 2024, arXiv 2410.21680), so a measured MTTF of the job is
    the better input.

    Raises:
        ToolkitError: a number that is not above zero.
    """
    num_parts = {
        MttfOf.JOB: 1.0,
        MttfOf.NODE: positive(num_nodes, "number of nodes"),
        MttfOf.GPU: positive(num_nodes, "number of nodes") * positive(gpus_per_node, "number of GPUs a node"),
    }[of]
    return positive(mttf_seconds, "mean time to failure") / num_parts


def observed_mttf_seconds(
    running_seconds: float,
    num_failures: int,
    prior_seconds: float = _DAY_SECONDS,
    prior_failures: float = 1.0,
) -> float:
    """The MTTF in seconds after `running_seconds` with `num_failures`, as the mean of a Gamma posterior.

    With a Gamma(n0, t0) prior on the rate of a Poisson process, M = (t0 + t) / (n0 + n): the prior counts as
    n0 failures in t0 seconds, one a day unless told otherwise.
    """
    not_negative(running_seconds, "running time")
    not_negative(num_failures, "number of failures")
    total_seconds = positive(prior_seconds, "prior's time") + running_seconds
    return total_seconds / (positive(prior_failures, "prior's number of failures") + num_failures)


def caught_share(num_caught: int, num_missed: int, credibility: float = 0.95) -> float:
    """The share of failures that last words catch, as a lower bound that holds with this credibility.

    The quantile 1 - credibility of Beta(1 + caught, 1 + missed), the posterior of a uniform prior. Never 1:
    an interval that trusted last words alone would be infinite.
    """
    not_negative(num_caught, "number of caught failures")
    not_negative(num_missed, "number of missed failures")
    target = 1 - share(credibility, "credibility")
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if _beta_distribution(middle, 1 + num_caught, 1 + num_missed) < target:
            low = middle
        else:
            high = middle
    return low


def assumed_mttf_seconds(num_gpus: int) -> float:
    """A job's MTTF in seconds where nothing is known but its size: a start, not a promise.

    Through 7.9 h at 1,024 GPUs (Kokolis et al. 2024, arXiv 2410.21680) and 3.09 h at 16,384 (419
    interruptions in 54 days of Llama 3, arXiv 2407.21783) a straight line in logarithms; above, M falls as
    1 / n. Never more than a day: small jobs die of other things than hardware.
    """
    count = positive(num_gpus, "number of GPUs")
    if count > _MORE_GPUS:
        return _MORE_MTTF_SECONDS * _MORE_GPUS / count
    slope = math.log(_MORE_MTTF_SECONDS / _FEWER_MTTF_SECONDS) / math.log(_MORE_GPUS / _FEWER_GPUS)
    return min(_DAY_SECONDS, _FEWER_MTTF_SECONDS * math.pow(count / _FEWER_GPUS, slope))


@dataclass(frozen=True)
class Failure:
    """An end that nobody wanted.

    Attributes:
        at_seconds: when, in seconds since 1970.
        caught: whether last words made a checkpoint of it that training resumes from.
    """

    at_seconds: float
    caught: bool


@dataclass(frozen=True)
class Expectation:
    """What is to be expected of a job's failures.

    Attributes:
        mttf_seconds: mean time between them.
        caught_share: those that last words catch, as a lower bound that holds with 95 % credibility.
        why: both numbers and what they rest on, in words.
    """

    mttf_seconds: float
    caught_share: float
    why: str


def expected_failures(
    failures: Sequence[Failure],
    *,
    num_gpus: int,
    since_seconds: float,
    now_seconds: float,
    mttf_seconds: float | None = None,
    last_words: bool = True,
) -> Expectation:
    """What the failures seen so far, and the number of GPUs, let expect.

    Args:
        failures: those of the job's directory, in any order.
        num_gpus: of the job.
        since_seconds: when it began to be watched; earlier if the first failure was. Time in which nothing
            ran counts as time without failures.
        now_seconds: the end of that time; both in seconds since 1970.
        mttf_seconds: a mean time between failures that was given and is believed; None to estimate it.
        last_words: whether there are any; without them none is caught.
    """
    num_caught = sum(failure.caught for failure in failures)
    bound = caught_share(num_caught, len(failures) - num_caught) if last_words else 0.0
    if mttf_seconds is not None:
        mttf, why = positive(mttf_seconds, "mean time to failure"), "as given"
    else:
        began_seconds = min([since_seconds, *(failure.at_seconds for failure in failures)])
        watched_seconds = max(0.0, now_seconds - began_seconds)
        assumed = assumed_mttf_seconds(num_gpus)
        mttf = observed_mttf_seconds(watched_seconds, len(failures), prior_seconds=assumed)
        why = (
            f"{len(failures)} seen here in {format_seconds(watched_seconds)}, and one every"
            f" {format_seconds(assumed)} assumed for {num_gpus:,} GPUs by {ASSUMED_FROM}"
        )
    why = f"a failure every {format_seconds(mttf)} ({why})"
    if last_words:
        why += f", of which last words catch {bound:.0%} at least ({num_caught} of {len(failures)} seen)"
    return Expectation(mttf, bound, why)


def _beta_distribution(x: float, a: int, b: int) -> float:
    # For whole a and b the regularized incomplete beta function is a tail of the binomial distribution.
    if x <= 0 or x >= 1:
        return float(x >= 1)
    n = a + b - 1
    log_x, log_rest = math.log(x), math.log1p(-x)
    return math.fsum(
        math.exp(
            math.lgamma(n + 1) - math.lgamma(j + 1) - math.lgamma(n - j + 1) + j * log_x + (n - j) * log_rest
        )
        for j in range(a, n + 1)
    )
