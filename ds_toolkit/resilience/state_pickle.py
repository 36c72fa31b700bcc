"""The pickle of a checkpoint file whose content is almost the same at every step.

A state is cut into pieces at its outer dicts, and each piece is pickled alone. Pickles that do not refer to
each other may be joined, so a piece that did not change is used again as bytes: what costs 5 to 30 ms for 300
parameters as a whole costs less than one. Whether a piece has changed is looked at every time, leaf by leaf;
nothing is taken for constant but what the caller says has not changed.

Format: as `torch.save` (torch/serialization.py, `_save`): protocol 2, a storage is a persistent id
`("storage", class, key, location, number of elements)`.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.serialization import location_tag

from ds_toolkit.errors import ToolkitError
from ds_toolkit.resilience.leaves import leaves

_PROTOCOL = 2
_HEAD, _STOP = b"\x80\x02", b"."
_BEGIN_DICT = pickle.EMPTY_DICT + pickle.MARK

Place = tuple[str, ...]
# What stands between two pieces, as it is written; or where a piece stands, and its value.
_Part = bytes | tuple[Place, Any]


@dataclass(frozen=True)
class Pickled:
    """One file's state.

    Attributes:
        data: `data.pkl`.
        storages: by key; those of the live tensors.
        is_new: whether the storages are others than the last time, in number or size.
        replaced: keys whose storage is another object than the last time; all of them if `is_new`.
    """

    data: bytes
    storages: Sequence[torch.UntypedStorage]
    is_new: bool
    replaced: frozenset[int]


@dataclass
class _Piece:
    """A value as bytes. `leaves` is None for one whose leaves cannot be compared; `keys` are its storages."""

    leaves: list[Any] | None
    data: bytes
    keys: list[int]


@dataclass
class _Section:
    """What stands under an outer key: its pieces, and all of it as bytes, the key included."""

    places: list[Place]
    data: bytes


@dataclass
class _Memory:
    """What is known of a file's state: its pieces, and the storages that they refer to by key."""

    sections: dict[str, _Section] = field(default_factory=dict)
    pieces: dict[Place, _Piece] = field(default_factory=dict)
    storages: list[torch.UntypedStorage] = field(default_factory=list)
    sizes_bytes: list[int] = field(default_factory=list)
    keys: dict[int, int] = field(default_factory=dict)
    replaced: set[int] = field(default_factory=set)

    def joined(self, parts: list[_Part]) -> bytes:
        """What parts are, one after the other."""
        return b"".join([part if isinstance(part, bytes) else self.pieces[part[0]].data for part in parts])


class _OtherStoragesError(Exception):
    """A piece refers to more, fewer or larger storages than the last time."""


class StatePickler:
    """Pickles the state of one file again and again."""

    def __init__(self) -> None:
        self._memory = _Memory()

    def pickle(self, state: Mapping[str, Any], *, unchanged: Collection[str] = ()) -> Pickled:
        """The state as it is now.

        Args:
            state: the content of the file.
            unchanged: keys of it under which all is as it was the last time.

        Raises:
            ToolkitError: something in it cannot be pickled; its place is named.
        """
        is_new = False
        self._memory.replaced.clear()
        try:
            self._look_again(state, unchanged)
        except _OtherStoragesError:
            is_new = True
            self._learn(state)
        memory = self._memory
        data = b"".join([section.data for section in memory.sections.values()])
        if type(state) is dict:
            data = _BEGIN_DICT + data + pickle.SETITEMS
        replaced = range(len(memory.storages)) if is_new else memory.replaced
        return Pickled(_HEAD + data + _STOP, memory.storages, is_new, frozenset(replaced))

    def _learn(self, state: Mapping[str, Any]) -> None:
        self._memory = memory = _Memory()
        for key, value in _sections(state).items():
            parts = list(_parts_of(state, key, value))
            for part in parts:
                if not isinstance(part, bytes):
                    memory.pieces[part[0]] = _pickled(*part, leaves(part[1]), _FreshKeys(memory))
            memory.sections[key] = _Section(_places(parts), memory.joined(parts))

    def _look_again(self, state: Mapping[str, Any], unchanged: Collection[str]) -> None:
        memory = self._memory
        sections = _sections(state)
        if list(sections) != list(memory.sections):
            raise _OtherStoragesError
        for key, value in sections.items():
            if key in unchanged and type(state) is dict:
                continue
            parts = list(_parts_of(state, key, value))
            if _places(parts) != memory.sections[key].places:
                raise _OtherStoragesError
            self._look_at(parts)
            memory.sections[key].data = memory.joined(parts)

    def _look_at(self, parts: list[_Part]) -> None:
        memory = self._memory
        num_users: Counter[int] | None = None
        for part in parts:
            if isinstance(part, bytes):
                continue
            place, value = part
            known = memory.pieces[place]
            if known.leaves is not None and known.leaves == leaves(value, to_compare=True):
                continue
            if known.keys and num_users is None:
                num_users = Counter(key for piece in memory.pieces.values() for key in set(piece.keys))
            own = [key for key in dict.fromkeys(known.keys) if num_users and num_users[key] == 1]
            memory.pieces[place] = _pickled(place, value, leaves(value), _KnownKeys(memory, own))
            if set(own) - set(memory.pieces[place].keys):
                raise _OtherStoragesError


