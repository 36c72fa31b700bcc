"""Why a checkpoint file could not be written, in words that name the file and the space left."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from ds_toolkit.errors import ToolkitError


@contextlib.contextmanager
def written(path: Path) -> Iterator[None]:
    """Around a `torch.save` to `path`: its failures come out as one kind of error.

    Raises:
        ToolkitError: the disk is full, the place cannot be written, or torch gave up.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        # torch reports a full disk as a RuntimeError that says neither that nor how full it is.
        reason = error.strerror if isinstance(error, OSError) else None
        written_bytes = path.stat().st_size if path.exists() else 0
        raise ToolkitError(
            "a checkpoint file cannot be written",
            where=path,
            why=f"{reason or 'the write failed'} after {written_bytes:,} bytes; {_free_bytes(path):,} bytes "
            "are free on that file system",
            fix="free space there, keep fewer checkpoints (keep_last), or choose another directory",
        ) from error


def _free_bytes(path: Path) -> int:
    try:
        return shutil.disk_usage(path.parent).free
    except OSError:
        return 0
