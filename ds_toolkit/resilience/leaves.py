"""All that tells two states apart, without the content of tensors, as lists that compare in C.

A state is taken apart level by level and not value by value: the whole of a level's types, numbers or
addresses is gathered by one call. Hundreds of parameters cost a tenth of what walking them costs.
"""

from __future__ import annotations

import dataclasses
import enum
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any

import torch

# Compared by `==`, which for values of one type leaves no doubt.
_PLAIN = frozenset({str, int, bool, bytes, type(None), torch.dtype, torch.device, torch.Size})
_KEYS = frozenset({str, int, bool})
# Other kinds of tensors may hold what their address does not tell.
TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
# What refers to itself has no last level; and each level may be many times as long as the one above.
_MAX_LEVELS = 40
_MAX_VALUES = 1_000_000

# Of a tensor that keeps its place, the content goes into the file by itself.
_COLUMNS: tuple[Callable[[torch.Tensor], object], ...] = (
    torch.Tensor.data_ptr,
    torch.Tensor.stride,
    attrgetter("shape"),
    attrgetter("requires_grad"),
)
_dtype_of = attrgetter("dtype")
# Their scales stand elsewhere.
_QUANTIZED = frozenset(
    getattr(torch, name, None) for name in ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")
)
_values_of = methodcaller("values")


def leaves(value: Any) -> list[Any] | None:
    """Equal for two states of a value that are pickled alike; None where something in it does not tell.

    Tensors are alike if they lie at the same place in the same way. As long as somebody keeps the storage
    that was seen, nothing else can lie there.
    """
    kind = type(value)
    if kind in _PLAIN:
        return [kind, value]
    found: list[Any] = []
    level = [[value]]
    for _ in range(_MAX_LEVELS):
        if not level:
            return found
        below: list[list[Any]] = []
        if not all(_look_at(values, found, below) for values in level):
            return None
        if sum(map(len, below)) > _MAX_VALUES:
            return None
        level = [values for values in below if values]
    return None


def _look_at(values: list[Any], found: list[Any], below: list[list[Any]]) -> bool:
    """Note what some values of a level hold, and what lies one level below; whether all of it tells."""
    kinds = list(map(type, values))
    found.append(kinds)
    different = set(kinds)
    if len(different) == 1:
        return _look_at_kind(kinds[0], values, found, below)
    groups: dict[type, list[Any]] = {kind: [] for kind in kinds}
    for value, kind in zip(values, kinds, strict=True):
        groups[kind].append(value)
    return all(_look_at_kind(kind, group, found, below) for kind, group in groups.items())


def _look_at_kind(kind: type, values: list[Any], found: list[Any], below: list[list[Any]]) -> bool:
    if kind in _PLAIN:
        found.append(values)
    elif kind in TENSORS:
        columns = places(values)
        found.append(columns)
        return columns is not None
    elif kind is float:
        # 0.0 and -0.0 are equal and not the same.
        found.append(array("d", values).tobytes())
    elif kind is complex:
        found.append(list(map(repr, values)))
    elif kind is dict or kind is OrderedDict:
        keys = list(chain.from_iterable(values))
        kinds = list(map(type, keys))
        found += (list(map(len, values)), kinds, keys)
        if not _KEYS.issuperset(kinds):
            return False
        below.append(list(chain.from_iterable(map(_values_of, values))))
        if kind is OrderedDict:
            # A module's state carries the versions of its layers there.
            below.append(list(map(vars, values)))
    elif kind is list or kind is tuple:
        found.append(list(map(len, values)))
        below.append(list(chain.from_iterable(values)))
    elif issubclass(kind, enum.Enum):
        found.append(values)
    elif dataclasses.is_dataclass(kind) and hasattr(values[0], "__dict__"):
        below.append(list(map(vars, values)))
    else:
        return False
    return True


def places(tensors: Sequence[torch.Tensor]) -> list[list[Any]] | None:
    """Where and how each of some tensors lies; None if that does not tell what is in one of them."""
    dtypes = list(map(_dtype_of, tensors))
    if not _QUANTIZED.isdisjoint(dtypes):
        return None
    try:
        return [dtypes, *(list(map(column, tensors)) for column in _COLUMNS)]
    except RuntimeError:
        # A sparse one has no address.
        return None
