"""Byte ranges of files, read whole or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ds_toolkit.checkpoint.shards import Slice
from ds_toolkit.errors import ToolkitError


def read_into(descriptor: int, path: Path, offset_bytes: int, out: memoryview) -> None:
    """Fill a buffer with the bytes of an opened file from an offset on.

    Raises:
        ToolkitError: there are not so many any more; `path` names the file.
    """
    num_read = 0
    while num_read < len(out):
        count = os.preadv(descriptor, [out[num_read:]], offset_bytes + num_read)
        if count == 0:
            raise ToolkitError("a checkpoint file became shorter while it was read", where=path)
        num_read += count


def read_slice(place: Slice) -> bytes:
    """The bytes of a (small) range.

    Raises:
        ToolkitError: they are not all there any more.
    """
    data = bytearray(place.num_bytes)
    with place.path.open("rb") as file:
        read_into(file.fileno(), place.path, place.offset_bytes, memoryview(data))
    return bytes(data)


def read_elements(place: Slice, start: int, count: int, item_bytes: int) -> bytes:
    """Elements [start, start + count) of a range that holds elements of so many bytes."""
    return read_slice(Slice(place.path, place.offset_bytes + start * item_bytes, count * item_bytes))


class OpenFiles(contextlib.ExitStack):
    """Files that are opened when they are first read, and closed together."""

    def __init__(self) -> None:
        super().__init__()
        self._descriptors: dict[Path, int] = {}

    def read(self, path: Path, offset_bytes: int, out: memoryview) -> None:
        """Fill a buffer, as `read_into` does."""
        if path not in self._descriptors:
            self._descriptors[path] = os.open(path, os.O_RDONLY)
            self.callback(os.close, self._descriptors[path])
        read_into(self._descriptors[path], path, offset_bytes, out)
