"""The arenas of a node: which there are, whose they are, and which may go."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ds_toolkit.errors import ToolkitError
from ds_toolkit.guardian.arena import JOB_NAME, Arena, arena_root

# How long the snapshots of a dead job wait for the next run of its directory.
_KEPT_SECONDS = 24 * 3600.0


def arenas(root: Path | None = None) -> Iterator[Arena]:
    """All arenas of this user on this node."""
    root = root or arena_root()
    if root.is_dir():
        for folder in sorted(root.iterdir()):
            if (folder / JOB_NAME).is_file():
                yield Arena(folder)


def arenas_into(directory: Path, root: Path | None = None) -> Iterator[Arena]:
    """Those of jobs that save into a directory; one that is not understood, of another version, is not."""
    for arena in arenas(root):
        with contextlib.suppress(ToolkitError):
            if arena.job().directory.resolve() == directory.resolve():
                yield arena


def sweep_arenas(directory: Path, root: Path | None = None) -> list[str]:
    """Free what dead jobs of a checkpoint directory hold on this node; a line for each.

    Those of other directories may still be made checkpoints of by a run there, and have a day for it.

    For a run that owns the directory and has not made its own arena yet.
    """
    swept = []
    for arena in arenas(root):
        try:
            is_ours = arena.job().directory.resolve() == directory.resolve()
        except ToolkitError:
            is_ours = False
        with contextlib.suppress(OSError):
            is_old = arena.age_seconds() > _KEPT_SECONDS
            if (is_ours or is_old) and arena.is_dead():
                arena.remove()
                swept.append(f"removed the snapshots of a job that has ended: {arena.folder}")
    return swept
