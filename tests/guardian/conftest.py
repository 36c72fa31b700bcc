"""Places for arenas: on tmpfs, one for each test."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def root() -> Iterator[Path]:
    """Where the arenas of a test lie."""
    folder = Path(tempfile.mkdtemp(prefix="ds_toolkit-test-", dir="/dev/shm"))
    yield folder / "arenas"
    shutil.rmtree(folder)
