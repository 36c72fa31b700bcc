"""How often a job fails: from a part's MTTF or from what was seen, and how many last words catch."""

from __future__ import annotations

import math
import sys
from enum import Enum

from ds_toolkit.errors import ToolkitError

_BISECTIONS = 60


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

    Failures of n equal and independent parts that fail at a constant rate add up: M = M_part / n. Real
    clusters of few parts do better than this (7.9 h measured at 1,024 GPUs where it gives less: Kokolis et
    al. 2024, arXiv 2410.21680), so a measured MTTF of the job is the better input.

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
    prior_seconds: float = 86_400.0,
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
