"""The decision against a second opinion that goes by DeepSpeed's file names, and cases worked by hand."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from surviving_files import (
    Grid,
    Holds,
    Slots,
    files_at,
    grids,
    opened,
    random_slots,
    usual_holds,
    weights_whole,
    written,
)

from ds_toolkit.errors import ToolkitError
from ds_toolkit.guardian.pieces import Coordinates, Piece, PieceKind, Sharding
from ds_toolkit.guardian.topology import Decision, Missing, Slot, Verdict, decide

MODEL, OPTIMIZER, EXPERTS, STATE, HPZ = (
    PieceKind.MODEL,
    PieceKind.OPTIMIZER,
    PieceKind.EXPERTS,
    PieceKind.RANK_STATE,
    PieceKind.HPZ_WEIGHTS,
)
ALL_OF_STAGE_1 = frozenset({MODEL, OPTIMIZER, STATE})
OTHERS_OF_STAGE_1 = frozenset({OPTIMIZER, STATE})


def decided(grid: Grid, slots: Slots) -> Decision:
    readable = {rank: [Slot(step, holds) for step, holds in steps.items()] for rank, steps in slots.items()}
    return decide(grid.sharding(), readable)


def expected(grid: Grid, slots: Slots) -> tuple[Verdict, int | None]:
    steps = sorted({step for of_rank in slots.values() for step in of_rank})
    whole = [step for step in steps if opened(grid) <= files_at(grid, slots, step)]
    on_all = [step for step in whole if all(step in of_rank for of_rank in slots.values() if of_rank)]
    if whole:
        return Verdict.COMPLETE, (on_all or whole)[-1]
    for step in reversed(steps):
        if weights_whole(grid, slots, step):
            return Verdict.WEIGHTS_ONLY, step
    return Verdict.IMPOSSIBLE, None


def check(grid: Grid, slots: Slots) -> Decision:
    decision = decided(grid, slots)
    verdict, step = expected(grid, slots)
    assert decision.verdict is verdict
    if verdict is not Verdict.IMPOSSIBLE:
        assert decision.step == step
    check_sources(grid, slots, decision)
    check_missing(grid, slots, decision)
    return decision


def check_sources(grid: Grid, slots: Slots, decision: Decision) -> None:
    """Each piece comes from a slot of the one step that holds it, and together they are what is opened."""
    files: set[str] = set()
    for piece, rank in decision.sources.items():
        assert decision.step is not None
        assert piece.kind in slots[rank][decision.step]
        dp, tp, pp, ep = grid.at(rank)
        assert (piece.tp, piece.pp) == (tp, pp)
        assert piece.dp in (dp, None)
        assert piece.ep in (ep, None)
        files |= written(grid, rank, frozenset({piece.kind}))
    if decision.verdict is Verdict.COMPLETE:
        assert files == opened(grid)
    elif decision.verdict is Verdict.IMPOSSIBLE:
        assert not files
    elif grid.stage < 3:
        assert files == {name for name in opened(grid) if "optim_states" not in name}
    else:
        only = {rank: {0: frozenset[PieceKind]()} for rank in decision.sources.values()}
        for piece, rank in decision.sources.items():
            only[rank][0] |= {piece.kind}
        assert weights_whole(grid, only, 0)


def check_missing(grid: Grid, slots: Slots, decision: Decision) -> None:
    """What is said to be missing is what would be opened and is not there; so are the ranks' own states."""
    there = set() if decision.step is None else files_at(grid, slots, decision.step)
    files: set[str] = set()
    for missing in decision.missing:
        for rank in missing.ranks:
            files |= written(grid, rank, frozenset({missing.piece.kind}))
            assert decision.step not in missing.other_steps
        holders = [steps for rank, steps in slots.items() if rank in missing.ranks]
        elsewhere = {
            step for steps in holders for step, kinds in steps.items() if missing.piece.kind in kinds
        }
        assert list(missing.other_steps) == sorted(elsewhere)
    assert files == opened(grid) - there
    with_state = {
        rank for rank, steps in slots.items() if decision.step in steps and STATE in steps[decision.step]
    }
    assert set(decision.fresh_ranks) == set(range(grid.world_size)) - with_state
    if decision.verdict is Verdict.IMPOSSIBLE:
        for step in {step for steps in slots.values() for step in steps}:
            # No step comes nearer than the one that is named.
            assert not opened(grid) - files_at(grid, slots, step) < files


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_subset_of_lost_ranks(world_size: int) -> None:
    verdicts = set()
    for grid, node_size in product(grids(world_size), (1, 2, world_size)):
        holds = usual_holds(grid, node_size)
        for alive in product([False, True], repeat=world_size):
            slots = {rank: {5: holds[rank]} for rank in range(world_size) if alive[rank]}
            verdicts.add(check(grid, slots).verdict)
    assert verdicts == set(Verdict) if world_size > 1 else {Verdict.COMPLETE, Verdict.IMPOSSIBLE}


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_subset_of_lost_slots(world_size: int) -> None:
    for grid in grids(world_size):
        holds = usual_holds(grid, 2)
        for steps in product([(), (4,), (5,), (4, 5)], repeat=world_size):
            slots = {rank: dict.fromkeys(steps[rank], holds[rank]) for rank in range(world_size)}
            check(grid, slots)


