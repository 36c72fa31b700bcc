"""The format of torch before 1.6, which `torch.save(..., _use_new_zipfile_serialization=False)` still writes.

Format (torch/serialization.py, `_legacy_save`): five pickles end to end (a magic number, a protocol number,
facts about the machine, what was saved, the list of storage keys), then for each key in the list's order
eight bytes with the number of elements and the elements. There are no checksums.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_toolkit.checkpoint.damage import unreadable, wrong_size
from ds_toolkit.checkpoint.pickle_machine import MalformedPickleError, TruncatedPickleError
from ds_toolkit.checkpoint.reductions import StorageRecord
from ds_toolkit.checkpoint.unpickle import MAX_PICKLE_BYTES, run_pickle
from ds_toolkit.checkpoint.ziparchive import Member
from ds_toolkit.errors import ToolkitError

_MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
_FIRST_PIECE_BYTES = 2**20
_COUNT = struct.Struct("<q")


def is_legacy(descriptor: int) -> bool:
    """Whether a file begins as this format does, or as a pickle at least."""
    return os.pread(descriptor, 1, 0) == b"\x80"


def is_legacy_file(path: Path) -> bool:
    """`is_legacy`, of a file that is not open."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return is_legacy(descriptor)
    finally:
        os.close(descriptor)


def read_legacy(descriptor: int, path: Path) -> tuple[Any, Mapping[str, Member]]:
    """What was saved, without tensor data, and where each storage lies.

    Raises:
        ToolkitError: the file is cut short, damaged, or of another format.
    """
    size_bytes = os.fstat(descriptor).st_size
    try:
        root, keys, storages, position = _structure(descriptor, size_bytes)
    except TruncatedPickleError as error:
        if size_bytes > MAX_PICKLE_BYTES:
            raise ToolkitError("a checkpoint file's structure is absurdly large", where=path) from error
        raise wrong_size(path, size_bytes, "what describes its tensors is not there completely") from error
    except MalformedPickleError as error:
        raise unreadable(path, f"its pickle is damaged: {error}") from error
    return root, _places(descriptor, path, size_bytes, keys, storages, position)


def _structure(descriptor: int, size_bytes: int) -> tuple[Any, list[str], Mapping[str, StorageRecord], int]:
    """The five pickles; how long they are is known only when they have been read."""
    num_bytes = _FIRST_PIECE_BYTES
    while True:
        data = os.pread(descriptor, num_bytes, 0)
        try:
            return _read_pickles(data)
        except TruncatedPickleError:
            if num_bytes >= min(size_bytes, MAX_PICKLE_BYTES):
                raise
        num_bytes *= 4


def _read_pickles(data: bytes) -> tuple[Any, list[str], Mapping[str, StorageRecord], int]:
    magic = run_pickle(data)
    if magic.result != _MAGIC_NUMBER:
        raise MalformedPickleError("it does not begin as torch's files do")
    protocol = run_pickle(data, magic.position)
    machine = run_pickle(data, protocol.position)
    if protocol.result != _PROTOCOL or not isinstance(machine.result, dict):
        raise MalformedPickleError(f"its protocol {protocol.result!r} is not known")
    if machine.result.get("little_endian") is not True:
        raise MalformedPickleError("it was written on a big-endian machine")
    saved = run_pickle(data, machine.position)
    keys = run_pickle(data, saved.position)
    if not isinstance(keys.result, list) or not all(isinstance(key, str) for key in keys.result):
        raise MalformedPickleError("its list of storages is no list of keys")
    return saved.result, keys.result, saved.storages, keys.position


def _places(
    descriptor: int,
    path: Path,
    size_bytes: int,
    keys: list[str],
    storages: Mapping[str, StorageRecord],
    position: int,
) -> Mapping[str, Member]:
    if set(keys) != set(storages) or len(set(keys)) != len(keys):
        raise unreadable(path, "its list of storages is not that of its tensors")
    sizes = {key: storage.num_elements * storage.dtype.size_bytes for key, storage in storages.items()}
    needed_bytes = position + sum(_COUNT.size + size for size in sizes.values())
    if needed_bytes > size_bytes:
        raise wrong_size(path, size_bytes, f"its tensors and what describes them need {needed_bytes:,}")
    members = {}
    for key in keys:
        (count,) = _COUNT.unpack(os.pread(descriptor, _COUNT.size, position))
        if count != storages[key].num_elements:
            why = f"a storage of {storages[key].num_elements} elements is said to have {count} where it lies"
            raise unreadable(path, why)
        members[key] = Member(key, position + _COUNT.size, sizes[key], crc32=0, entry_offset=0)
        position += _COUNT.size + sizes[key]
    return members
