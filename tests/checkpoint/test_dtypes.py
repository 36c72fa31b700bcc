"""Values change type exactly as torch changes them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ds_toolkit.checkpoint.dtypes import DTYPES, STORAGE_DTYPES, convert

FLOATS = ("float64", "float32", "float16", "bfloat16")


def patterns(dtype: torch.dtype) -> torch.Tensor:
    """Every bit pattern of 16-bit types; else random bits, and values around every rounding decision."""
    generator = torch.Generator().manual_seed(0)
    if dtype.itemsize == 2:
        return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    whole = torch.int32 if dtype.itemsize == 4 else torch.int64
    limits = torch.iinfo(whole)
    bits = torch.randint(limits.min, limits.max, (200_000,), generator=generator, dtype=whole).view(dtype)
    small = torch.randn(100_000, generator=generator, dtype=torch.float64).to(dtype)
    ties = torch.arange(2**16, dtype=torch.int64)
    # Exactly between two bf16 values, and a little to either side; then the same for fp16.
    halfway = torch.cat([(ties << 16) + 0x8000 + step for step in (-1, 0, 1)])
    halfway = halfway.to(torch.int32).view(torch.float32).to(dtype)
    half = ties.to(torch.int32).to(torch.int16).view(torch.float16).to(torch.float64)
    between = torch.cat([half * (1 + factor * 2**-11) for factor in (0.999, 1.0, 1.001)]).to(dtype)
    edges = torch.tensor([0.0, -0.0, 65504.0, 65519.99, 65520.0, 3.39e38, float("inf"), -float("inf")])
    return torch.cat([bits, small, halfway, between, edges.to(dtype)])


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_like_torch(source: str, target: str) -> None:
    values = patterns(getattr(torch, source))
    expected = values.to(getattr(torch, target))
    raw = convert(values.view(torch.uint8).numpy(), DTYPES[source], DTYPES[target])
    found = torch.from_numpy(raw.copy()).view(expected.dtype)
    number = ~expected.isnan()
    assert torch.equal(found.isnan(), expected.isnan())
    same = found[number].view(torch.uint8) == expected[number].view(torch.uint8)
    assert bool(same.all())


def test_the_same_type_is_no_copy() -> None:
    raw = np.arange(8, dtype=np.uint8)
    assert convert(raw, DTYPES["float32"], DTYPES["float32"]) is raw


def test_sizes_are_torchs() -> None:
    for name, dtype in DTYPES.items():
        if hasattr(torch, name):
            assert getattr(torch, name).itemsize == dtype.size_bytes, name


def test_storage_names_are_torchs() -> None:
    names = {kind: dtype for dtype, kind in torch.storage._dtype_to_storage_type_map().items()}
    for name, dtype in STORAGE_DTYPES.items():
        if name != "UntypedStorage":
            assert names[name] == getattr(torch, dtype.name)
