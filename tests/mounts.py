"""Small file systems: real ones, in memory, gone when the block is left."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def tmpfs(folder: Path, size: str | None = None) -> Iterator[Path]:
    """Mount one at a folder, which is made if it is not there; `size` as mount(8) takes it, such as `2m`."""
    folder.mkdir(exist_ok=True)
    options = [] if size is None else ["-o", f"size={size}"]
    command = ["mount", "-t", "tmpfs", *options, "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0:
        pytest.fail(f"this test needs the right to mount a tmpfs: {done.stderr}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], timeout=30, check=True)
