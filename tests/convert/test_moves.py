"""However a plan is cut, every element keeps its place, and blocks are whole where they say so."""

from __future__ import annotations

import itertools
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ds_toolkit.checkpoint.dtypes import DTYPES
from ds_toolkit.convert.moves import Block, Move, blocks, num_written_bytes

BLOCK_BYTES = 64
SIZES = ("uint8", "bfloat16", "float32", "float64", "complex128")


@st.composite
def plans(draw: st.DrawFn) -> list[Move]:
    """Moves in the order of the destination, with and without gaps, of elements across blocks too."""
    plan, position, source_offset_bytes = [], draw(st.integers(0, 70)), 0
    for number in range(draw(st.integers(0, 6))):
        source, destination = (DTYPES[draw(st.sampled_from(SIZES))] for _ in range(2))
        num_elements = draw(st.integers(0, 40))
        num_bytes = num_elements * source.size_bytes
        move = Move(Path("shard"), source_offset_bytes, num_bytes, source, position, destination, str(number))
        plan.append(move)
        source_offset_bytes += num_bytes
        position += num_elements * destination.size_bytes + draw(st.sampled_from([0, 0, 3, 64]))
    return plan


def places(plan: list[Move]) -> list[tuple[str, int, int]]:
    """Of every element: whose it is, where it lies and where it goes."""
    return [
        (
            move.member,
            move.source_offset_bytes + element * move.source_dtype.size_bytes,
            move.destination_offset_bytes + element * move.destination_dtype.size_bytes,
        )
        for move in plan
        for element in range(move.num_elements)
    ]


def covered(block: Block) -> set[int]:
    """The destination's bytes that a block holds."""
    return {
        byte
        for piece in block.pieces
        for byte in range(
            piece.destination_offset_bytes, piece.destination_offset_bytes + num_written_bytes(piece)
        )
    }


@given(plans())
def test_every_element_keeps_its_place(plan: list[Move]) -> None:
    cut = [piece for block in blocks(plan, BLOCK_BYTES) for piece in block.pieces]
    assert places([piece for piece in cut if isinstance(piece, Move)]) == places(plan)
    assert all(0 < piece.num_bytes <= BLOCK_BYTES for piece in cut if isinstance(piece, Move))


@given(plans())
def test_blocks_are_whole_where_they_say_so_and_share_no_page_with_others(plan: list[Move]) -> None:
    cut = list(blocks(plan, BLOCK_BYTES))
    for block in cut:
        first = block.start_bytes // BLOCK_BYTES * BLOCK_BYTES
        assert block.is_whole == (covered(block) == set(range(first, first + BLOCK_BYTES)))
        assert max(covered(block)) - block.start_bytes < BLOCK_BYTES + 16
        if block.is_whole:
            others = [other for other in cut if other is not block]
            assert not any(covered(other) & covered(block) for other in others)


@given(plans())
def test_runs_are_what_stands_together(plan: list[Move]) -> None:
    for block in blocks(plan, BLOCK_BYTES):
        runs = list(block.runs())
        assert {byte for start, end in runs for byte in range(start, end)} == covered(block)
        assert all(end < start for (_, end), (start, _) in itertools.pairwise(runs))
