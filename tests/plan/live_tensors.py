"""Bytes of all tensors of a process that are alive, counted at every operation."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

# A worker thread of gloo needs a processor to let go of what it has reduced.
SETTLE_SECONDS = 1.0


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    if torch.is_tensor(value):
        yield value  # type: ignore[misc]
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)


class LiveTensors(TorchDispatchMode):
    """Within the block every storage that an operation makes is known until it is freed.

    A weak reference keeps the identity of a storage from being used again, as its address may be.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most_bytes = 0
        self.is_watching = False
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: Any = None
    ) -> Any:
        result = function(*arguments, **(keywords or {}))
        is_new = [self._add(tensor) for tensor in tensors_in(result)]
        if self.is_watching and any(is_new):
            self.most_bytes = max(self.most_bytes, self.now_bytes())
        return result

    def _add(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        # A tensor on the meta device has a size but no memory.
        if storage._cdata in self._storages or tensor.is_meta or not storage.nbytes():
            return False
        self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return True

    def now_bytes(self) -> int:
        """Of what is alive, each storage once."""
        self._storages = {key: one for key, one in self._storages.items() if not one[0].expired()}
        return sum(size for _, size in self._storages.values())

    def settled_bytes(self, expected_bytes: int) -> int:
        """The same once it is no more than expected, or after a while: threads of gloo let go late."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while (now := self.now_bytes()) > expected_bytes and time.monotonic() < deadline:
            time.sleep(0.001)
        return now


class Settled:
    """A backend whose collectives return only when nobody but the caller holds their tensors.

    The thread of gloo that ran a collective lets go of its tensors a moment after the caller goes on.
    """

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.backend, name)
        if name not in ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "broadcast"):
            return value

        def settled(*arguments: Any, **keywords: Any) -> Any:
            before = holders([arguments, keywords])
            result = value(*arguments, **keywords)
            deadline = time.monotonic() + SETTLE_SECONDS
            while not keywords.get("async_op") and time.monotonic() < deadline:
                if holders([arguments, keywords]) <= before:
                    break
                time.sleep(0.0002)
            return result

        return settled


def holders(values: Iterable[Any]) -> int:
    """Of the tensors themselves, and of their storages: a thread may make tensors of its own of them."""
    tensors = list(tensors_in(list(values)))
    of_storage = torch._C._storage_Use_Count  # type: ignore[attr-defined]
    return sum(one._use_count() + of_storage(one.untyped_storage()._cdata) for one in tensors)
