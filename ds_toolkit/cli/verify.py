"""`ds-toolkit verify`: everything that is wrong with a checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ds_toolkit.cli.exit_codes import FINDINGS
from ds_toolkit.units import counted

if TYPE_CHECKING:
    from ds_toolkit.checkpoint.examination import TagProgress, Verified, VerifiedTag


def verify(
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="CKPT", help="The save directory, or one tag's folder in it.", readable=False),
    ],
    tag: Annotated[str | None, typer.Option(help="The only checkpoint to look at. [default: all]")] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read the data too: CRCs, NaN and infinite values.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print findings and tags as JSON.")] = False,
) -> None:
    """Find missing, cut, stale and foreign shards, and tensors not covered; exit code 1 if there is any.

    Nothing in a checkpoint is executed.
    """
    from ds_toolkit.checkpoint.examination import verify as examine
    from ds_toolkit.findings import Severity

    with _progress_bar(shown=deep) as progress:
        result = examine(checkpoint, tag=tag, deep=deep, progress=progress)
    if as_json:
        from ds_toolkit.cli.output import print_json
        from ds_toolkit.cli.reports import as_json as finding_as_json

        findings = [finding_as_json(finding) for finding in result.findings]
        print_json({"findings": findings, "tags": [_tag_as_json(one) for one in result.tags]})
    else:
        _print_text(result)
    if any(finding.severity is not Severity.INFO for finding in result.findings):
        raise typer.Exit(FINDINGS)


@contextlib.contextmanager
def _progress_bar(*, shown: bool) -> Iterator[TagProgress | None]:
    """On a terminal a bar with bytes and rate, on standard error; elsewhere nothing."""
    if not shown:
        yield None
        return
    from ds_toolkit.cli.output import error_console

    console = error_console()
    if not console.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    # Tags may hold brackets, which are no markup.
    name = TextColumn("{task.description}", markup=False)
    with Progress(
        name, BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=console, transient=True
    ) as bar:
        task = bar.add_task("", total=None)
        yield lambda tag, done_bytes, total_bytes: bar.update(
            task, description=tag, completed=done_bytes, total=total_bytes
        )


def _print_text(result: Verified) -> None:
    from ds_toolkit.cli.reports import print_findings

    width = max((len(_name(tag)) for tag in result.tags), default=0)
    lines = [f"{_name(tag):<{width}}  {_judged(tag)}" for tag in result.tags]
    num_tags = len(result.tags)
    print_findings(result.findings, counted(num_tags, "tag"), lines)


def _name(tag: VerifiedTag) -> str:
    from ds_toolkit.errors import printable

    return printable(tag.folder.resolve().name)


def _judged(tag: VerifiedTag) -> str:
    from ds_toolkit.units import format_bytes

    step = "step unknown" if tag.step is None else f"step {tag.step}"
    files = f"{counted(tag.num_files, 'file')}, {format_bytes(tag.num_bytes)}"
    depth = "every byte read" if tag.is_deep else "structure only"
    if not tag.is_whole:
        verdict = "BROKEN"
    elif tag.has_manifest:
        verdict = "whole"
    else:
        verdict = "whole as far as its shards tell (no manifest)"
    return f"{step}, {files}: {verdict}, {depth}"


def _tag_as_json(tag: VerifiedTag) -> dict[str, object]:
    return {
        "tag": tag.folder.resolve().name,
        "folder": str(tag.folder),
        "step": tag.step,
        "num_files": tag.num_files,
        "num_bytes": tag.num_bytes,
        "has_manifest": tag.has_manifest,
        "is_whole": tag.is_whole,
        "is_deep": tag.is_deep,
        "codes": sorted({finding.code for finding in tag.findings}),
    }
