"""`ds-toolkit status`: how a run stands, asked from another terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, Protocol

import typer

from ds_toolkit.cli.exit_codes import FINDINGS
from ds_toolkit.units import counted

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ds_toolkit.checkpoint.standing import TagStanding
    from ds_toolkit.guardian.standing import JobStanding, Loss


class Happened(Protocol):
    """A death that somebody wrote down: when, what in words, and the checkpoint that came of it."""

    @property
    def when(self) -> datetime: ...
    @property
    def what(self) -> str: ...
    @property
    def tag(self) -> str | None: ...


def status(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="The directory of the guard.", readable=False)
    ],
    arena: Annotated[
        Path | None,
        typer.Option(help="Where snapshots lie, if the guard was told. [default: in memory]", readable=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """Show checkpoints, ranks on this node, and what death would cost now; exit code 1 if something is wrong.

    Nothing is disturbed: pages in memory are read, and of checkpoints the names, sizes and headers.
    """
    run = _look(directory, arena)
    if as_json:
        from ds_toolkit.cli.output import print_json

        print_json(_as_json(run))
    else:
        _print(run)
    if run.problems:
        raise typer.Exit(FINDINGS)


class _Run(NamedTuple):
    """What one look has found; the loss of a job that has ended is None."""

    now: datetime
    tags: Sequence[TagStanding]
    newest: TagStanding | None
    jobs: Sequence[tuple[JobStanding, Loss | None]]
    incidents: Sequence[Happened]
    problems: Sequence[str]


def _look(directory: Path, arena: Path | None) -> _Run:
    from ds_toolkit.checkpoint.incident import incidents
    from ds_toolkit.checkpoint.standing import problems_of_tags, standing_of_tags
    from ds_toolkit.errors import ToolkitError
    from ds_toolkit.guardian.standing import loss_of_death, standing_of_jobs

    if not directory.is_dir():
        raise ToolkitError("there is no such directory", where=directory)
    tags = standing_of_tags(directory)
    newest = next((tag for tag in tags if tag.is_whole), None)
    jobs = standing_of_jobs(directory, arena)
    step = newest.step if newest else None
    return _Run(
        now=datetime.now(timezone.utc),
        tags=tags,
        newest=newest,
        jobs=[(job, loss_of_death(job, step) if job.is_running else None) for job in jobs],
        incidents=incidents(directory),
        problems=[*problems_of_tags(tags), *(problem for job in jobs for problem in job.problems())],
    )


def incidents_table(incidents: Sequence[Happened]) -> RenderableType:
    """A row for each incident."""
    rows = [
        (
            incident.when.astimezone(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC"),
            incident.what,
            incident.tag or "none",
        )
        for incident in incidents
    ]
    return _table("incidents", ("when", "what", "checkpoint"), rows)


def _print(run: _Run) -> None:
    from ds_toolkit.cli.output import console
    from ds_toolkit.errors import printable

    out = console()

    def show(block: RenderableType) -> None:
        # Names may hold brackets, which are no markup.
        if isinstance(block, str):
            out.print(printable(block), markup=False)
        else:
            out.print(block)

    if run.tags:
        show(_tags_table(run))
    if run.newest is not None:
        age = _age(run.newest, run.now)
        show(f"newest whole checkpoint: {run.newest.tag} of step {run.newest.step}, {age} old")
    for job, loss in run.jobs:
        show(_job_table(job))
        show(_about_death(job, loss))
    if not run.jobs:
        show("no job on this node has snapshots for this directory")
    if run.incidents:
        show(incidents_table(run.incidents))
    for problem in run.problems:
        show(f"problem: {problem}")


def _tags_table(run: _Run) -> RenderableType:
    from ds_toolkit.units import format_bytes

    rows = [
        (
            tag.tag,
            "?" if tag.step is None else str(tag.step),
            tag.kind or "?",
            _age(tag, run.now),
            format_bytes(tag.num_bytes),
            ("yes" if tag.has_manifest else "by its shards") if tag.is_whole else "NO",
        )
        for tag in run.tags
    ]
    return _table("checkpoints", ("tag", "step", "kind", "age", "size", "whole"), rows)


def _job_table(job: JobStanding) -> RenderableType:
    from ds_toolkit.units import format_seconds

    guardian = f"guardian {job.guardian_pid}" if job.has_guardian else "no guardian"
    title = f"job {job.job_id}, node {job.node} of {counted(job.num_nodes, 'node')}: {guardian}"
    rows = [
        (
            str(rank.rank),
            str(rank.pid) if rank.is_running else f"{rank.pid} (ended)",
            rank.phase if rank.leaving is None else f"{rank.phase}, leaving ({rank.leaving})",
            str(rank.step),
            str(rank.whole_steps[-1]) if rank.whole_steps else "none",
            "?" if rank.still_seconds is None else format_seconds(rank.still_seconds),
        )
        for rank in job.ranks
    ]
    return _table(title, ("rank", "process", "phase", "step", "snapshot of step", "unchanged for"), rows)


def _about_death(job: JobStanding, loss: Loss | None) -> str:
    if loss is None:
        return f"job {job.job_id} has ended; what it left lies in {job.folder}"
    origin = {
        "snapshots": f"last words of step {loss.from_step}",
        "checkpoint": f"the checkpoint of step {loss.from_step}",
        "nothing": "the beginning",
    }[loss.source]
    lost = f"at most {counted(loss.num_steps, 'step')} and the one under way"
    return f"if it died now: {lost} would be lost, training would go on from {origin}"


def _age(tag: TagStanding, now: datetime) -> str:
    from ds_toolkit.units import format_seconds

    seconds = tag.age_seconds(now)
    return "?" if seconds is None else format_seconds(seconds)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> RenderableType:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from ds_toolkit.errors import printable

    table = Table(box=box.SIMPLE, title=title, title_justify="left")
    for column in columns:
        # Else what is long ends in dots where the terminal is narrow.
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def _as_json(run: _Run) -> dict[str, object]:
    return {
        "newest_whole": run.newest.tag if run.newest else None,
        "tags": [_tag_as_json(tag, run.now) for tag in run.tags],
        "jobs": [_job_as_json(job, loss) for job, loss in run.jobs],
        "incidents": [_incident_as_json(incident) for incident in run.incidents],
        "problems": list(run.problems),
    }


def _tag_as_json(tag: TagStanding, now: datetime) -> dict[str, object]:
    return {
        **asdict(tag),
        "created_at": tag.created_at.isoformat() if tag.created_at else None,
        "age_seconds": tag.age_seconds(now),
        "is_whole": tag.is_whole,
    }


def _job_as_json(job: JobStanding, loss: Loss | None) -> dict[str, object]:
    return {
        **asdict(job),
        "folder": str(job.folder),
        "is_running": job.is_running,
        "step": job.step,
        "whole_step": job.whole_step,
        "loss_of_death": loss and asdict(loss),
    }


def _incident_as_json(incident: Happened) -> dict[str, object]:
    return {"when": incident.when.isoformat(), "what": incident.what, "tag": incident.tag}
