"""A file that is written in blocks, past the page cache where that is possible.

What is copied is used once: in the page cache it would push out what others read (the checkpoint itself, the
data of a run beside), and the kernel's search for pages to free is what takes most time with outputs that are
as large as the memory. So blocks that can be are written directly (`O_DIRECT`), the rest through the cache.
"""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack, suppress
from pathlib import Path

from ds_toolkit.files import reserve, start_writing_back

# Multiples of this in place, size and memory suit every disk's own blocks.
ALIGNMENT_BYTES = 4096


class OutputFile:
    """Writes from several threads to an existing file of final size; errors are those of the system."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        """The file is closed with the stack; space for all of it is set aside where that can be done."""
        self._cached = os.open(path, os.O_WRONLY)
        stack.callback(os.close, self._cached)
        # Measured: blocks written side by side into a sparse file wait for each other's search for room.
        reserve(self._cached, os.fstat(self._cached).st_size)
        self._direct: int | None = None
        # Refused where a file system has no direct writing, such as tmpfs before Linux 6.6.
        with suppress(OSError):
            self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT)
            stack.callback(os.close, self._direct)

    def write_block(self, offset_bytes: int, block: memoryview) -> None:
        """Write a block whose place, size and memory are multiples of `ALIGNMENT_BYTES`.

        No other write may touch the same pages of the file.
        """
        num_written = 0
        if self._direct is not None:
            try:
                num_written = os.pwrite(self._direct, block, offset_bytes)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # It was opened, but takes none: blocks of another size, or a layer that only says it can.
                self._direct = None
        self.write(offset_bytes + num_written, block[num_written:])

    def write(self, offset_bytes: int, data: memoryview) -> None:
        """Write bytes to any place, and let the disk begin with them."""
        num_written = 0
        while num_written < len(data):
            num_written += os.pwrite(self._cached, data[num_written:], offset_bytes + num_written)
        if num_written:
            # The disk works while the next pieces are read; else all of it would be waited for at the end.
            start_writing_back(self._cached, offset_bytes, num_written)
