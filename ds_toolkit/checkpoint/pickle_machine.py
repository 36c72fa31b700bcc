"""The machine that pickles are written for: a stack and a memo, and no power to call anything."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ds_toolkit.checkpoint.dtypes import DTYPES, STORAGE_DTYPES, DType
from ds_toolkit.checkpoint.reductions import REDUCTIONS, Global, Inert, Reduction, StorageRecord

# Calls such as `torch.Size(list)` copy what a few bytes of pickle refer to; only this much may be copied.
_COPIED_ITEMS_PER_BYTE = 4
_MAX_KEY_DEPTH = 4
# A byte of pickle can make a container of a hundred bytes. 600,000 tensors need as many as this.
_MAX_CONTAINERS = 2**23
# What an inert call or a set takes, in plain containers.
LARGE = 4
_STOP = ord(".")


class MalformedPickleError(Exception):
    """The bytes are not a pickle that torch could have written; the text says why."""


class TruncatedPickleError(MalformedPickleError):
    """The bytes end before the pickle does."""


class _Mark:
    pass


MARK = _Mark()


@dataclass
class PickleMachine:
    """The pickle machine: a stack, a memo, and one method an opcode."""

    data: bytes
    position: int = 0
    stack: list[Any] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)
    copied_items: int = 0
    num_containers: int = 0
    storages: dict[str, StorageRecord] = field(default_factory=dict)
    result: Any = None

    def run(self, opcodes: dict[int, Opcode]) -> None:
        """Read to the pickle's end; what stands on the stack then is `result`."""
        data, end = self.data, len(self.data)
        while self.position < end:
            code = data[self.position]
            self.position += 1
            if code == _STOP:
                self.result = self.pop()
                return
            opcode = opcodes.get(code)
            if opcode is None:
                raise MalformedPickleError(f"opcode {code:#04x} at byte {self.position - 1} is not allowed")
            opcode(self)
        raise TruncatedPickleError("it has no end")

    # Reading arguments.

    def take(self, count: int) -> bytes:
        start = self.position
        if count < 0 or count > len(self.data) - start:
            raise TruncatedPickleError(f"{count} bytes are wanted at byte {start}, and it ends before")
        self.position = start + count
        return self.data[start : self.position]

    def number(self, format_: str) -> int:
        (value,) = struct.unpack(format_, self.take(struct.calcsize(format_)))
        return int(value)

    def line(self) -> str:
        end = self.data.find(b"\n", self.position)
        if end < 0:
            raise TruncatedPickleError("a line has no end")
        text = self.data[self.position : end]
        self.position = end + 1
        return text.decode("utf-8", errors="surrogateescape")

    # Reading the stack.

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is MARK:
            raise MalformedPickleError("a mark is taken for a value")
        return value

    def pop_mark(self) -> list[Any]:
        index = len(self.stack) - 1
        while self.stack[index] is not MARK:
            index -= 1
            if index < 0:
                raise MalformedPickleError("a mark is missing")
        items = self.stack[index + 1 :]
        del self.stack[index:]
        return items

    def spend(self, value: Any) -> None:
        """Account for a copy of a container, so that references to a large one do not multiply it."""
        self.copied_items += len(value) if hasattr(value, "__len__") else 1
        if self.copied_items > _COPIED_ITEMS_PER_BYTE * len(self.data) + 1000:
            raise MalformedPickleError("it copies the same data over and over")

    # Building.

    def count(self, num_containers: int) -> None:
        """Account for memory that what is made takes, whatever the size of the pickle."""
        self.num_containers += num_containers
        if self.num_containers > _MAX_CONTAINERS:
            raise MalformedPickleError("it makes absurdly many objects")

    def append(self, target: Any, items: list[Any]) -> None:
        if isinstance(target, list):
            target.extend(items)
        elif isinstance(target, Inert):
            target.items.extend(items)
        else:
            raise MalformedPickleError(f"items are appended to a {type(target).__name__}")

    def set_items(self, target: Any, items: list[Any]) -> None:
        if len(items) % 2:
            raise MalformedPickleError("a key has no value")
        pairs = list(zip(items[::2], items[1::2], strict=True))
        if isinstance(target, dict):
            for key, value in pairs:
                target[checked_key(key)] = value
        elif isinstance(target, Inert):
            target.items.extend(pairs)
        else:
            raise MalformedPickleError(f"keys are set in a {type(target).__name__}")

    def add_items(self, target: Any, items: list[Any]) -> None:
        if isinstance(target, set):
            target.update(checked_key(item) for item in items)
        else:
            self.append(target, items)

    def reduce(self, function: Any, arguments: Any) -> None:
        """Push what a call would give: plain data for the few calls on the list, else an inert record."""
        if not isinstance(arguments, tuple):
            raise MalformedPickleError("the arguments of a call are no tuple")
        self.count(LARGE)
        reduction: Reduction | None = REDUCTIONS.get(function) if isinstance(function, Global) else None
        if reduction is None:
            self.stack.append(Inert(function, arguments))
            return
        for argument in arguments:
            self.spend(argument)
        try:
            self.stack.append(reduction(*arguments))
        except TypeError:
            self.stack.append(Inert(function, arguments))

    def build(self) -> None:
        state, target = self.pop(), self.stack[-1]
        # The state of a dict subclass or of a tensor (attributes that a user set) says nothing about weights.
        if isinstance(target, Inert):
            target.state = state

    def persistent(self, identity: Any) -> None:
        # torch/serialization.py, `persistent_id`: ("storage", class, key, device, number of elements). The
        # format before 1.6 adds a view of these elements (key, first, number) or None, and writes a class of
        # modules as ("module", class, file, source).
        kind, storage_class, key, _, *rest = identity
        if kind == "module":
            self.stack.append(storage_class)
            return
        num_elements, view = rest if len(rest) == 2 else (*rest, None)
        if kind != "storage" or not isinstance(storage_class, Global | DType) or not isinstance(key, str):
            raise MalformedPickleError(f"a persistent reference of kind {kind!r} is not torch's")
        dtype = storage_class if isinstance(storage_class, DType) else _storage_dtype(storage_class)
        _, first, num_viewed = view if view is not None else (None, 0, num_elements)
        numbers = (num_elements, first, num_viewed)
        if not all(isinstance(n, int) and n >= 0 for n in numbers) or first + num_viewed > num_elements:
            raise MalformedPickleError("a storage has no proper size")
        storage = StorageRecord(dtype, key, num_elements, first, num_viewed)
        self.storages.setdefault(key, storage)
        self.stack.append(storage)


def _storage_dtype(name: Global) -> DType:
    dtype = STORAGE_DTYPES.get(name.name) if name.module.startswith("torch") else None
    if dtype is None:
        raise MalformedPickleError(f"the storage type {name} is not known")
    return dtype


def resolve(module: str, name: str) -> Any:
    """A dtype where torch's name for one is meant, else the bare name."""
    if module == "torch" and name in DTYPES:
        return DTYPES[name]
    return Global(module, name)


def checked_key(key: Any, depth: int = 0) -> Any:
    # Hashing a deeply nested tuple would overflow the C stack, which no except clause survives.
    if isinstance(key, tuple):
        if depth == _MAX_KEY_DEPTH:
            raise MalformedPickleError("a key is nested too deeply")
        for item in key:
            checked_key(item, depth + 1)
    elif isinstance(key, list | dict | set | bytearray) or key is MARK:
        raise MalformedPickleError(f"a {type(key).__name__} is used as a key")
    return key


Opcode = Callable[[PickleMachine], None]
