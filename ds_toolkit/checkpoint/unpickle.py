"""Reads torch's pickles without running them: an interpreter of pickle opcodes that can call nothing.

Opcodes are those of Python's pickletools, protocols 2 (torch's default) to 5. A pickle names classes and
functions and asks for them to be called; here a name stays a name (`Global`), a call that is on a short list
becomes plain data (`TensorRecord`, `dict`, `tuple`, ...), and every other call becomes an `Inert` record of
what was asked for. Nothing is imported, so neither DeepSpeed's classes nor the user's have to be there.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from ds_toolkit.checkpoint.pickle_machine import (
    LARGE,
    MARK,
    MalformedPickleError,
    Opcode,
    PickleMachine,
    checked_key,
    resolve,
)
from ds_toolkit.checkpoint.reductions import Inert
from ds_toolkit.errors import ToolkitError

MAX_PICKLE_BYTES = 2**30


def unpickle(data: bytes, where: str) -> Any:
    """What a pickle holds, as plain data: dict, list, tuple, set, str, bytes, numbers, None, and records.

    Args:
        data: the pickle; what follows its end is ignored.
        where: the file that errors name.

    Raises:
        ToolkitError: it is no pickle, is damaged or is absurdly large.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise ToolkitError("a checkpoint file's structure is absurdly large", where=where)
    try:
        return run_pickle(data).result
    except MalformedPickleError as error:
        raise ToolkitError(
            "a checkpoint file cannot be read",
            where=where,
            why=f"its pickle is damaged: {error}",
            fix="take another tag, or a copy of this file from another place",
        ) from error


def run_pickle(data: bytes, position: int = 0) -> PickleMachine:
    """The machine that has read the pickle which begins there: `result`, `storages`, the `position` after it.

    Raises:
        MalformedPickleError: it is no pickle, or is damaged (`TruncatedPickleError`: `data` ends before it).
    """
    machine = PickleMachine(data, position)
    try:
        machine.run(_OPCODES)
    except (IndexError, KeyError, ValueError, TypeError, OverflowError, struct.error) as error:
        raise MalformedPickleError(_first_line(error)) from error
    return machine


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _long(raw: bytes) -> int:
    return int.from_bytes(raw, "little", signed=True)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", errors="surrogatepass")


def _push(value: Callable[[PickleMachine], Any]) -> Opcode:
    def opcode(machine: PickleMachine) -> None:
        machine.stack.append(value(machine))

    return opcode


def _fresh(make: Callable[[], Any], size: int = 1) -> Opcode:
    def opcode(machine: PickleMachine) -> None:
        machine.count(size)
        machine.stack.append(make())

    return opcode


def _constant(value: Any) -> Opcode:
    return _push(lambda _: value)


def _put(index: Callable[[PickleMachine], int]) -> Opcode:
    def opcode(machine: PickleMachine) -> None:
        machine.memo[index(machine)] = machine.stack[-1]

    return opcode


def _onto(method: Callable[[PickleMachine, Any, list[Any]], None], *, one: int) -> Opcode:
    """An opcode that adds `one` items from the stack (0: all down to the mark) to what lies below them."""

    def opcode(machine: PickleMachine) -> None:
        items = [machine.pop() for _ in range(one)][::-1] if one else machine.pop_mark()
        method(machine, machine.stack[-1], items)

    return opcode


def _tuple(size: int) -> Callable[[PickleMachine], Any]:
    def value(machine: PickleMachine) -> Any:
        machine.count(1)
        return tuple([machine.pop() for _ in range(size)][::-1])

    return value


def _tuple_to_mark(machine: PickleMachine) -> Any:
    machine.count(1)
    return tuple(machine.pop_mark())


def _stack_global(machine: PickleMachine) -> Any:
    name, module = machine.pop(), machine.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise MalformedPickleError("a global has no name")
    return resolve(module, name)


def _reduce(machine: PickleMachine) -> None:
    arguments, function = machine.pop(), machine.pop()
    machine.reduce(function, arguments)


def _new_object_with_keywords(machine: PickleMachine) -> Any:
    machine.count(LARGE)
    keywords, arguments, function = machine.pop(), machine.pop(), machine.pop()
    return Inert(function, (*arguments, keywords))


def _pop_one(machine: PickleMachine) -> None:
    machine.stack.pop()


def _pop_to_mark(machine: PickleMachine) -> None:
    machine.pop_mark()


def _duplicate(machine: PickleMachine) -> None:
    machine.stack.append(machine.stack[-1])


def _skip(format_: str) -> Opcode:
    def opcode(machine: PickleMachine) -> None:
        machine.number(format_)

    return opcode


def _frozen_set(machine: PickleMachine) -> Any:
    machine.count(LARGE)
    return frozenset(checked_key(item) for item in machine.pop_mark())


# Missing are EXT1, EXT2, EXT4, NEXT_BUFFER and READONLY_BUFFER, which torch's pickles do not have, and what
# only protocols 0 and 1 use.
_BY_SYMBOL: dict[str, Opcode] = {
    "(": _constant(MARK),
    "0": _pop_one,
    "1": _pop_to_mark,
    "2": _duplicate,
    "N": _constant(None),
    "\x88": _constant(True),
    "\x89": _constant(False),
    "J": _push(lambda m: m.number("<i")),
    "K": _push(lambda m: m.number("<B")),
    "M": _push(lambda m: m.number("<H")),
    "\x8a": _push(lambda m: _long(m.take(m.number("<B")))),
    "\x8b": _push(lambda m: _long(m.take(m.number("<i")))),
    "G": _push(lambda m: struct.unpack(">d", m.take(8))[0]),
    "X": _push(lambda m: _text(m.take(m.number("<I")))),
    "\x8c": _push(lambda m: _text(m.take(m.number("<B")))),
    "\x8d": _push(lambda m: _text(m.take(m.number("<Q")))),
    "C": _push(lambda m: m.take(m.number("<B"))),
    "B": _push(lambda m: m.take(m.number("<I"))),
    "\x8e": _push(lambda m: m.take(m.number("<Q"))),
    "\x96": _push(lambda m: bytearray(m.take(m.number("<Q")))),
    "]": _fresh(list),
    "}": _fresh(dict),
    ")": _constant(()),
    "\x8f": _fresh(set, LARGE),
    "t": _push(_tuple_to_mark),
    "\x85": _push(_tuple(1)),
    "\x86": _push(_tuple(2)),
    "\x87": _push(_tuple(3)),
    "\x91": _push(_frozen_set),
    "a": _onto(PickleMachine.append, one=1),
    "e": _onto(PickleMachine.append, one=0),
    "s": _onto(PickleMachine.set_items, one=2),
    "u": _onto(PickleMachine.set_items, one=0),
    "\x90": _onto(PickleMachine.add_items, one=0),
    "h": _push(lambda m: m.memo[m.number("<B")]),
    "j": _push(lambda m: m.memo[m.number("<I")]),
    "q": _put(lambda m: m.number("<B")),
    "r": _put(lambda m: m.number("<I")),
    "\x94": _put(lambda m: len(m.memo)),
    "c": _push(lambda m: resolve(m.line(), m.line())),
    "\x93": _push(_stack_global),
    "R": _reduce,
    "\x81": _reduce,
    "\x92": _push(_new_object_with_keywords),
    "b": PickleMachine.build,
    "Q": lambda m: m.persistent(m.pop()),
    "\x80": _skip("<B"),
    "\x95": _skip("<Q"),
}
_OPCODES = {ord(symbol): opcode for symbol, opcode in _BY_SYMBOL.items()}
