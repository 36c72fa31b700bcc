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

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:
    # Another version of torch: asked tensor by tensor.
    TensorGuards = None  # type: ignore[assignment, misc]

# Compared by `==`, which for values of one type leaves no doubt.
_PLAIN = frozenset({str, int, bool, bytes, type(None), torch.dtype, torch.device, torch.Size})
_KEYS = frozenset({str, int, bool})
# Other kinds of tensors may hold what their address does not tell.
TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
# What refers to itself has no last level; and each level may be many times as long as the one above.
_MAX_LEVELS = 40
_MAX_VALUES = 1_000_000

# Of a tensor that keeps its place, the content goes into the file by itself.
Column = Callable[[torch.Tensor], object]
_COLUMNS: tuple[Column, ...] = (
    torch.Tensor.data_ptr,
    attrgetter("requires_grad"),
    torch.Tensor.stride,
    attrgetter("shape"),
    attrgetter("dtype"),
)
# What torch's compiler does not look at, or not in every mode.
_ASKED = _COLUMNS[:2]
# Their scales stand elsewhere.
_QUANTIZED = frozenset(
    getattr(torch, name, None) for name in ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")
)
_values_of = methodcaller("values")


def leaves(value: Any, *, to_compare: bool = False) -> list[Any] | None:
    """Equal for two states of a value that are pickled alike; None where something in it does not tell.

    Tensors are alike if they lie at the same place in the same way. As long as somebody keeps the storage
    that was seen, nothing else can lie there.

    Args:
        value: what is looked at.
        to_compare: with leaves seen before, and at once; not to be kept. That is faster.
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
        if not all(_look_at(values, found, below, to_compare) for values in level):
            return None
        if sum(map(len, below)) > _MAX_VALUES:
            return None
        level = [values for values in below if values]
    return None


def _look_at(values: list[Any], found: list[Any], below: list[list[Any]], to_compare: bool) -> bool:
    """Note what some values of a level hold, and what lies one level below; whether all of it tells."""
    kinds = list(map(type, values))
    found.append(kinds)
    different = set(kinds)
    if len(different) == 1:
        return _look_at_kind(kinds[0], values, found, below, to_compare)
    groups: dict[type, list[Any]] = {kind: [] for kind in kinds}
    for value, kind in zip(values, kinds, strict=True):
        groups[kind].append(value)
    return all(_look_at_kind(kind, group, found, below, to_compare) for kind, group in groups.items())


def _look_at_kind(
    kind: type, values: list[Any], found: list[Any], below: list[list[Any]], to_compare: bool
) -> bool:
    if kind in _PLAIN:
        found.append(values)
    elif kind in TENSORS:
        look = _Now(values) if to_compare else places(values)
        found.append(look)
        return look is not None
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


class Places:
    """Where and how each of some tensors lay when they were looked at."""

    def __init__(self, columns: list[list[Any]]) -> None:
        self._columns = columns
        self._guard: Any = None

    def hold(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these tensors lie there in this way.

        What has been found to hold once is compared by torch itself the next time, in one call for all.
        """
        if self._guard is None:
            if _columns(tensors, _COLUMNS) != self._columns:
                return False
            self._guard = _guard(tensors)
            return True
        is_there = _columns(tensors, _ASKED) == self._columns[: len(_ASKED)]
        return is_there and bool(self._guard.check(*tensors))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, _Now):
            return self.hold(other.tensors)
        return isinstance(other, Places) and self._columns == other._columns

    __hash__ = None  # type: ignore[assignment]


class _Now:
    """Tensors that are looked at only if they are compared."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors


def places(tensors: Sequence[torch.Tensor]) -> Places | None:
    """Where and how each of some tensors lies; None if that does not tell what is in one of them."""
    columns = _columns(tensors, _COLUMNS)
    return None if columns is None or not _QUANTIZED.isdisjoint(columns[-1]) else Places(columns)


def _columns(tensors: Sequence[torch.Tensor], asked: Sequence[Column]) -> list[list[Any]] | None:
    try:
        return [list(map(column, tensors)) for column in asked]
    except RuntimeError:
        # A sparse one has no address.
        return None


def _guard(tensors: Sequence[torch.Tensor]) -> Any:
    """Torch's own look at dtypes, shapes and strides, that its compiler takes; None where it has none."""
    try:
        sizes: list[Any] = [list(tensor.shape) for tensor in tensors]
        strides: list[Any] = [list(tensor.stride()) for tensor in tensors]
        guard = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        return guard if guard.check(*tensors) else None
    except (TypeError, RuntimeError, SystemError):
        return None
