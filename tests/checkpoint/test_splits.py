"""How a tensor was split: what is recorded, what it means, and what is not believed."""

from __future__ import annotations

import itertools
import math
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_toolkit.checkpoint.layouts.boxes import Box, strided_box, whole, why_not_covered
from ds_toolkit.checkpoint.layouts.patterns import PatternTable
from ds_toolkit.checkpoint.layouts.splits import RecordedSplits, UnknownSplitError
from ds_toolkit.errors import ToolkitError

SIDE = st.integers(0, 3)


@st.composite
def shapes_and_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=0, max_size=3)))
    sides = st.tuples(*[st.tuples(SIDE, SIDE) for _ in shape])
    drawn = draw(st.lists(sides, max_size=5))
    return shape, [Box(tuple(a for a, _ in box), tuple(b for _, b in box)) for box in drawn]


@settings(max_examples=400, deadline=None)
@given(shapes_and_boxes())
def test_coverage_is_what_counting_every_element_says(drawn: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = drawn
    counts: dict[tuple[int, ...], int] = {}
    for box in boxes:
        for index in itertools.product(*map(range_of, box.start, box.size)):
            counts[index] = counts.get(index, 0) + 1
    each_once = counts == dict.fromkeys(itertools.product(*map(range, shape)), 1)
    if all(box.lies_in(shape) for box in boxes):
        assert (why_not_covered(shape, boxes) is None) == each_once
    else:
        assert why_not_covered(shape, boxes) is not None


def range_of(start: int, size: int) -> range:
    return range(start, start + size)


def test_as_many_elements_as_needed_are_not_enough() -> None:
    twice = [Box((0, 0), (2, 2)), Box((0, 0), (2, 2))]
    assert "overlap" in str(why_not_covered((4, 2), twice))
    outside = [Box((0, 0), (2, 2)), Box((3, 0), (2, 2))]
    assert "reaches out" in str(why_not_covered((4, 2), outside))
    assert "4 of the 8" in str(why_not_covered((4, 2), twice[:1]))
    assert "absurdly many" in str(why_not_covered((4000,), [Box((i,), (1,)) for i in range(4000)]))


@pytest.mark.parametrize(
    ("size", "offset", "strides", "expected"),
    [
        ((2, 3), 8, (4, 1), None),  # its last column would be in the next row
        ((2, 2), 5, (4, 1), Box((1, 1), (2, 2))),
        ((3, 4), 0, (4, 1), whole((3, 4))),
        ((1, 4), 4, (99, 1), Box((1, 0), (1, 4))),  # one step of any length is none
        ((2, 2), 0, (8, 1), None),  # every second row
        ((4, 3), 0, (1, 4), None),  # transposed
        ((6,), 0, (1,), None),
        ((2, 4), 8, (4, 1), None),  # beyond the end
        ((2, 2), -1, (4, 1), None),
    ],
)
def test_a_strided_view_is_a_box_or_is_not(
    size: tuple[int, ...], offset: int, strides: tuple[int, ...], expected: Box | None
) -> None:
    found = strided_box((3, 4), size, offset, strides)
    if (size, offset) == ((2, 3), 8):
        assert found is None
    assert found == expected


def test_a_scalar_is_a_box() -> None:
    assert strided_box((), (), 0, ()) == Box((), ())
    assert why_not_covered((), [Box((), ())]) is None


# Patterns.


def test_patterns_match_from_the_beginning() -> None:
    table = PatternTable([(r"^a\.b$", 1), (r"a\.", 2), (r"\d+.dense.weight", 3), ("^x$|b", 4)], "file")
    assert table.find("a.b") == [1, 2]
    assert table.find("a.bc") == [2]
    assert table.find("xa.b") == []
    assert table.find("12.dense.weight_more") == [3]
    assert table.find("b") == [4]


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (r"(a+)+$", "might never end"),
        (r"(a|a)*b", "might never end"),
        (r"(?:x{2}){50}", "might never end"),
        (".*.*.*.*x", "might never end"),
        ("a" * 3000, "absurdly long"),
        ("(", "missing )"),
        ("[", "unterminated"),
        (7, "no text"),
    ],
)
def test_patterns_that_are_not_used(pattern: Any, why: str) -> None:
    started = time.perf_counter()
    with pytest.raises(ToolkitError, match="pattern of parameter names") as caught:
        PatternTable([(pattern, 1)], "file").find("a" * 60)
    assert why in str(caught.value.why)
    assert time.perf_counter() - started < 1


# What is recorded.

KEYS = {
    "replicated": "tp_replicated_parameter_patterns",
    "average": "parameter_to_average_patterns",
    "row": "parameter_with_row_parallelism_patterns",
    "vocabulary": "vocabulary_parameter_patterns",
    "halves": "parameter_with_2_sub_params_cat_dim_0",
}


def recorded(num_ranks: int = 2, **named: Any) -> RecordedSplits:
    info = {KEYS.get(key, key): value for key, value in named.items()}
    return RecordedSplits(info, num_ranks, "file")


