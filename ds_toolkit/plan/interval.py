"""When to save: the interval at which checkpoints and lost work together cost the least."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ds_toolkit.plan.failures import not_negative, positive, share

_NEWTON_STEPS = 60
_GOLDEN = (math.sqrt(5) - 1) / 2
_NARROWINGS = 60
# In logarithms: a factor of twenty to either side.
_SEARCH_WIDTH = 3.0


@dataclass(frozen=True)
class Saving:
    """What saving and failing cost one job, in seconds unless a name says otherwise.

    Attributes:
        stall_seconds: how long one checkpoint keeps the training loop waiting; of blocking saves, all of it.
        mttf_seconds: mean time between failures of the whole job.
        write_seconds: how long the write goes on behind the loop's back; 0 for blocking saves.
        slowdown: the share of speed that training loses while such a write runs.
        restart_seconds: from a failure to the first new step, loading included.
        step_seconds: one optimizer step; no interval is shorter.
        caught_share: failures that last words catch: they cost a save and half a step, not half an interval.
        last_words_seconds: how long such a save takes.
        writes_in_flight: writes that may run at the same time.
        budget: the share of time that saving may cost at most; None for no such wish.
        longest_seconds: an interval that policy does not allow to be exceeded; None for no such wish.
    """

    stall_seconds: float
    mttf_seconds: float
    write_seconds: float = 0.0
    slowdown: float = 0.0
    restart_seconds: float = 0.0
    step_seconds: float = 0.0
    caught_share: float = 0.0
    last_words_seconds: float = 0.0
    writes_in_flight: int = 1
    budget: float | None = None
    longest_seconds: float | None = None

    def __post_init__(self) -> None:
        positive(self.mttf_seconds, "mean time to failure")
        not_negative(self.stall_seconds, "stall of a checkpoint")
        for name in ("write_seconds", "restart_seconds", "step_seconds", "last_words_seconds"):
            not_negative(getattr(self, name), name.removesuffix("_seconds").replace("_", " ") + " time")
        share(self.slowdown, "slowdown")
        share(self.caught_share, "share of caught failures")
        positive(self.writes_in_flight, "number of writes in flight")
        if self.budget is not None:
            positive(share(self.budget, "budget"), "budget")
        if self.longest_seconds is not None:
            positive(self.longest_seconds, "longest interval")
        positive(self.cost_seconds, "cost of a checkpoint")

    @property
    def cost_seconds(self) -> float:
        """Training time that one checkpoint costs: the stall, and what the write behind it slows down."""
        return self.stall_seconds + self.slowdown * self.write_seconds


@dataclass(frozen=True)
class Interval:
    """An interval and what is expected of it.

    Attributes:
        seconds: training between the end of one save and the start of the next.
        unbounded_seconds: the same before any bound was applied.
        bound: what made it longer or shorter, in words; None if nothing did.
        useful_share: of the wall clock, the share that ends up in the final weights.
        generations: checkpoints to keep, so that one is whole whatever is in flight.
        warning: why not to trust it; None if nothing speaks against it.
    """

    seconds: float
    unbounded_seconds: float
    bound: str | None
    useful_share: float
    generations: int
    warning: str | None

    def steps(self, step_seconds: float) -> int:
        """The interval in optimizer steps. The optimum is flat.

        Where a save costs less than a hundredth of the MTTF, a third off costs less than 1 % of the time.
        """
        return max(1, round(self.seconds / positive(step_seconds, "step time")))


def young_interval(cost_seconds: float, mttf_seconds: float, caught_share: float = 0.0) -> float:
    """The interval T = sqrt(2 C M / (1 - p)) in seconds, good where C is far below M.

    Young 1974 (CACM 17(9)), who minimizes C / T + T / 2M. With last words a share p of the failures no longer
    costs T / 2, the algebra of fault prediction with recall p (Aupy, Robert, Vivien, Zaidouni 2014, arXiv
    1302.3752).
    """
    positive(cost_seconds, "cost of a checkpoint")
    uncaught = 1 - share(caught_share, "share of caught failures")
    return math.sqrt(2 * cost_seconds * positive(mttf_seconds, "mean time to failure") / uncaught)


def daly_interval(cost_seconds: float, mttf_seconds: float) -> float:
    """Young's interval with the higher-order terms of Daly 2006 (FGCS 22(3), equation 37), in seconds.

    sqrt(2 C M) [1 + sqrt(C / 2M) / 3 + (C / 2M) / 9] - C for C < 2M, else M.
    """
    cost, mttf = (
        positive(cost_seconds, "cost of a checkpoint"),
        positive(mttf_seconds, "mean time to failure"),
    )
    if cost >= 2 * mttf:
        return mttf
    ratio = cost / (2 * mttf)
    return math.sqrt(2 * cost * mttf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


def exact_interval(cost_seconds: float, mttf_seconds: float) -> float:
    """The interval that maximizes Daly's efficiency exactly, in seconds: M (1 + W0(-e^(-1 - C/M))).

    W0 is Lambert's function. With y = T / M the same is the root of y + ln(1 - y) = -C / M in (0, 1), which
    Newton's method finds from above: the left side is concave and falls.
    """
    ratio = positive(cost_seconds, "cost of a checkpoint") / positive(mttf_seconds, "mean time to failure")
    # 1 - y > e^(-1 - ratio) holds at the root, and at this start, for every ratio.
    y = -math.expm1(-1 - ratio)
    if y == 1.0:
        return mttf_seconds  # a save so dear that the rest rounds away
    for _ in range(_NEWTON_STEPS):
        excess = y + math.log1p(-y) + ratio
        following = y + excess * (1 - y) / y
        if following >= y:
            break
        y = following
    return mttf_seconds * y


def efficiency(
    interval_seconds: float, cost_seconds: float, mttf_seconds: float, restart_seconds: float = 0.0
) -> float:
    """The useful share of the wall clock under failures at a constant rate, restarts may fail too.

    Daly 2006 (FGCS 22(3), equation 20): T / (M e^(R/M) (e^((T + C)/M) - 1)). The effective training time
    ratio (ETTR) of Kokolis et al. 2024 (arXiv 2410.21680), (1 - (R + T/2)/M) / (1 + C/T), is its first order.
    """
    positive(interval_seconds, "interval")
    exponent = (interval_seconds + cost_seconds) / mttf_seconds
    if exponent + restart_seconds / mttf_seconds > 700:
        return 0.0  # beyond the range of exp; nothing is ever finished
    return interval_seconds / mttf_seconds * math.exp(-restart_seconds / mttf_seconds) / math.expm1(exponent)


def availability_interval(save_seconds: float, detect_seconds: float, mttf_seconds: float) -> float:
    """The cycle T = C + sqrt(2 (M + D) C + C^2) in seconds that maximizes availability.

    Saxena et al. 2024 (arXiv 2410.18124), D being the time to recover. It is the period from one start of a
    save to the next, so it includes C.
    """
    save = positive(save_seconds, "cost of a checkpoint")
    failing = positive(mttf_seconds, "mean time to failure") + not_negative(detect_seconds, "recovery time")
    return save + math.sqrt(2 * failing * save + save * save)


def useful_share(saving: Saving, interval_seconds: float) -> float:
    """The share of the wall clock that ends up in the final weights, between 0 and 1.

    Failures at a constant rate. One that last words miss falls back to the newest checkpoint whose write had
    ended: Daly's efficiency with the write time added to the restart. One that they catch keeps what was
    trained since the restart, M (1 - e^(-T/M)) / (1 - e^(-(T + C)/M)) on average, but for half a step, and
    costs the save.
    """
    positive(interval_seconds, "interval")
    cost, mttf = saving.cost_seconds, saving.mttf_seconds
    start = saving.restart_seconds + saving.caught_share * saving.last_words_seconds
    missed = efficiency(interval_seconds, cost, mttf, start + saving.write_seconds)
    in_training = math.expm1(-interval_seconds / mttf) / math.expm1(-(interval_seconds + cost) / mttf)
    caught = max(0.0, math.exp(-start / mttf) * in_training - saving.step_seconds / 2 / mttf)
    return (1 - saving.caught_share) * missed + saving.caught_share * caught


def plan_interval(saving: Saving) -> Interval:
    """The best interval within its bounds.

    The write behind the loop's back delays every checkpoint by the same time, so the optimum is that of the
    stall. It does bound the interval from below: a new write cannot start before an old one has ended.
    """
    best = _best_interval(saving)
    seconds, bound = best, None
    floors = [
        (saving.write_seconds / saving.writes_in_flight, "a write must end before the next may start"),
        (saving.step_seconds, "one step is the shortest interval"),
        (saving.cost_seconds / saving.budget if saving.budget else 0.0, "saving may not cost more"),
    ]
    if saving.longest_seconds is not None and seconds > saving.longest_seconds:
        seconds, bound = saving.longest_seconds, "the longest interval allowed"
    for floor, reason in floors:
        if seconds < floor:
            seconds, bound = floor, reason
    return Interval(
        seconds=seconds,
        unbounded_seconds=best,
        bound=bound,
        useful_share=useful_share(saving, seconds),
        generations=math.ceil(saving.write_seconds / seconds) + 1,
        warning=_warning(saving),
    )


def _best_interval(saving: Saving) -> float:
    if saving.caught_share == 0:
        return exact_interval(saving.cost_seconds, saving.mttf_seconds)
    # With last words there is no closed form; the share has one peak, near Young's interval. Golden section.
    guess = young_interval(saving.cost_seconds, saving.mttf_seconds, saving.caught_share)
    low, high = math.log(guess) - _SEARCH_WIDTH, math.log(guess) + _SEARCH_WIDTH
    for _ in range(_NARROWINGS):
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        if useful_share(saving, math.exp(left)) < useful_share(saving, math.exp(right)):
            low = left
        else:
            high = right
    return math.exp((low + high) / 2)


def _warning(saving: Saving) -> str | None:
    if saving.cost_seconds < saving.mttf_seconds / 2:
        return None
    return (
        "a checkpoint costs half of the mean time to failure or more: most work is lost at any interval;"
        " make saving cheaper or the job smaller"
    )
