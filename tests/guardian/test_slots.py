"""How many slots a rank needs: each state that ranks can reach together is taken as the moment of death."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from surviving_files import Grid, usual_holds

from ds_toolkit.guardian.topology import Slot, Verdict, decide

NUM_STEPS = 6
GRIDS = [
    *(Grid(dp=2, tp=1, pp=1, stage=stage) for stage in (0, 1, 2, 3)),
    Grid(dp=3, tp=1, pp=1, stage=0),
    Grid(dp=3, tp=1, pp=1, stage=2),
    Grid(dp=1, tp=1, pp=2, stage=1),
]


@dataclass(frozen=True)
class Rank:
    """How often a rank has done what it does each step, in this order; `whole`: its last copy is."""

    backward: int = 0
    fence: int = 0
    optimizer: int = 0
    copy: int = 0
    whole: bool = True

    def slots(self, num_slots: int) -> list[int]:
        """Steps in its whole slots: a copy takes the place of the oldest, gone from its first byte on."""
        oldest = max(1, self.copy - num_slots + 1)
        return list(range(oldest, self.copy + (1 if self.whole else 0)))


def moves(ranks: tuple[Rank, ...], met_in_optimizer: bool) -> Iterator[tuple[Rank, ...]]:
    """All that can happen next. At stages 1 to 3 the optimizer ends together, else the backward pass does."""
    for number, rank in enumerate(ranks):
        step = rank.copy + 1
        next_state = None
        if rank.optimizer == step:
            next_state = replace(rank, copy=step, whole=False)
        elif rank.fence == step:
            if not met_in_optimizer or all(other.fence >= step for other in ranks):
                next_state = replace(rank, optimizer=step)
        elif rank.backward == step:
            if rank.whole:
                next_state = replace(rank, fence=step)
        elif step <= NUM_STEPS and (met_in_optimizer or all(other.copy >= step - 1 for other in ranks)):
            next_state = replace(rank, backward=step)
        for state in (next_state, None if rank.whole else replace(rank, whole=True)):
            if state is not None:
                yield (*ranks[:number], state, *ranks[number + 1 :])


def reachable(num_ranks: int, met_in_optimizer: bool) -> set[tuple[Rank, ...]]:
    found = {(Rank(),) * num_ranks}
    to_visit = list(found)
    while to_visit:
        for state in moves(to_visit.pop(), met_in_optimizer):
            if state not in found:
                found.add(state)
                to_visit.append(state)
    return found


def costs_at_most_one_step(grid: Grid, ranks: tuple[Rank, ...], num_slots: int) -> bool:
    holds = usual_holds(grid, node_size=grid.world_size)
    readable = {
        number: [Slot(step, holds[number]) for step in rank.slots(num_slots)]
        for number, rank in enumerate(ranks)
    }
    done_by_all = min(rank.optimizer for rank in ranks)
    if done_by_all < 2:
        # Before the second step there may be nothing yet to go back to.
        return True
    decision = decide(grid.sharding(), readable)
    if decision.verdict is not Verdict.COMPLETE or decision.fresh_ranks:
        return False
    assert decision.step is not None
    return done_by_all - 1 <= decision.step <= done_by_all


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_death_at_any_moment_costs_at_most_one_step(grid: Grid) -> None:
    num_slots = grid.sharding().num_slots
    states = reachable(grid.world_size, met_in_optimizer=grid.stage > 0 and grid.pp == 1)
    assert any(all(rank.copy == NUM_STEPS for rank in state) for state in states)
    assert all(costs_at_most_one_step(grid, state, num_slots) for state in states)
    # Nor is a slot kept that is not needed.
    assert not all(costs_at_most_one_step(grid, state, num_slots - 1) for state in states)
