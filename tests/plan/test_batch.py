from __future__ import annotations

import pytest

from ds_toolkit.errors import ToolkitError
from ds_toolkit.plan.batch import plan_batch


def works(batch: int, micro_batches: list[int], gpus: int) -> bool:
    return any(batch % (micro * gpus) == 0 for micro in micro_batches)


@pytest.mark.parametrize(
    ("max_batch", "micro_batches", "gpus"),
    [
        (2000, [2, 4, 6], range(1, 65)),
        (100, [3], range(2, 9)),
        (7, [1], range(1, 9)),
        (512, [8, 16], [16, 24, 32]),
    ],
)
def test_no_other_batch_works_for_more_gpus(max_batch: int, micro_batches: list[int], gpus: range) -> None:
    plan = plan_batch(max_batch, micro_batches, gpus)

    def count(batch: int) -> int:
        return sum(works(batch, micro_batches, number) for number in gpus)

    assert plan.global_batch_size <= max_batch
    assert len(plan.settings) == count(plan.global_batch_size)
    assert all(count(batch) <= len(plan.settings) for batch in range(1, max_batch + 1))
    assert all(
        count(batch) < len(plan.settings) for batch in range(plan.global_batch_size + 1, max_batch + 1)
    )
    assert sorted([*plan.settings, *plan.left_out]) == sorted(gpus)
    for number, (micro, accumulation) in plan.settings.items():
        assert micro * accumulation * number == plan.global_batch_size
        assert micro in micro_batches


def test_the_example_of_deepspeeds_documentation() -> None:
    # Its elasticity section chose 1680 or a multiple for these micro batches and up to 2000 samples.
    plan = plan_batch(2000, [2, 4, 6], range(1, 65))
    assert len(plan.settings) >= sum(works(1680, [2, 4, 6], number) for number in range(1, 65))


def test_the_largest_micro_batch_is_taken() -> None:
    assert plan_batch(64, [2, 8, 4], [4]).settings == {4: (8, 2)}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((0, [1], [1]), "largest batch is 0"),
        ((8, [], [1]), "micro batch is missing"),
        ((8, [0], [1]), "micro batch is 0"),
        ((8, [1], []), "number of GPUs is missing"),
        ((8, [4], [4]), "no batch size works"),
        ((10**9, [1], [1, 2]), "too large"),
    ],
)
def test_what_is_impossible_is_refused(arguments: tuple[int, list[int], list[int]], says: str) -> None:
    with pytest.raises(ToolkitError, match=says):
        plan_batch(*arguments)
