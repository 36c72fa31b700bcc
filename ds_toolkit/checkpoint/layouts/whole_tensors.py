"""Tensors that lie whole in one file."""

from __future__ import annotations

from ds_toolkit.checkpoint.reductions import TensorRecord
from ds_toolkit.checkpoint.shards import Shard
from ds_toolkit.checkpoint.tensors import Block, Part, Role, StoredTensor, block_in_order, row_major_strides


def whole_tensor(shard: Shard, name: str, record: TensorRecord, role: Role) -> StoredTensor:
    """A tensor that lies in one file, in whatever order (convolutions in channels_last format)."""
    place = shard.span(record, name=name)
    part = Part((place,) if place.num_bytes else (), blocks_of(record))
    return StoredTensor(name, record.shape, record.dtype, (part,), role)


def blocks_of(record: TensorRecord) -> tuple[Block, ...] | None:
    """Where its elements are in their storage, from its first one on; None if they follow each other."""
    if record.is_contiguous:
        return None
    return (block_in_order(record.shape, 0, record.strides, 0, row_major_strides(record.shape)),)
