"""When a job is started again, and how long that waits."""

from __future__ import annotations

from pathlib import Path

from ds_toolkit.integrations.headway import Headway
from ds_toolkit.integrations.supervising import Attempt, pauses, why_not_again

HERE, THERE = Path("/here"), Path("/there")


def attempt(exit_code: int = 1, failed_at: int | None = None, **steps: int) -> Attempt:
    places = {"here": HERE, "there": THERE}
    return Attempt(exit_code, 1.0, Headway({places[name]: step for name, step in steps.items()}, failed_at))


def test_only_the_same_failure_twice_running_is_the_last() -> None:
    same = [attempt(failed_at=7, here=4)] * 2
    assert why_not_again(same, 10) == "it failed twice in the same way at step 7, with exit code 1"
    assert "at step 4" in (why_not_again([attempt(here=4)] * 2, 10) or "")
    for other in (
        attempt(2, failed_at=7, here=4),
        attempt(failed_at=8, here=4),
        attempt(failed_at=7, here=5),
        attempt(failed_at=7, here=4, there=1),
    ):
        assert why_not_again([other, same[0]], 10) is None
    assert why_not_again([same[0], attempt(2), same[0]], 10) is None


def test_what_ends_well_or_has_no_restarts_left_is_not_started_again() -> None:
    assert why_not_again([attempt(0)], 10) == "it is done"
    assert why_not_again([attempt(1), attempt(2)], 2) is None
    assert why_not_again([attempt(1), attempt(2), attempt(3)], 2) == "there are no restarts left of 2"
    assert why_not_again([attempt(1)], 0) == "there are no restarts left of 0"


def test_pauses_grow_until_there_is_a_newer_checkpoint() -> None:
    stuck = [attempt(here=4, there=9)] * 9
    assert [pauses(stuck[:number]) for number in range(1, 10)] == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    # Of any directory; a step back, after a checkpoint was deleted, is none.
    further = [*stuck, attempt(here=5, there=9)]
    assert pauses(further) == 1
    assert pauses([*further, attempt(here=4, there=9)]) == 2
    assert pauses([attempt(), attempt(there=1)]) == 1
