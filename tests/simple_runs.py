"""Runs of tests/resilience/simple_worker.py, and what they leave in their directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jobs

from ds_toolkit.checkpoint.newest import survey
from ds_toolkit.checkpoint.verify import verify_crcs
from ds_toolkit.guardian.arenas import arenas_into

WORKER = Path(__file__).parent / "resilience" / "simple_worker.py"


def report_of(finished: jobs.Finished) -> dict[str, Any]:
    """The JSON line that the worker prints when it ends well."""
    finished.check()
    lines = [line for line in finished.output.splitlines() if line.startswith('{"resumed"')]
    report: dict[str, Any] = json.loads(lines[-1])
    return report


def whole_steps(directory: Path) -> list[int]:
    candidates, _ = survey(directory)
    return [
        candidate.step
        for candidate in candidates
        if candidate.manifest and not verify_crcs(candidate.folder, candidate.manifest.files)
    ]


def arenas_of(directory: Path) -> list[Path]:
    return [arena.folder for arena in arenas_into(directory)]
