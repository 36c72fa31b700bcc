"""One file of a checkpoint: its structure as plain data, and the byte range of every tensor in it.

Format: what `torch.save` writes (torch/serialization.py, `_save`): an uncompressed zip archive with the
members `<root>/data.pkl`, `<root>/byteorder` and one `<root>/data/<key>` for each storage. `legacy` reads the
format of torch before 1.6.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_toolkit.checkpoint.damage import ANOTHER_COPY, unreadable, wrong_size
from ds_toolkit.checkpoint.legacy import is_legacy, read_legacy
from ds_toolkit.checkpoint.reductions import StorageRecord, TensorRecord
from ds_toolkit.checkpoint.unpickle import MAX_PICKLE_BYTES, unpickle
from ds_toolkit.checkpoint.ziparchive import (
    LOCAL_HEADER,
    LOCAL_SIGNATURE,
    MalformedArchiveError,
    Member,
    TruncatedArchiveError,
    read_members,
)
from ds_toolkit.errors import ToolkitError

_SHORT_PICKLE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Slice:
    """The bytes [offset_bytes, offset_bytes + num_bytes) of a file."""

    path: Path
    offset_bytes: int
    num_bytes: int


@dataclass(frozen=True)
class Shard:
    """An opened file: what was saved, with `TensorRecord` where tensors were."""

    path: Path
    size_bytes: int
    root: Any
    storages: Mapping[str, Member]

    def locate(self, tensor: TensorRecord, *, name: str = "a tensor") -> Slice:
        """The one byte range that holds the tensor's elements in row-major order.

        Raises:
            ToolkitError: its elements lie scattered, or its storage is not in the file, or not of the size it
                should have.
        """
        if not tensor.is_contiguous:
            raise ToolkitError(
                f"the elements of {name} do not lie in row-major order",
                where=self.path,
                why=f"shape {tensor.shape}, strides {tensor.strides}",
                fix=ANOTHER_COPY,
            )
        return self.span(tensor, name=name)

    def span(self, tensor: TensorRecord, *, name: str = "a tensor") -> Slice:
        """The byte range from the tensor's first element in its storage to the last, in whatever order.

        Raises:
            ToolkitError: its storage is not in the file, or not of the size it should have.
        """
        if tensor.num_elements == 0:
            return Slice(self.path, 0, 0)
        member = self.storages.get(tensor.storage.key)
        storage_bytes = tensor.storage.num_elements * tensor.storage.dtype.size_bytes
        if member is None or member.size_bytes != storage_bytes:
            found = "is not there" if member is None else f"has {member.size_bytes} bytes"
            raise ToolkitError(
                "a checkpoint file cannot be read",
                where=self.path,
                why=f"the storage of {name} should have {storage_bytes} bytes and {found}",
                fix=ANOTHER_COPY,
            )
        item_bytes = tensor.dtype.size_bytes
        first_bytes = tensor.storage.first * tensor.storage.dtype.size_bytes
        offset_bytes = member.data_offset + first_bytes + tensor.storage_offset * item_bytes
        return Slice(self.path, offset_bytes, tensor.num_spanned * item_bytes)

    def read(self, tensor: TensorRecord) -> bytes:
        """The bytes of a (small) tensor."""
        place = self.locate(tensor)
        with self.path.open("rb") as file:
            return os.pread(file.fileno(), place.num_bytes, place.offset_bytes)


def open_shard(path: Path, expected_size_bytes: int | None = None) -> Shard:
    """Read a file's structure, and none of its tensor data.

    Args:
        path: a `.pt` file.
        expected_size_bytes: what the tag's manifest says, if there is one.

    Raises:
        ToolkitError: the file is missing, cut short, damaged, or no file of `torch.save`.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        raise ToolkitError("a checkpoint file is missing", where=path) from None
    except OSError as error:
        raise ToolkitError("a checkpoint file cannot be opened", where=path, why=error.strerror) from error
    try:
        return _read_shard(descriptor, path, expected_size_bytes)
    except OSError as error:
        raise ToolkitError("a checkpoint file cannot be read", where=path, why=error.strerror) from error
    finally:
        os.close(descriptor)


def _read_shard(descriptor: int, path: Path, expected_size_bytes: int | None) -> Shard:
    size_bytes = os.fstat(descriptor).st_size
    if expected_size_bytes is not None and size_bytes != expected_size_bytes:
        raise wrong_size(path, size_bytes, f"its manifest says {expected_size_bytes:,}")
    if is_legacy(descriptor):
        root, storages = read_legacy(descriptor, path)
        return Shard(path, size_bytes, root, storages)
    try:
        members = read_members(descriptor)
        pickled = _find_pickle(members)
    except TruncatedArchiveError:
        least_bytes = _least_size_bytes(descriptor, size_bytes)
        should = "what a whole file ends with is missing"
        if least_bytes is not None and least_bytes > size_bytes:
            should = f"its tensors alone need {least_bytes:,}"
        raise wrong_size(path, size_bytes, should) from None
    except MalformedArchiveError as error:
        raise unreadable(path, str(error)) from error
    root_name = pickled.name.removesuffix("data.pkl")
    byte_order = members.get(f"{root_name}byteorder")
    if byte_order is not None and os.pread(descriptor, 6, byte_order.data_offset) != b"little":
        raise ToolkitError("a checkpoint file was written on a big-endian machine", where=path)
    prefix = f"{root_name}data/"
    return Shard(
        path=path,
        size_bytes=size_bytes,
        root=unpickle(os.pread(descriptor, pickled.size_bytes, pickled.data_offset), os.fspath(path)),
        storages={
            name.removeprefix(prefix): member for name, member in members.items() if name.startswith(prefix)
        },
    )


def _find_pickle(members: Mapping[str, Member]) -> Member:
    found = [
        member for name, member in members.items() if name.count("/") == 1 and name.endswith("/data.pkl")
    ]
    if len(found) != 1:
        raise MalformedArchiveError("it holds no data.pkl")
    if found[0].size_bytes > MAX_PICKLE_BYTES:
        raise MalformedArchiveError(f"its data.pkl of {found[0].size_bytes} bytes is absurd")
    return found[0]


def _least_size_bytes(descriptor: int, size_bytes: int) -> int | None:
    """What the tensors of a truncated file need: its pickle stands in front and is there as a rule."""
    header = os.pread(descriptor, LOCAL_HEADER.size, 0)
    if len(header) < LOCAL_HEADER.size or not header.startswith(LOCAL_SIGNATURE):
        return None
    *_, name_length, extra_length = LOCAL_HEADER.unpack(header)
    start = LOCAL_HEADER.size + name_length + extra_length
    try:
        root = unpickle(os.pread(descriptor, min(size_bytes, _SHORT_PICKLE_BYTES), start), "")
    except ToolkitError:
        return None
    storages: dict[str, StorageRecord] = {}
    pending, seen = [root], set[int]()
    while pending:
        value = pending.pop()
        if isinstance(value, TensorRecord):
            storages[value.storage.key] = value.storage
        elif isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            pending.extend(value.values() if isinstance(value, dict) else value)
    sizes = (storage.num_elements * storage.dtype.size_bytes for storage in storages.values())
    return int(start + sum(sizes))
