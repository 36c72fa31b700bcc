"""The parts that tensor-parallel ranks have of a model, put together to one cell."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from ds_toolkit.checkpoint.fields import not_together
from ds_toolkit.checkpoint.layout import UnsupportedLayoutError
from ds_toolkit.checkpoint.layouts.boxes import Box
from ds_toolkit.checkpoint.layouts.cells import Cell
from ds_toolkit.checkpoint.layouts.splits import (
    Piece,
    RecordedSplits,
    Split,
    UnknownSplitError,
    UnrecordedSplitError,
    replicated,
)
from ds_toolkit.checkpoint.tensors import (
    Block,
    Part,
    Replica,
    Role,
    StoredTensor,
    block_in_order,
    row_major_strides,
)
from ds_toolkit.errors import ToolkitError


def merged(cells: Sequence[Cell]) -> Cell:
    """The cells of all tensor-parallel ranks of the same layers, in the ranks' order, as one.

    Every tensor is proven to be made of its parts, each element once. Of what several ranks have the first
    one's is taken, and the others' are listed in `replicas`. Nothing is put together by a guess.

    Raises:
        ToolkitError: the cells do not belong together, or how a tensor was split is not recorded.
    """
    first = cells[0]
    if len(cells) == 1:
        return first
    _check_agreement(cells)
    where = str(first.model.shard.path)
    try:
        recorded = RecordedSplits(first.model.universal_info, len(cells), where)
    except UnknownSplitError as error:
        raise _kind_of(error)(
            "how tensor parallelism split this model is not known", where=where, why=str(error)
        ) from error
    tensors: dict[str, StoredTensor] = {}
    replicas: list[Replica] = [replica for cell in cells for replica in cell.replicas]
    for name in first.tensors:
        parts = [cell.tensors[name] for cell in cells]
        try:
            split = _split_of(recorded, parts)
            tensors[name] = _joined(split, parts)
            replicas += _replicas(split, parts)
        except UnknownSplitError as error:
            raise _kind_of(error)(
                f"the tensor {name} cannot be put together from its tensor-parallel parts",
                where=where,
                why=str(error),
                fix="a checkpoint names the splits of its tensors in `universal_checkpoint_info`",
            ) from error
    return dataclasses.replace(
        first,
        tensors=tensors,
        unnamed_masters=tuple(group for cell in cells for group in cell.unnamed_masters),
        replicas=tuple(replicas),
    )


def _kind_of(error: UnknownSplitError) -> type[ToolkitError]:
    """A checkpoint that does not say how its parts belong together is not damaged, and can be resumed."""
    return UnsupportedLayoutError if isinstance(error, UnrecordedSplitError) else ToolkitError


def _check_agreement(cells: Sequence[Cell]) -> None:
    first = cells[0]
    for cell in cells[1:]:
        model, other = first.model, cell.model
        differing = next(
            (
                what
                for what, mine, its in (
                    ("ZeRO stage", first.stage, cell.stage),
                    ("step", model.step, other.step),
                    ("data-parallel world size", model.dp_world_size, other.dp_world_size),
                    ("model-parallel world size", model.mp_world_size, other.mp_world_size),
                    ("universal_checkpoint_info", model.universal_info, other.universal_info),
                    ("list of tensors", set(first.tensors), set(cell.tensors)),
                    ("list of tied weights", first.aliases, cell.aliases),
                )
                if mine != its
            ),
            None,
        )
        if differing is not None:
            raise not_together(other.shard, f"{differing} is another one than in {model.shard.path.name}")


def _split_of(recorded: RecordedSplits, parts: Sequence[StoredTensor]) -> Split:
    dtypes = {part.dtype for part in parts}
    if len(dtypes) != 1 or len({part.role for part in parts}) != 1:
        raise UnknownSplitError(f"the ranks have it as {', '.join(sorted(map(str, dtypes)))} and differ")
    shapes = [part.shape for part in parts]
    if parts[0].role is Role.BUFFER:
        # Nothing is ever recorded about buffers, and DeepSpeed splits none.
        why = "it is a buffer that differs from rank to rank, and no split of it is recorded"
        return dataclasses.replace(replicated(shapes), if_copies_differ=why)
    return recorded.of(parts[0].name, shapes)


def _joined(split: Split, parts: Sequence[StoredTensor]) -> StoredTensor:
    first = parts[0]
    if len(split.pieces) == 1 and split.shape == parts[split.pieces[0].rank].shape:
        return parts[split.pieces[0].rank]
    strides = row_major_strides(split.shape)
    placed = [
        (parts[piece.rank], _block(piece, parts[piece.rank], piece.in_whole.offset(split.shape), strides))
        for piece in sorted(split.pieces, key=lambda piece: piece.in_whole.offset(split.shape))
    ]
    if all(_is_run(block) and block.num_elements == part.num_elements for part, block in placed):
        # In this order the parts are the whole tensor from its first element to its last.
        slices = tuple(place for part, _ in placed for place in part.slices)
        return dataclasses.replace(first, shape=split.shape, parts=(Part(slices),))
    blocks: dict[int, list[Block]] = {}
    by_id = {id(part): part for part, _ in placed}
    for part, block in placed:
        blocks.setdefault(id(part), []).append(block)
    stored = tuple(Part(by_id[key].slices, tuple(of_part)) for key, of_part in blocks.items())
    return dataclasses.replace(first, shape=split.shape, parts=stored)


def _replicas(split: Split, parts: Sequence[StoredTensor]) -> Iterator[Replica]:
    kept = {piece.in_whole: piece for piece in split.pieces}
    for copy in split.copies:
        yield Replica(_alone(kept[copy.in_whole], parts), _alone(copy, parts), split.if_copies_differ)


def _alone(piece: Piece, parts: Sequence[StoredTensor]) -> StoredTensor:
    """A piece as a tensor of its own."""
    part = parts[piece.rank]
    if piece.in_shard.size == part.shape:
        return part
    size = piece.in_shard.size
    block = _block(piece, part, 0, row_major_strides(size))
    return dataclasses.replace(part, shape=size, parts=(Part(part.slices, (block,)),))


def _block(piece: Piece, part: StoredTensor, to_offset: int, to_strides: Sequence[int]) -> Block:
    if not part.is_plain:
        raise UnknownSplitError("a part of it does not lie in row-major order")
    box: Box = piece.in_shard
    from_strides = row_major_strides(part.shape)
    return block_in_order(box.size, box.offset(part.shape), from_strides, to_offset, to_strides)


def _is_run(block: Block) -> bool:
    return block.from_strides == block.to_strides == row_major_strides(block.shape)
