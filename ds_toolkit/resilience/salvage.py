"""What a run left in memory whose guardian died with its ranks: its slots are made a checkpoint after all."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from ds_toolkit.checkpoint.incident import incidents
from ds_toolkit.errors import ToolkitError
from ds_toolkit.guardian.arenas import arenas_into, sweep_arenas
from ds_toolkit.guardian.client import start_guardian
from ds_toolkit.resilience.reporting import logger

_LOOK_SECONDS = 0.1


def salvage(directory: Path, patience_seconds: float, roots: Sequence[Path]) -> list[str]:
    """Have last words spoken for dead jobs of this directory; for one rank of each node, at the same time.

    A new guardian finds the ranks of such an arena dead, and does what the one before it could not. It agrees
    with those of the job's other nodes, as ever.

    Args:
        directory: of the checkpoints; its run is the caller's, so that nobody else starts here.
        patience_seconds: for all arenas together.
        roots: where arenas may lie.

    Returns:
        Ids of the jobs; what became of each is in the incidents of the directory.
    """
    dead = [arena for root in roots for arena in arenas_into(directory, root) if arena.is_dead()]
    salvaged = []
    for arena in dead:
        try:
            start_guardian(arena)
            salvaged.append(arena.folder.name)
        except ToolkitError as error:
            logger.warning("what an earlier run left in memory is lost: %s", error)
    deadline = time.monotonic() + patience_seconds
    while any(arena.folder.exists() for arena in dead) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
    for root in roots:
        for line in sweep_arenas(directory, root):
            logger.warning("%s", line)
    return salvaged


def was_salvaged(directory: Path, jobs: Sequence[str], tag: str) -> bool:
    """Whether a tag was written by `salvage`."""
    return any(incident.job_id in jobs and incident.tag == tag for incident in incidents(directory))
