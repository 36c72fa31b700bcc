from __future__ import annotations

import random

import pytest

from ds_toolkit.errors import ToolkitError
from ds_toolkit.plan.two_levels import TwoLevels, plan_two_levels

LLAMA_3 = 54 * 86_400 / 419


def test_worked_values() -> None:
    plan = plan_two_levels(0.5, 60, LLAMA_3, soft_share=0.9)
    assert plan.memory_seconds == pytest.approx(111.23, abs=0.01)
    assert plan.disk_seconds == pytest.approx(3655.4, abs=0.1)
    assert plan.memory_per_disk == 33
    assert plan.overhead == pytest.approx(0.04182, abs=1e-5)


def test_last_words_catch_soft_failures_only() -> None:
    plan = plan_two_levels(0.5, 60, LLAMA_3, soft_share=0.9, caught_share=0.8)
    assert plan.memory_seconds == pytest.approx(248.7, abs=0.1)
    assert plan.disk_seconds == pytest.approx(3655.4, abs=0.1)
    assert plan.overhead == pytest.approx(0.03685, abs=2e-5)


def test_a_checkpoint_in_memory_that_costs_more_than_one_on_disk_is_warned_about() -> None:
    assert plan_two_levels(60, 60, LLAMA_3, soft_share=0.9).warning is None
    warning = plan_two_levels(61, 60, LLAMA_3, soft_share=0.9).warning
    assert warning is not None
    assert "a checkpoint in memory costs 61 s, more than one on disk (60 s)" in warning


@pytest.mark.parametrize("soft", [0, 1, -0.1, float("nan")])
def test_a_share_of_none_or_all_is_no_second_level(soft: float) -> None:
    with pytest.raises(ToolkitError):
        plan_two_levels(0.5, 60, LLAMA_3, soft)


def simulated_waste(plan: TwoLevels, memory_per_disk: int, num_failures: int = 40_000) -> float:
    """Time that did not end up in the weights, over a seeded history of soft and hard failures."""
    chance = random.Random(7)
    useful = wall = since_disk = 0.0
    count = 0  # memory checkpoints since the last one on disk
    for _ in range(num_failures):
        left = chance.expovariate(1 / LLAMA_3)
        wall += left
        while True:
            to_disk = count + 1 == memory_per_disk
            cost = plan.memory_seconds + 0.5 + (60 if to_disk else 0)
            if left < cost:
                break
            left -= cost
            since_disk += plan.memory_seconds
            count += 1
            if to_disk:
                useful += since_disk
                since_disk, count = 0.0, 0
        if chance.random() >= 0.9:
            since_disk, count = 0.0, 0
    return 1 - useful / wall


def test_a_history_of_failures_costs_what_is_expected() -> None:
    plan = plan_two_levels(0.5, 60, LLAMA_3, soft_share=0.9)
    waste = simulated_waste(plan, plan.memory_per_disk)
    assert waste == pytest.approx(plan.overhead, rel=0.05)
    assert simulated_waste(plan, plan.memory_per_disk // 3) > waste
    assert simulated_waste(plan, plan.memory_per_disk * 3) > waste
