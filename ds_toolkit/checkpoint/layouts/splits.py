"""How tensor parallelism has split each tensor, as the checkpoint records it.

Sources: DeepSpeed 0.19.8, checkpoint/constants.py (the keys of `universal_checkpoint_info`),
checkpoint/affine.py (`affine_map`, written by AutoTP), checkpoint/ds_to_universal.py (`merge_tp_slices`: what
the patterns mean, in which order they count, and that a parameter which none of them names is split along its
first dimension).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from ds_toolkit.checkpoint.layouts.boxes import Box, strided_box, whole, why_not_covered
from ds_toolkit.checkpoint.layouts.patterns import PatternTable

Shape = tuple[int, ...]

_AFFINE_VERSION = 1
# Universal checkpoints of this version and later say how wide each rank's part of a sub-parameter is.
_WIDTHS_SINCE = 0.4
_RULES = (
    "tp_replicated_parameter_patterns",
    "parameter_to_average_patterns",
    "parameter_with_row_parallelism_patterns",
    "vocabulary_parameter_patterns",
    "parameter_with_2_sub_params_cat_dim_0",
)


class UnknownSplitError(Exception):
    """A tensor cannot be put together from its parts; the text says why."""


class UnrecordedSplitError(UnknownSplitError):
    """Nothing is wrong with the parts; the checkpoint does not say how they belong together."""


@dataclass(frozen=True)
class Piece:
    """A box of a whole tensor, and where rank `rank` has it in its own shard."""

    rank: int
    in_shard: Box
    in_whole: Box


@dataclass(frozen=True)
class Split:
    """A tensor of shape `shape`, each element in one of `pieces`.

    `copies` are pieces that another rank has as well; `if_copies_differ` says why they must be equal, if so.
    """

    shape: Shape
    pieces: tuple[Piece, ...]
    copies: tuple[Piece, ...] = ()
    if_copies_differ: str | None = None


class RecordedSplits:
    """What a checkpoint says about all its tensors."""

    def __init__(self, info: Mapping[str, Any], num_ranks: int, where: str) -> None:
        """Take `universal_checkpoint_info` of a model states file.

        Raises:
            UnknownSplitError: it is of a kind or version that is not known.
        """
        self._info = info
        self._num_ranks = num_ranks
        self._says_something = any(
            key in info for key in (*_RULES, "parameter_with_sub_params", "affine_map")
        )
        try:
            self._named = {
                key: PatternTable([(p, True) for p in info.get(key) or ()], where) for key in _RULES
            }
            self._unsupported = PatternTable(
                (info.get("autotp_unsupported_parameter_patterns") or {}).items(), where
            )
            self._sub_params = PatternTable(
                [
                    (pattern, (pattern, described))
                    for described in info.get("parameter_with_sub_params") or ()
                    for pattern in described["patterns"]
                ],
                where,
            )
            affine = info.get("affine_map") or {}
            self._affine = PatternTable((affine.get("params") or {}).items(), where)
            version = affine.get("version", _AFFINE_VERSION)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UnknownSplitError("universal_checkpoint_info is not as DeepSpeed writes it") from error
        if version != _AFFINE_VERSION:
            raise UnrecordedSplitError(f"its affine_map is of version {version!r}, which is not known")

    def of(self, name: str, shapes: Sequence[Shape]) -> Split:
        """How the tensor was split into parts of these shapes, one a rank; proven to be all of it.

        Raises:
            UnknownSplitError: it is not recorded, or what is recorded cannot be so.
        """
        try:
            split, is_padded = self._recorded(name, shapes)
            _prove(split, shapes)
            return self._without_padding(split) if is_padded else split
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise UnknownSplitError("what is recorded about it is not as DeepSpeed writes it") from error

    def _recorded(self, name: str, shapes: Sequence[Shape]) -> tuple[Split, bool]:
        """The split, and whether it may be a vocabulary with rows that the model does not have."""
        for reason in self._unsupported.find(name):
            raise UnrecordedSplitError(f"DeepSpeed recorded that it cannot be put together: {reason}")
        maps = self._affine.find(name)
        if len(maps) > 1:
            raise UnknownSplitError("several affine maps are recorded for it")
        if maps:
            # Its shape is that of the model before it was split: no vocabulary is padded in it.
            return _affine(maps[0], shapes), False
        if not self._says_something:
            raise UnrecordedSplitError("the checkpoint does not record how its tensors are split")
        return self._by_category(name, shapes), self._is(name, "vocabulary_parameter_patterns")

    def _by_category(self, name: str, shapes: Sequence[Shape]) -> Split:
        if self._is(name, "tp_replicated_parameter_patterns"):
            return replicated(shapes)
        if self._is(name, "parameter_to_average_patterns"):
            return replace(replicated(shapes), if_copies_differ="the ranks' values would have to be averaged")
        if self._is(name, "parameter_with_2_sub_params_cat_dim_0"):
            # torch.chunk: the first half is the larger one.
            rows = [sum(shape[:1]) for shape in shapes]
            halves = [[-(-count // 2) for count in rows], [count // 2 for count in rows]]
            return _of_widths(shapes, 0, halves)
        for pattern, described in self._sub_params.find(name):
            return self._of_sub_params(pattern, described, shapes)
        dimension = 1 if self._is(name, "parameter_with_row_parallelism_patterns") else 0
        return _of_widths(shapes, dimension, [[sum(shape[dimension : dimension + 1]) for shape in shapes]])

    def _of_sub_params(self, pattern: str, described: Mapping[str, Any], shapes: Sequence[Shape]) -> Split:
        dimension = described["partition_dim"]
        view = described["shape"]
        num_whole = sum(shape[dimension] for shape in shapes)
        if float(self._info.get("universal_checkpoint_version", 0.0)) >= _WIDTHS_SINCE:
            widths = [list(each) for each in self._info["sub_param_shard_widths"][pattern]]
        else:
            sizes = view[dimension]
            # Before, a single number counted sub-parameters of equal size.
            sizes = sizes if isinstance(sizes, list | tuple) else [num_whole // sizes] * sizes
            if any(size % self._num_ranks for size in sizes):
                raise UnrecordedSplitError(
                    f"sub-parameters of sizes {list(sizes)} and no widths are recorded"
                )
            widths = [[size // self._num_ranks] * self._num_ranks for size in sizes]
        _check_view(view, dimension, shapes)
        return _of_widths(shapes, dimension, widths)

    def _without_padding(self, split: Split) -> Split:
        size = self._info.get("original_vocab_size")
        if not isinstance(size, int) or size < 0:
            raise UnrecordedSplitError(
                "its vocabulary may be padded, and original_vocab_size is not recorded"
            )
        return _cut_to_rows(split, size) if split.shape[0] > size else split

    def _is(self, name: str, key: str) -> bool:
        return bool(self._named[key].find(name))


def replicated(shapes: Sequence[Shape]) -> Split:
    """Every rank has the whole tensor.

    Raises:
        UnknownSplitError: their shapes differ.
    """
    if len(set(shapes)) != 1:
        raise UnknownSplitError(f"all ranks should have it whole, and they have the shapes {list(shapes)}")
    everything = whole(shapes[0])
    first, *copies = (Piece(rank, everything, everything) for rank in range(len(shapes)))
    return Split(shapes[0], (first,), tuple(copies))


def _prove(split: Split, shapes: Sequence[Shape]) -> None:
    """The pieces are the whole tensor, and those of each rank its whole part, each element once."""
    why = why_not_covered(split.shape, [piece.in_whole for piece in split.pieces])
    for rank, shape in enumerate(shapes):
        own = [piece.in_shard for piece in (*split.pieces, *split.copies) if piece.rank == rank]
        why = why or why_not_covered(shape, own)
    if not {piece.in_whole for piece in split.copies} <= {piece.in_whole for piece in split.pieces}:
        why = why or "a piece that several ranks should have is not the same in all of them"
    if why is not None:
        raise UnknownSplitError(why)


def _affine(entry: Mapping[str, Any], shapes: Sequence[Shape]) -> Split:
    shape = _numbers(entry["logical_shape"])
    ranks = {int(rank): recorded for rank, recorded in entry["ranks"].items()}
    if sorted(ranks) != list(range(len(shapes))):
        raise UnknownSplitError(
            f"parts of the ranks {sorted(ranks)} are recorded, and there are {len(shapes)}"
        )
    pieces: list[Piece] = []
    copies: list[Piece] = []
    for rank, recorded in sorted(ranks.items()):
        if tuple(recorded["shard_shape"]) != shapes[rank]:
            raise UnknownSplitError(
                f"rank {rank} should have the shape {tuple(recorded['shard_shape'])}, and has {shapes[rank]}"
            )
        for written in recorded["pieces"]:
            piece = _affine_piece(rank, written, shape, shapes[rank])
            # A piece that several ranks have is taken from the first of them.
            if piece is not None:
                (pieces if rank == min(written["locations"]) else copies).append(piece)
    return Split(shape, tuple(pieces), tuple(copies))


def _affine_piece(rank: int, written: Mapping[str, Any], shape: Shape, shard_shape: Shape) -> Piece | None:
    if written.get("scale", 1.0) != 1.0:
        raise UnrecordedSplitError("its parts are scaled, which is not undone")
    size = _numbers(written["shape"])
    if 0 in size:
        return None
    in_whole, in_shard = (
        strided_box(of, size, _numbers([offset])[0], _numbers(strides))
        for of, (offset, strides) in ((shape, written["source"]), (shard_shape, written["dest"]))
    )
    if in_whole is None or in_shard is None:
        raise UnknownSplitError("a piece of it is no box of its elements")
    return Piece(rank, in_shard, in_whole)


def _of_widths(shapes: Sequence[Shape], dimension: int, widths: Sequence[Sequence[int]]) -> Split:
    """Sub-parameters one after the other along a dimension, `widths[sub][rank]` indices each."""
    if len(shapes[0]) <= dimension:
        raise UnknownSplitError(f"its parts of shapes {list(shapes)} have no dimension {dimension}")
    ends = list(accumulate(width for of_ranks in widths for width in _numbers(of_ranks)))
    in_shards = [0] * len(shapes)
    pieces = []
    for number, end in enumerate(ends):
        rank = number % len(shapes)
        width = widths[number // len(shapes)][rank]
        size = _with(shapes[rank], dimension, width)
        if math.prod(size):
            in_shard = Box(_with((0,) * len(size), dimension, in_shards[rank]), size)
            pieces.append(Piece(rank, in_shard, Box(_with((0,) * len(size), dimension, end - width), size)))
        in_shards[rank] += width
    return Split(_with(shapes[0], dimension, ends[-1]), tuple(pieces))


def _numbers(values: Sequence[Any]) -> Shape:
    if not all(isinstance(value, int) and value >= 0 for value in values):
        raise TypeError("a shape, offset or stride is no number")
    return tuple(values)


def _with(numbers: Shape, position: int, value: int) -> Shape:
    return (*numbers[:position], value, *numbers[position + 1 :])


def _check_view(view: Sequence[Any], dimension: int, shapes: Sequence[Shape]) -> None:
    """The recorded shape is that of the parameter, unknown sizes and the split dimension left aside."""
    for position, size in enumerate(view):
        if position != dimension and size != -1 and size != shapes[0][position]:
            raise UnknownSplitError(f"it is recorded as {list(view)}, and its parts are {list(shapes)}")
    if len(view) != len(shapes[0]):
        raise UnknownSplitError(f"it is recorded as {list(view)}, and its parts are {list(shapes)}")


def _cut_to_rows(split: Split, num_rows: int) -> Split:
    return replace(
        split,
        shape=_with(split.shape, 0, num_rows),
        pieces=tuple(_cut_pieces(split.pieces, num_rows)),
        copies=tuple(_cut_pieces(split.copies, num_rows)),
    )


def _cut_pieces(pieces: Sequence[Piece], num_rows: int) -> Iterator[Piece]:
    for piece in pieces:
        first = piece.in_whole.start[0]
        if first < num_rows:
            size = _with(piece.in_whole.size, 0, min(piece.in_whole.size[0], num_rows - first))
            yield replace(
                piece,
                in_shard=replace(piece.in_shard, size=size),
                in_whole=replace(piece.in_whole, size=size),
            )
