"""Unix sockets in folders whose paths are longer than an address may be."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def short_address(path: Path) -> Iterator[str]:
    """An address for `bind` or `connect` that means a path, and holds inside the block.

    A socket's address has 107 bytes (unix(7)), and a folder on a disk that is named as `arena` may need more.

    Raises:
        OSError: the folder is not there.
    """
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
