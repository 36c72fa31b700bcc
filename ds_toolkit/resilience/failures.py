"""Failures that a directory has a record of, as the arithmetic of intervals takes them."""

from __future__ import annotations

from pathlib import Path

from ds_toolkit.checkpoint.incident import incidents
from ds_toolkit.plan.failures import Failure


def failures_of(directory: Path) -> list[Failure]:
    """One a job, however many nodes wrote about it, oldest first; ends of programs are none."""
    by_job = {
        incident.job_id: Failure(incident.when.timestamp(), incident.was_caught)
        for incident in incidents(directory)
        if incident.is_failure
    }
    return list(by_job.values())
