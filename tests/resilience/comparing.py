"""Two states, leaf by leaf and bit by bit."""

from __future__ import annotations

import enum
from typing import Any

import torch


def same(mine: Any, theirs: Any, place: tuple[Any, ...], buffers: dict[str, torch.Tensor]) -> int:
    """How many tensors were compared; fails where two states differ, and says where."""
    if isinstance(theirs, torch.Tensor):
        if place[-2:-1] == ("module",) and place[-1] in buffers:
            theirs = buffers[place[-1]]
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype), place
        mine_bytes, theirs_bytes = (
            value.detach().contiguous().reshape(-1).view(torch.uint8) for value in (mine, theirs)
        )
        assert torch.equal(mine_bytes, theirs_bytes), place
        assert mine.requires_grad == theirs.requires_grad, place
        return 1
    # With its own engine DeepSpeed copies what some files hold, and torch.Size becomes a tuple.
    kinds = {tuple if isinstance(value, torch.Size) else type(value) for value in (mine, theirs)}
    assert len(kinds) == 1, (place, kinds)
    if isinstance(theirs, dict):
        assert list(mine) == list(theirs), (place, list(mine), list(theirs))
        return sum(same(mine[key], theirs[key], (*place, key), buffers) for key in theirs)
    if isinstance(theirs, list | tuple):
        assert len(mine) == len(theirs), place
        pairs = enumerate(zip(mine, theirs, strict=True))
        return sum(same(one, other, (*place, index), buffers) for index, (one, other) in pairs)
    if not isinstance(theirs, enum.Enum | type) and hasattr(theirs, "__dict__"):
        return same(dict(vars(mine)), dict(vars(theirs)), (*place, "vars"), buffers)
    assert mine == theirs, (place, mine, theirs)
    return 0
