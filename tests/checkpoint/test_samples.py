"""Values are compared as torch would round them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from ds_toolkit.checkpoint.dtypes import DTYPES
from ds_toolkit.checkpoint.layouts.samples import seem_equal
from ds_toolkit.checkpoint.shards import Slice
from ds_toolkit.checkpoint.tensors import Part, Role, StoredTensor

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def stored(path: Path, values: torch.Tensor, num_slices: int = 1) -> StoredTensor:
    data = values.contiguous().view(torch.uint8).numpy().tobytes()
    path.write_bytes(data)
    item_bytes = values.element_size()
    bounds = [len(data) // item_bytes * index // num_slices * item_bytes for index in range(num_slices + 1)]
    slices = [Slice(path, start, end - start) for start, end in itertools.pairwise(bounds)]
    dtype = DTYPES[DTYPE_NAMES[values.dtype]]
    return StoredTensor(path.name, tuple(values.shape), dtype, (Part(tuple(slices)),), Role.TRAINED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_elements", [0, 1, 1000, 1025, 50_000])
def test_rounded_values_seem_equal(tmp_path: Path, dtype: torch.dtype, num_elements: int) -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (num_elements,), dtype=torch.int32)
    values = bits.view(torch.float32)
    full = stored(tmp_path / "full", values, 3)
    assert seem_equal(full, stored(tmp_path / "low", values.to(dtype), 2))


def test_ties_and_special_values_round_as_in_torch(tmp_path: Path) -> None:
    values = torch.tensor(
        [0.0, -0.0, 1e-45, 65519.0, 65520.0, 3.4e38, float("inf"), -float("inf"), 1 + 2**-8]
    )
    for dtype in (torch.bfloat16, torch.float16):
        assert seem_equal(stored(tmp_path / "full", values), stored(tmp_path / "low", values.to(dtype)))


@pytest.mark.parametrize("position", [0, 4_999])
def test_another_first_or_last_value_does_not(tmp_path: Path, position: int) -> None:
    values = torch.randn(5_000)
    other = values.clone()
    other[position] += 1
    assert not seem_equal(stored(tmp_path / "a", values), stored(tmp_path / "b", other))
    assert not seem_equal(stored(tmp_path / "a", values), stored(tmp_path / "b", other.bfloat16()))


def test_another_size_or_an_unknown_rounding_does_not(tmp_path: Path) -> None:
    values = torch.zeros(4)
    assert not seem_equal(stored(tmp_path / "a", values), stored(tmp_path / "b", values[:3]))
    assert not seem_equal(stored(tmp_path / "a", values.half()), stored(tmp_path / "b", values))
