"""Decisions in words, whole sentences."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from ds_toolkit.guardian.pieces import Coordinates, PieceKind, Sharding
from ds_toolkit.guardian.topology import Slot, decide
from ds_toolkit.guardian.wording import in_words

ALL = frozenset(PieceKind)
TWO = (Coordinates(0), Coordinates(1))
TENSOR_PARALLEL = tuple(Coordinates(dp, tp=tp) for dp in (0, 1) for tp in (0, 1))


def words(
    ranks: Iterable[Coordinates], stage: int, slots: dict[int, list[Slot]], native_moe: bool = False
) -> str:
    return in_words(decide(Sharding(tuple(ranks), stage, native_moe=native_moe), slots))


def test_complete() -> None:
    assert words(TWO, 2, {0: [Slot(12, ALL)], 1: [Slot(12, ALL)]}) == "Step 12 is complete."


def test_complete_with_random_states_lost() -> None:
    assert words([Coordinates(dp) for dp in range(4)], 0, {2: [Slot(12, ALL)]}) == (
        "Step 12 is complete. The random states and tracked objects of ranks 0, 1 and 3 are lost:"
        " they start afresh."
    )


def test_weights_only() -> None:
    assert words(TWO, 2, {0: [Slot(12, ALL)]}) == (
        "Only the weights are whole, at step 12; training cannot be resumed from them."
        " Missing at that step: optimizer shard of dp 1, tp 0, pp 0 (rank 1)."
    )


def test_nothing_with_the_steps_at_which_pieces_are_there() -> None:
    slots = {0: [Slot(12, ALL)], 1: [Slot(10, ALL), Slot(11, ALL)]}
    assert words(TWO, 3, slots) == (
        "Nothing can be written: at no step is all of it there, nor all weights."
        " Step 12 comes nearest; missing at that step:"
        " model file and optimizer shard of dp 1, tp 0, pp 0 (rank 1, there at steps 10 and 11 only)."
    )


def test_a_cell_and_its_shards_are_named_apart() -> None:
    slots = {0: [Slot(12, ALL)], 2: [Slot(12, ALL)]}
    assert words(TENSOR_PARALLEL, 1, slots) == (
        "Nothing can be written: at no step is all of it there, nor all weights."
        " Step 12 comes nearest; missing at that step:"
        " model file of tp 1, pp 0 (ranks 1 and 3);"
        " optimizer shard of dp 0, tp 1, pp 0 (rank 1);"
        " optimizer shard of dp 1, tp 1, pp 0 (rank 3)."
    )


def test_experts() -> None:
    ranks = [Coordinates(dp, ep=dp % 2) for dp in range(4)]
    assert words(ranks, 0, {0: [Slot(3, ALL)]}, native_moe=True) == (
        "Nothing can be written: at no step is all of it there, nor all weights."
        " Step 3 comes nearest; missing at that step:"
        " experts and optimizer states of the experts of tp 0, pp 0, ep 1 (ranks 1 and 3)."
    )


def test_nothing_to_read() -> None:
    expected = "Nothing can be written: no rank has a whole snapshot that can be read."
    assert words(TWO, 2, {}) == expected
    assert words(TWO, 2, {0: []}) == expected


@pytest.mark.parametrize(
    ("num_ranks", "ends_with"), [(9, "dp 8, tp 0, pp 0 (rank 8)."), (40, "and 31 more places.")]
)
def test_a_large_job_does_not_fill_the_screen(num_ranks: int, ends_with: str) -> None:
    text = words([Coordinates(dp) for dp in range(num_ranks)], 3, {0: [Slot(1, ALL)]})
    assert text.endswith(ends_with)
    assert text.count("(rank") == 8


def test_many_ranks_and_steps_are_not_all_listed() -> None:
    slots = {0: [Slot(step, ALL) for step in range(30, 50)], 1: [Slot(step, ALL) for step in range(20)]}
    assert "(rank 1, there at steps 0, 1, 2, 3, 4, 5, 6, 7 and 12 more only)" in words(TWO, 3, slots)
    fresh = words([Coordinates(dp) for dp in range(20)], 0, {0: [Slot(4, ALL)]})
    assert "of ranks 1, 2, 3, 4, 5, 6, 7, 8 and 11 more are lost" in fresh