@pytest.mark.parametrize("world_size", [6, 8, 12, 16])
def test_samples_of_larger_grids(world_size: int) -> None:
    chance = random.Random(world_size)
    verdicts = [
        check(grid, random_slots(grid, chance)).verdict for grid in grids(world_size) for _ in range(4)
    ]
    assert set(verdicts) == set(Verdict)


@st.composite
def accidents(draw: st.DrawFn) -> tuple[Grid, dict[int, dict[int, Holds]]]:
    grid = draw(st.sampled_from([grid for size in range(1, 9) for grid in grids(size)]))
    usual = usual_holds(grid, draw(st.sampled_from([1, 2, 4])))
    steps = st.dictionaries(st.integers(1, 4), st.sets(st.sampled_from(PieceKind), max_size=1), max_size=3)
    slots = {}
    for rank in draw(st.sets(st.sampled_from(range(grid.world_size)))):
        # Seldom is a part of a slot not there.
        slots[rank] = {
            step: usual[rank] - (without if draw(st.integers(0, 7)) == 0 else set())
            for step, without in draw(steps).items()
        }
    return grid, slots


@given(accidents())
@settings(max_examples=400, deadline=None)
def test_against_the_second_opinion(accident: tuple[Grid, dict[int, dict[int, Holds]]]) -> None:
    check(*accident)


