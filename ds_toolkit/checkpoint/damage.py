"""How it is said that a checkpoint file is not as it was written."""

from __future__ import annotations

from pathlib import Path

from ds_toolkit.errors import ToolkitError

ANOTHER_COPY = "take another tag, or a copy of this file from another place"


class WrongSizeError(ToolkitError):
    """A file is cut short, or not as long as its manifest says."""


def wrong_size(path: Path, size_bytes: int, should: str) -> WrongSizeError:
    """It has `size_bytes`; `should` says what it ought to have."""
    return WrongSizeError(
        "a checkpoint file is truncated or of the wrong size",
        where=path,
        why=f"it has {size_bytes:,} bytes; {should}",
        fix=ANOTHER_COPY,
    )


def unreadable(path: Path, why: str) -> ToolkitError:
    """What it holds makes no sense."""
    return ToolkitError("a checkpoint file cannot be read", where=path, why=why, fix=ANOTHER_COPY)
