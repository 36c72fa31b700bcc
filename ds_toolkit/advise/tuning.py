"""Numbers to start from that no arithmetic gives: they come from published experience."""

from __future__ import annotations

import math


def learning_rate(num_parameters: int, share: float = 1.0) -> float:
    """A rate to start from, to two digits: 0.003239 - 0.0001395 ln N, kept between 6e-5 and 1e-3.

    Kaplan et al. 2020 (arXiv 2001.08361, equation D.1), for Adam and models up to about 10^10 parameters; the
    floor is the rate of GPT-3 175B (arXiv 2005.14165, table 2.1), the ceiling is our caution. `share` is the
    part of it to take.
    """
    rate = max(6e-5, 0.003239 - 0.0001395 * math.log(num_parameters))
    return float(f"{min(rate, 1e-3) * share:.2g}")