class _FreshKeys:
    """Numbers storages in the order in which they are met."""

    def __init__(self, memory: _Memory) -> None:
        self._memory = memory

    def key_of(self, storage: torch.UntypedStorage) -> int:
        key = self._memory.keys.setdefault(storage._cdata, len(self._memory.storages))
        if key == len(self._memory.storages):
            # Kept, so that no other storage gets its address while the key stands for it.
            self._memory.storages.append(storage)
            self._memory.sizes_bytes.append(storage.nbytes())
        return key


class _KnownKeys:
    """Gives a storage its key of the last time, and a new one the place of one that this piece had alone."""

    def __init__(self, memory: _Memory, own: list[int]) -> None:
        self._memory = memory
        self._free = own

    def key_of(self, storage: torch.UntypedStorage) -> int:
        memory = self._memory
        known = memory.keys.get(storage._cdata)
        if known is not None:
            if memory.sizes_bytes[known] != storage.nbytes():
                raise _OtherStoragesError
            if known in self._free:
                self._free = [key for key in self._free if key != known]
            return known
        if not self._free:
            raise _OtherStoragesError
        key = self._free.pop(0)
        if memory.sizes_bytes[key] != storage.nbytes():
            raise _OtherStoragesError
        del memory.keys[memory.storages[key]._cdata]
        memory.keys[storage._cdata] = key
        memory.storages[key] = storage
        memory.replaced.add(key)
        return key


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, keys: _FreshKeys | _KnownKeys) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self._keys = keys
        self.used: list[int] = []

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, torch.storage.TypedStorage):
            storage = value._untyped_storage
            kind = getattr(torch, value._pickle_storage_type())  # type: ignore[no-untyped-call]
            num_elements = value._size()  # type: ignore[no-untyped-call]
        elif isinstance(value, torch.UntypedStorage):
            storage, kind, num_elements = value, torch.UntypedStorage, value.nbytes()
        else:
            return None
        key = self._keys.key_of(storage)
        self.used.append(key)
        return ("storage", kind, str(key), location_tag(storage), num_elements)


def _pickled(place: Place, value: Any, seen: list[Any] | None, keys: _FreshKeys | _KnownKeys) -> _Piece:
    out = io.BytesIO()
    pickler = _Pickler(out, keys)
    try:
        pickler.dump(value)
    except _OtherStoragesError:
        raise
    except Exception as error:
        raise ToolkitError(
            "a part of the state cannot be pickled",
            where=".".join(place),
            why=f"{type(error).__name__}: {error}",
            fix="keep out of client_state, and out of the module's extra state, what pickle cannot hold",
        ) from error
    return _Piece(seen, out.getvalue()[len(_HEAD) : -len(_STOP)], pickler.used)


def _sections(state: Mapping[str, Any]) -> Mapping[str, Any]:
    # A dict of another kind, such as a layer's with what it says of its version, stays what it is.
    return state if type(state) is dict else {"": state}


def _parts_of(state: Mapping[str, Any], key: str, value: Any) -> Iterator[_Part]:
    """A section of the state: what stands between the pieces, as bytes, and the pieces with their places."""
    if type(state) is dict:
        yield from _parts(key, value, ())
    else:
        yield (), value


def _parts(key: str, value: Any, place: Place) -> Iterator[_Part]:
    encoded = key.encode("utf-8", "surrogatepass")
    yield pickle.BINUNICODE + struct.pack("<I", len(encoded)) + encoded
    # Not into what is keyed by numbers, such as an optimizer's states of single parameters.
    if type(value) is dict and all(type(inner) is str for inner in value):
        yield _BEGIN_DICT
        for inner_key, inner in value.items():
            yield from _parts(inner_key, inner, (*place, key))
        yield pickle.SETITEMS
    else:
        yield (*place, key), value


def _places(parts: list[_Part]) -> list[Place]:
    return [part[0] for part in parts if not isinstance(part, bytes)]
