"""Tensors whose elements lie scattered, put together in pieces of any size."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_toolkit.checkpoint.dtypes import DTYPES
from ds_toolkit.checkpoint.shards import Slice
from ds_toolkit.checkpoint.tensors import Part, Role, StoredTensor, block_in_order, row_major_strides
from ds_toolkit.convert import gathering
from ds_toolkit.convert.copying import copy_ranges
from ds_toolkit.convert.gathering import Gather, gather
from ds_toolkit.errors import ToolkitError

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


def in_pieces(tensor: StoredTensor, start: int, count: int, data: dict[Path, bytes]) -> np.ndarray:
    def read(path: Path, offset_bytes: int, buffer: memoryview) -> None:
        buffer[:] = data[path][offset_bytes : offset_bytes + len(buffer)]

    out = bytearray(count * tensor.dtype.size_bytes)
    gather(tensor, start, memoryview(out), read)
    return np.frombuffer(out, np.int32)


def slices_of(path: Path, num_bytes: int, cuts: list[int]) -> tuple[Slice, ...]:
    """A range of a file as several that follow each other."""
    ends = sorted({0, num_bytes, *(cut * 4 for cut in cuts if cut * 4 < num_bytes)})
    return tuple(Slice(path, start, end - start) for start, end in itertools.pairwise(ends))


@settings(max_examples=300, deadline=None)
@given(shape=SHAPES, order=st.randoms(), cuts=st.lists(st.integers(0, 600), max_size=3), data=st.data())
def test_any_order_of_dimensions_in_any_piece(shape, order, cuts, data) -> None:  # type: ignore[no-untyped-def]
    whole = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    axes = list(range(len(shape)))
    order.shuffle(axes)
    stored = np.ascontiguousarray(whole.transpose(axes))
    strides = [0] * len(shape)
    for axis, stride in zip(axes, row_major_strides(stored.shape), strict=True):
        strides[axis] = stride
    path = Path("shard")
    block = block_in_order(shape, 0, strides, 0, row_major_strides(shape))
    part = Part(slices_of(path, stored.nbytes, cuts), (block,))
    tensor = StoredTensor("weight", shape, DTYPES["int32"], (part,), Role.TRAINED)
    start = data.draw(st.integers(0, whole.size - 1))
    count = data.draw(st.integers(1, whole.size - start))
    found = in_pieces(tensor, start, count, {path: stored.tobytes()})
    assert np.array_equal(found, whole.reshape(-1)[start : start + count])


@settings(max_examples=300, deadline=None)
@given(
    shape=SHAPES, num_ranks=st.integers(1, 4), cuts=st.lists(st.integers(0, 99), max_size=2), data=st.data()
)
def test_the_shares_of_ranks_along_any_dimension(shape, num_ranks, cuts, data) -> None:  # type: ignore[no-untyped-def]
    dimension = data.draw(st.integers(0, len(shape) - 1))
    sizes = [data.draw(st.integers(1, 3)) for _ in range(num_ranks)]
    shape = (*shape[:dimension], sum(sizes), *shape[dimension + 1 :])
    whole = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    parts, files, first = [], {}, 0
    for rank, size in enumerate(sizes):
        share = np.ascontiguousarray(np.take(whole, range(first, first + size), dimension))
        path = Path(f"rank{rank}")
        files[path] = share.tobytes()
        strides = row_major_strides(shape)
        block = block_in_order(
            share.shape, 0, row_major_strides(share.shape), first * strides[dimension], strides
        )
        parts.append(Part(slices_of(path, share.nbytes, cuts), (block,)))
        first += size
    tensor = StoredTensor("weight", shape, DTYPES["int32"], tuple(parts), Role.TRAINED)
    start = data.draw(st.integers(0, whole.size - 1))
    count = data.draw(st.integers(1, whole.size - start))
    assert np.array_equal(in_pieces(tensor, start, count, files), whole.reshape(-1)[start : start + count])


def test_pieces_are_carried_by_several_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_toolkit.convert.copying.BLOCK_BYTES", 1000)
    whole = torch.randn(70, 50)
    (tmp_path / "shard").write_bytes(whole.t().contiguous().numpy().tobytes())
    (tmp_path / "out").write_bytes(bytes(70 * 50 * 2))
    block = block_in_order((70, 50), 0, (1, 70), 0, (50, 1))
    part = Part((Slice(tmp_path / "shard", 0, 70 * 50 * 4),), (block,))
    tensor = StoredTensor("weight", (70, 50), DTYPES["float32"], (part,), Role.TRAINED)
    move = Gather(tensor, 0, 3500, 0, DTYPES["bfloat16"], "weight")
    copy_ranges([move], tmp_path / "out", num_threads=3)
    written = torch.frombuffer(bytearray((tmp_path / "out").read_bytes()), dtype=torch.bfloat16)
    assert torch.equal(written.reshape(70, 50), whole.bfloat16())


def test_elements_too_far_apart_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "MAX_SPANNED_BYTES", 100)
    block = block_in_order((10, 10), 0, (1, 10), 0, (10, 1))
    tensor = StoredTensor(
        "weight", (10, 10), DTYPES["int32"], (Part((Slice(Path("a"), 0, 400),), (block,)),), Role.TRAINED
    )
    with pytest.raises(ToolkitError, match="weight lie too far apart"):
        in_pieces(tensor, 0, 10, {})
