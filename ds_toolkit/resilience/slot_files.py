"""The files of a slot: DeepSpeed's own, on tmpfs, with their storages mapped to be copied into."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from ds_toolkit.checkpoint.archive_layout import ArchiveLayout
from ds_toolkit.errors import ToolkitError
from ds_toolkit.units import format_bytes

# Linux 5.14 (linux/mman.h): enter all pages into the table of this process, as a write to each would.
_MADV_POPULATE_WRITE = 23


class SlotFile:
    """One file, whose storages lie at fixed places; the pickle, which may grow, comes behind them.

    Attributes:
        path: where it lies.
        layout: where its storages lie in it.
        places: one uint8 tensor for each storage: the bytes of the file.
    """

    def __init__(self, path: Path, storage_bytes: Sequence[int]) -> None:
        """Make the file, with all its memory.

        Raises:
            ToolkitError: there is not enough of it.
        """
        self.path = path
        self.layout = ArchiveLayout(tuple(storage_bytes))
        self._size_bytes = self.layout.tail_offset_bytes
        path.unlink(missing_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            if self._size_bytes:
                # Now, and not by a SIGBUS in the middle of a copy; the pages are touched once and for all.
                os.posix_fallocate(self._descriptor, 0, self._size_bytes)
        except OSError as error:
            os.close(self._descriptor)
            path.unlink(missing_ok=True)
            raise ToolkitError(
                "there is no room for a snapshot",
                where=path,
                why=f"{error.strerror}: it needs {format_bytes(self._size_bytes)}",
                fix="give the container a larger /dev/shm, or set `arena` to a folder on a fast local disk",
            ) from error
        for key in range(len(storage_bytes)):
            start, header = self.layout.header(key)
            os.pwrite(self._descriptor, header, start)
        self.places = self._map()

    def write_tail(self, pickled: bytes) -> None:
        """Put the pickle behind the storages; the file ends there."""
        tail = self.layout.tail(pickled)
        size_bytes = self.layout.tail_offset_bytes + len(tail)
        if size_bytes < self._size_bytes:
            os.ftruncate(self._descriptor, size_bytes)
        os.pwrite(self._descriptor, tail, self.layout.tail_offset_bytes)
        self._size_bytes = size_bytes

    def close(self) -> None:
        """Let go of the file, which stays. Its memory is unmapped when the last of `places` is gone."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self.places = []

    def _map(self) -> list[torch.Tensor]:
        layout = self.layout
        if not self._size_bytes:
            return [torch.empty(0, dtype=torch.uint8) for _ in layout.storage_bytes]
        mapped = mmap.mmap(self._descriptor, self._size_bytes)
        with contextlib.suppress(OSError):
            # Older kernels refuse it; then the first copy takes a fault for each page.
            mapped.madvise(_MADV_POPULATE_WRITE)
        return [
            torch.frombuffer(mapped, dtype=torch.uint8, count=num_bytes, offset=offset)
            if num_bytes
            else torch.empty(0, dtype=torch.uint8)
            for num_bytes, offset in zip(layout.storage_bytes, layout.offsets_bytes, strict=True)
        ]


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage as a uint8 tensor on its device, without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