def why_refused(splits: RecordedSplits, *shapes: tuple[int, ...]) -> str:
    with pytest.raises(UnknownSplitError) as caught:
        splits.of("w", list(shapes))
    return str(caught.value)


def places(splits: RecordedSplits, *shapes: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Rank, first index in its part, and first index in the whole, along the first dimension."""
    split = splits.of("w", list(shapes))
    return [(piece.rank, piece.in_shard.start[0], piece.in_whole.start[0]) for piece in split.pieces]


def test_without_a_word_nothing_is_put_together() -> None:
    assert "does not record" in why_refused(recorded(), (2, 2), (2, 2))
    # Metadata of experts alone say nothing about tensor parallelism.
    assert "does not record" in why_refused(recorded(expert_parameter_patterns=["w1"]), (2, 2), (2, 2))


def test_what_no_pattern_names_is_split_along_the_first_dimension() -> None:
    split = recorded(row=["other"]).of("w", [(3, 4), (2, 4)])
    assert split.shape == (5, 4)
    assert [piece.in_whole for piece in split.pieces] == [Box((0, 0), (3, 4)), Box((3, 0), (2, 4))]
    assert "no dimension 0" in why_refused(recorded(row=["other"]), (), ())
    assert "reaches out" in why_refused(recorded(row=["other"]), (3, 4), (2, 5))


def test_rows_are_split_along_the_second_dimension() -> None:
    split = recorded(row=["w"]).of("w", [(3, 4), (3, 2)])
    assert split.shape == (3, 6)
    assert split.pieces[1].in_whole == Box((0, 4), (3, 2))
    assert "no dimension 1" in why_refused(recorded(row=["w"]), (3,), (3,))


def test_replicated_ones_have_one_shape() -> None:
    split = recorded(replicated=["w"]).of("w", [(3,), (3,)])
    assert (split.shape, len(split.pieces), len(split.copies)) == ((3,), 1, 1)
    assert "have it whole" in why_refused(recorded(replicated=["w"]), (3,), (4,))


def test_what_is_to_be_averaged_must_be_equal() -> None:
    split = recorded(average=["w"]).of("w", [(3,), (3,)])
    assert "averaged" in str(split.if_copies_differ)
    assert recorded(replicated=["w"]).of("w", [(3,), (3,)]).if_copies_differ is None


def test_halves_are_those_of_torch_chunk() -> None:
    # Five rows in two chunks: three and two.
    assert places(recorded(halves=["w"]), (5, 2), (5, 2)) == [(0, 0, 0), (1, 0, 3), (0, 3, 6), (1, 3, 8)]


def test_a_vocabulary_loses_its_padding() -> None:
    split = recorded(vocabulary=["w"], original_vocab_size=5).of("w", [(4, 2), (4, 2)])
    assert split.shape == (5, 2)
    assert [piece.in_whole.size for piece in split.pieces] == [(4, 2), (1, 2)]
    small = recorded(vocabulary=["w"], original_vocab_size=3).of("w", [(4, 2), (4, 2)])
    assert [piece.rank for piece in small.pieces] == [0]
    assert recorded(vocabulary=["w"], original_vocab_size=9).of("w", [(4, 2), (4, 2)]).shape == (8, 2)
    assert "original_vocab_size" in why_refused(recorded(vocabulary=["w"]), (4, 2), (4, 2))


def sub_params(shape: Any, **more: Any) -> RecordedSplits:
    described = {"patterns": ["w"], "shape": shape, "partition_dim": 0}
    return recorded(parameter_with_sub_params=[described], **more)


def test_sub_parameters_by_their_sizes_and_by_their_number() -> None:
    assert places(sub_params(((4, 2), -1)), (3, 2), (3, 2)) == [(0, 0, 0), (1, 0, 2), (0, 2, 4), (1, 2, 5)]
    assert places(sub_params((2, -1)), (4, 2), (4, 2)) == [(0, 0, 0), (1, 0, 2), (0, 2, 4), (1, 2, 6)]
    assert "no widths" in why_refused(sub_params(((3, 3), -1)), (3, 2), (3, 2))
    assert "recorded as" in why_refused(sub_params(((4, 2), 7)), (3, 2), (3, 2))
    assert "recorded as" in why_refused(sub_params(((4, 2), 1, 2)), (3, 2), (3, 2))


def test_sub_parameters_by_their_widths() -> None:
    widths = {"universal_checkpoint_version": 0.4, "sub_param_shard_widths": {"w": [[2, 1], [1, 1]]}}
    uneven = sub_params(((3, 2), -1), **widths)
    assert places(uneven, (3, 2), (2, 2)) == [(0, 0, 0), (1, 0, 2), (0, 2, 3), (1, 1, 4)]
    assert "of the shape" in why_refused(uneven, (4, 2), (2, 2))
    without = sub_params(((4, 2), -1), universal_checkpoint_version=0.4)
    assert "not as DeepSpeed writes it" in why_refused(without, (3, 2), (3, 2))


def affine(**changes: Any) -> RecordedSplits:
    """Four rows of three, two for each of two ranks; changed as told."""
    ranks = {
        rank: {
            "shard_shape": [2, 3],
            "pieces": [
                {"shape": [2, 3], "source": [6 * rank, [3, 1]], "dest": [0, [3, 1]], "locations": [rank]}
            ],
        }
        for rank in (0, 1)
    }
    entry: dict[str, Any] = {"logical_shape": [4, 3], "ranks": ranks}
    for path, value in changes.pop("entry", {}).items():
        *steps, last = path
        target: Any = entry
        for step in steps:
            target = target[step]
        target[last] = value
    return recorded(affine_map={"version": 1, "params": {"^w$": entry}, **changes})


PIECE = ("ranks", 1, "pieces", 0)


def test_an_affine_map_is_followed() -> None:
    assert places(affine(), (2, 3), (2, 3)) == [(0, 0, 0), (1, 0, 2)]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({(*PIECE, "source"): [0, [3, 1]]}, "overlap"),
        ({(*PIECE, "source"): [9, [3, 1]]}, "no box"),
        ({(*PIECE, "source"): [7, [3, 1]]}, "no box"),
        ({(*PIECE, "dest"): [0, [1, 2]]}, "no box"),
        ({(*PIECE, "shape"): [1, 3]}, "9 of the 12"),
        ({(*PIECE, "scale"): 0.5}, "scaled"),
        ({(*PIECE, "locations"): [0, 1]}, "6 of the 12"),
        ({(*PIECE, "shape"): [2.0, 3]}, "not as DeepSpeed writes it"),
        ({(*PIECE, "source"): None}, "not as DeepSpeed writes it"),
        ({("logical_shape",): [5, 3]}, "12 of the 15"),
        ({("logical_shape",): [-4, 3]}, "not as DeepSpeed writes it"),
        ({("ranks", 1, "shard_shape"): [3, 3]}, "should have the shape (3, 3)"),
        ({("ranks", 2): {"shard_shape": [0, 3], "pieces": []}}, "ranks [0, 1, 2]"),
        ({("ranks",): {}}, "ranks []"),
    ],
)
def test_an_affine_map_is_not_believed(change: dict[tuple[Any, ...], Any], why: str) -> None:
    assert why in why_refused(affine(entry=change), (2, 3), (2, 3))


def test_pieces_that_only_seem_to_be_copies_are_noticed() -> None:
    def piece(source: int, dest: int, size: int) -> dict[str, Any]:
        return {"shape": [size], "source": [source, [1]], "dest": [dest, [1]], "locations": [0, 1]}

    # The second rank has the same elements, cut in another place.
    ranks = {
        0: {"shard_shape": [3], "pieces": [piece(0, 0, 1), piece(1, 1, 2)]},
        1: {"shard_shape": [3], "pieces": [piece(0, 0, 2), piece(2, 2, 1)]},
    }
    splits = recorded(affine_map={"params": {"^w$": {"logical_shape": [3], "ranks": ranks}}})
    assert "not the same in all" in why_refused(splits, (3,), (3,))


def test_what_deepspeed_says_it_cannot_put_together_is_not_put_together() -> None:
    splits = recorded(row=["w"], autotp_unsupported_parameter_patterns={"^w$": "its rows are interleaved"})
    assert "its rows are interleaved" in why_refused(splits, (2, 2), (2, 2))


def test_an_affine_map_of_a_later_version_is_refused() -> None:
    with pytest.raises(UnknownSplitError, match="version 2"):
        affine(version=2)
    with pytest.raises(UnknownSplitError, match="not as DeepSpeed writes it"):
        recorded(affine_map=7)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=4), st.integers(0, 2)
)
def test_any_widths_give_back_what_was_split(widths: list[list[int]], other: int) -> None:
    """Three ranks take their parts of every sub-parameter; put together they are the rows in order."""
    rows = list(range(sum(map(sum, widths))))
    shards: list[list[int]] = [[], [], []]
    position = 0
    for of_ranks in widths:
        for rank, width in enumerate(of_ranks):
            shards[rank] += rows[position : position + width]
            position += width
    told = {"universal_checkpoint_version": 0.4, "sub_param_shard_widths": {"w": widths}}
    described = {"patterns": ["w"], "shape": (tuple(map(sum, widths)), -1), "partition_dim": 0}
    splits = recorded(3, parameter_with_sub_params=[described], **told)
    split = splits.of("w", [(len(shard), other) for shard in shards])
    joined = [-1] * split.shape[0]
    for piece in split.pieces:
        first, count = piece.in_shard.start[0], piece.in_shard.size[0]
        start = piece.in_whole.start[0]
        joined[start : start + count] = shards[piece.rank][first : first + count]
    assert joined == (rows if math.prod(split.shape) else [-1] * len(rows))
