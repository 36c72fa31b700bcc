"""What the guard relies on inside the installed torch: without it looking at the state takes longer."""

from __future__ import annotations

import torch
from torch._C._dynamo.guards import TensorGuards

from ds_toolkit.resilience.leaves import leaves


def test_torch_compares_tensors_in_one_call() -> None:
    tensors = [torch.zeros(2, 3), torch.zeros(0), torch.zeros(2, dtype=torch.bfloat16)]
    guard = TensorGuards(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    )
    assert guard.check(*tensors)
    assert guard.check(torch.ones(2, 3), *tensors[1:])
    for other in (torch.zeros(3, 2), torch.zeros(3, 2).t(), torch.zeros(2, 3, dtype=torch.int32)):
        assert not guard.check(other, *tensors[1:])


def test_it_is_used() -> None:
    tensors = [torch.zeros(2, 3), torch.zeros(4)]
    seen = leaves(tensors)
    assert seen is not None
    assert seen == leaves(tensors, to_compare=True)
    assert any(getattr(found, "_guard", None) is not None for found in seen)
