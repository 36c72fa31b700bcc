"""Whether a module's state dict would be the same tensors as the last time, without making it.

Making the state dict of 300 parameters costs a large part of a millisecond, and looking through it the same
again. Its tables and tensors are looked at in their place, by a few calls for all layers at once.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any

import torch
from torch import nn

from ds_toolkit.resilience.leaves import TENSORS, Places, places

# Of a module's own dict, which is asked faster than the module.
_TABLES = ("_parameters", "_modules", "_buffers")
_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")
_NOT_PERSISTENT = "_non_persistent_buffers_set"
_WATCHED = {*_TABLES, *_HOOKS, _NOT_PERSISTENT}
_tables_of, _hooks_of = itemgetter(*_TABLES), itemgetter(*_HOOKS)
_not_persistent_of = itemgetter(_NOT_PERSISTENT)
_values_of = methodcaller("values")
_look_of = attrgetter("dtype", "requires_grad")
_BY_ITSELF = ("state_dict", "_save_to_state_dict", "get_extra_state")


class Moved(enum.Enum):
    """What is other than the last time, the larger the more."""

    NOTHING = 0
    BUFFERS = 1
    STRUCTURE = 2


class ModuleWatch:
    """Looks at a module again and again.

    Attributes:
        is_plain: whether its state dict is its parameters and buffers and nothing else.
        parameters: those it had at first.
    """

    def __init__(self, module: nn.Module) -> None:
        modules = list(module.modules())
        self._modules = list(map(_own_dict, modules))
        self.is_plain = all(map(_is_plain, modules))
        self._hooks = self._hooks_now()
        self._tables = self._tables_now()
        self._names = list(chain.from_iterable(self._tables))
        self._not_persistent = [set(names) for names in map(_not_persistent_of, self._modules)]
        self._parts = _contents(self._tables)
        # A module's three tables follow each other.
        self.parameters = list(dict.fromkeys(_tensors(_contents(self._tables[0::3]))))
        # What ZeRO-3 has partitioned lies elsewhere from step to step, and in the optimizer's file.
        self._partitioned = [parameter for parameter in self.parameters if hasattr(parameter, "ds_id")]
        self._whole = [parameter for parameter in self.parameters if not hasattr(parameter, "ds_id")]
        self._seen = _places(self._whole)
        self._seen_partitioned = list(map(_look_of, self._partitioned))
        self._seen_buffers = _places(self._buffers())

    def look(self) -> Moved:
        """What has changed since the last time, or since the watch began."""
        if not self._has_structure() or not self._has_parameters():
            return Moved.STRUCTURE
        before, self._parts = self._parts, _contents(self._tables)
        buffers = self._buffers()
        are_buffers_same = _are_at(self._seen_buffers, buffers)
        if not are_buffers_same:
            self._seen_buffers = _places(buffers)
        if _are_same(before, self._parts):
            return Moved.NOTHING if are_buffers_same else Moved.BUFFERS
        # The names are the same, so the values stand where they stood.
        changed = [(old, new) for old, new in zip(before, self._parts, strict=True) if old is not new]
        known = set(map(id, buffers))
        if all(old is not None and new is not None and id(new) in known for old, new in changed):
            return Moved.BUFFERS
        return Moved.STRUCTURE

    def _has_structure(self) -> bool:
        return (
            self._hooks_now() == self._hooks
            and _are_same(self._tables, self._tables_now())
            and list(chain.from_iterable(self._tables)) == self._names
            and list(map(_not_persistent_of, self._modules)) == self._not_persistent
        )

    def _hooks_now(self) -> list[int]:
        return list(chain.from_iterable(chain.from_iterable(map(_hooks_of, self._modules))))

    def _tables_now(self) -> list[Any]:
        return list(chain.from_iterable(map(_tables_of, self._modules)))

    def _has_parameters(self) -> bool:
        return (
            _are_at(self._seen, self._whole)
            and list(map(_look_of, self._partitioned)) == self._seen_partitioned
        )

    def _buffers(self) -> list[torch.Tensor]:
        return _tensors(_contents(self._tables[2::3]))


class _Asked:
    """Stands in for the dict of a module that keeps its tables elsewhere, as scripted ones do."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getitem__(self, name: str) -> Any:
        return getattr(self._module, name)


def _own_dict(module: nn.Module) -> Any:
    return vars(module) if vars(module).keys() >= _WATCHED else _Asked(module)


def _is_plain(module: nn.Module) -> bool:
    kind = type(module)
    return not any(_hooks_of(_own_dict(module))) and all(
        getattr(kind, name) is getattr(nn.Module, name) and name not in vars(module) for name in _BY_ITSELF
    )


def _contents(tables: Sequence[Any]) -> list[Any]:
    return list(chain.from_iterable(map(_values_of, tables)))


def _tensors(values: list[Any]) -> list[torch.Tensor]:
    return [value for value in values if value is not None]


def _places(tensors: list[torch.Tensor]) -> Places | None:
    return places(tensors) if TENSORS.issuperset(map(type, tensors)) else None


def _are_at(seen: Places | None, tensors: list[torch.Tensor]) -> bool:
    # What cannot be told is never the same.
    return seen is not None and TENSORS.issuperset(map(type, tensors)) and seen.hold(tensors)


def _are_same(before: Sequence[object], now: Sequence[object]) -> bool:
    return len(before) == len(now) and all(map(is_, before, now))