@given(accidents(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_one_more_slot_never_makes_it_worse(
    accident: tuple[Grid, dict[int, dict[int, Holds]]], chance: random.Random
) -> None:
    grid, slots = accident
    order = [Verdict.IMPOSSIBLE, Verdict.WEIGHTS_ONLY, Verdict.COMPLETE]
    before = order.index(decided(grid, slots).verdict)
    rank = chance.randrange(grid.world_size)
    slots.setdefault(rank, {})[chance.randrange(1, 5)] = frozenset(PieceKind)
    assert order.index(decided(grid, slots).verdict) >= before


def test_stage_0_takes_any_copy_of_a_cell_and_says_whose_random_states_are_lost() -> None:
    holds = frozenset({MODEL, STATE})
    decision = decided(Grid(dp=3, tp=1, pp=1, stage=0), {2: {7: holds}})
    assert (decision.verdict, decision.step) == (Verdict.COMPLETE, 7)
    assert decision.sources == {Piece(MODEL, 0, 0): 2, Piece(STATE, 0, 0, dp=2): 2}
    assert decision.fresh_ranks == (0, 1)


def test_a_step_is_done_when_every_rank_that_can_be_asked_has_it() -> None:
    holds = frozenset({MODEL, STATE})
    grid = Grid(dp=2, tp=1, pp=1, stage=0)
    ahead = {0: {3: holds, 4: holds}, 1: {2: holds, 3: holds}}
    assert decided(grid, ahead).step == 3
    # Nothing is known of a rank whose node is gone: it holds nobody back.
    assert decided(grid, {0: {3: holds, 4: holds}}).step == 4
    assert decided(grid, {0: {3: holds, 4: holds}, 1: {}}).step == 4
    # Nor is a copy left unused because an old one of another rank turned up.
    assert decided(grid, {0: {3: holds, 4: holds}, 1: {1: holds}}).step == 4


def test_an_older_step_that_is_whole_comes_before_newer_weights() -> None:
    slots = {0: {8: ALL_OF_STAGE_1, 9: ALL_OF_STAGE_1}, 1: {8: OTHERS_OF_STAGE_1}}
    decision = decided(Grid(dp=2, tp=1, pp=1, stage=2), slots)
    assert (decision.verdict, decision.step) == (Verdict.COMPLETE, 8)


def test_two_steps_are_never_put_together() -> None:
    slots = {0: {9: ALL_OF_STAGE_1}, 1: {8: OTHERS_OF_STAGE_1}}
    decision = decided(Grid(dp=2, tp=1, pp=1, stage=1), slots)
    assert (decision.verdict, decision.step) == (Verdict.WEIGHTS_ONLY, 9)
    assert decision.sources == {Piece(MODEL, 0, 0): 0}
    assert decision.missing == (Missing(Piece(OPTIMIZER, 0, 0, dp=1), (1,), (8,)),)


def test_the_copy_of_the_first_rank_is_taken_as_deepspeed_takes_it() -> None:
    slots = {rank: {9: ALL_OF_STAGE_1} for rank in (2, 1, 0)}
    assert decided(Grid(dp=3, tp=1, pp=1, stage=1), slots).sources[Piece(MODEL, 0, 0)] == 0


def test_an_arena_and_a_replica_of_one_step_are_taken_together() -> None:
    readable = {0: [Slot(4, frozenset({OPTIMIZER, STATE})), Slot(4, frozenset({MODEL}))]}
    assert decide(Sharding((Coordinates(0),), stage=1), readable).verdict is Verdict.COMPLETE


@pytest.mark.parametrize(
    ("alive", "verdict"),
    [
        ((0, 1, 2, 3), Verdict.COMPLETE),
        ((2, 3), Verdict.WEIGHTS_ONLY),
        ((0, 1, 3), Verdict.WEIGHTS_ONLY),
        ((1, 2), Verdict.IMPOSSIBLE),
    ],
)
def test_hpz_covers_the_weights_with_one_whole_group(alive: tuple[int, ...], verdict: Verdict) -> None:
    holds = frozenset({MODEL, OPTIMIZER, STATE, HPZ})
    grid = Grid(dp=4, tp=1, pp=1, stage=3, hpz=2)
    decision = decided(grid, {rank: {6: holds} for rank in alive})
    assert decision.verdict is verdict
    if verdict is Verdict.WEIGHTS_ONLY:
        assert {piece.kind for piece in decision.sources} == {MODEL, HPZ}
        # A snapshot that was taken while the second copy was not there does not count.
        without = {rank: {6: holds - {HPZ}} for rank in alive}
        assert decided(grid, without).verdict is Verdict.IMPOSSIBLE


def test_weights_of_experts_with_one_copy_die_with_it() -> None:
    holds = frozenset({MODEL, OPTIMIZER, EXPERTS, STATE})
    alive = {0: {6: holds}, 1: {6: holds}, 2: {6: holds}}
    single = decided(Grid(dp=4, tp=1, pp=1, stage=1, ep=4, native_moe=True), alive)
    assert single.verdict is Verdict.IMPOSSIBLE
    assert Piece(EXPERTS, 0, 0, ep=3) in {missing.piece for missing in single.missing}
    twice = decided(Grid(dp=4, tp=1, pp=1, stage=1, ep=2, native_moe=True), alive)
    assert twice.verdict is Verdict.WEIGHTS_ONLY
    assert {piece: rank for piece, rank in twice.sources.items() if piece.kind is EXPERTS} == {
        Piece(EXPERTS, 0, 0, ep=0): 0,
        Piece(EXPERTS, 0, 0, ep=1): 1,
    }


def test_where_nothing_is_whole_the_newest_of_the_nearest_steps_is_named() -> None:
    grid = Grid(dp=4, tp=1, pp=1, stage=3)
    slots = {
        0: {6: ALL_OF_STAGE_1, 7: ALL_OF_STAGE_1},
        1: {6: ALL_OF_STAGE_1, 7: ALL_OF_STAGE_1},
        2: {7: frozenset({MODEL})},
        3: {6: frozenset({OPTIMIZER}), 8: ALL_OF_STAGE_1},
    }
    decision = decided(grid, slots)
    assert (decision.verdict, decision.step) == (Verdict.IMPOSSIBLE, 7)
    assert decision.missing == (
        Missing(Piece(OPTIMIZER, 0, 0, dp=2), (2,), ()),
        Missing(Piece(MODEL, 0, 0, dp=3), (3,), (8,)),
        Missing(Piece(OPTIMIZER, 0, 0, dp=3), (3,), (6, 8)),
    )


def test_a_snapshot_of_a_rank_that_the_job_does_not_have() -> None:
    with pytest.raises(ToolkitError, match="snapshot of rank 2, which this job does not have"):
        decide(Sharding((Coordinates(0), Coordinates(1)), stage=0), {2: [Slot(1, frozenset({MODEL}))]})


@pytest.mark.parametrize(
    ("ranks", "settings", "why"),
    [
        ((), {"stage": 1}, "there are no ranks"),
        ((Coordinates(0),), {"stage": 4}, "there is no ZeRO stage 4"),
        ((Coordinates(0), Coordinates(0)), {"stage": 1}, "2 ranks are at dp 0, tp 0, pp 0"),
        ((Coordinates(1),), {"stage": 1}, "0 ranks are at dp 0, tp 0, pp 0"),
        ((Coordinates(0, tp=0), Coordinates(1, tp=1)), {"stage": 1}, "0 ranks are at dp 0, tp 1, pp 0"),
        (
            (Coordinates(0, ep=0), Coordinates(1, ep=1), Coordinates(2, ep=0)),
            {"stage": 1, "native_moe": True},
            "the experts of tp 0, pp 0 are not spread evenly over 2 expert ranks",
        ),
        (
            (Coordinates(0), Coordinates(1), Coordinates(2)),
            {"stage": 3, "hpz_size": 2},
            "3 ranks do not split into hpZ groups of 2",
        ),
        ((Coordinates(0),), {"stage": 3, "hpz_size": 0}, "1 ranks do not split into hpZ groups of 0"),
        ((Coordinates(0),), {"stage": 3, "native_moe": True}, "DeepSpeed has no native MoE at stage 3"),
    ],
)
def test_ranks_that_no_job_has(ranks: tuple[Coordinates, ...], settings: dict[str, int], why: str) -> None:
    with pytest.raises(ToolkitError) as raised:
        Sharding(ranks, **settings)  # type: ignore[arg-type]
    assert raised.value.why == why
