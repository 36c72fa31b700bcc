"""`ds-toolkit diagnose`: why a run failed, from its logs and from what it left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ds_toolkit.cli.exit_codes import FAILURE, FINDINGS
from ds_toolkit.units import counted

if TYPE_CHECKING:
    from ds_toolkit.doctor.diagnose import Cause, Diagnosis
    from ds_toolkit.findings import Finding


def diagnose(
    logs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[LOG]...",
            help="Logs of launcher, ranks, Slurm or the kernel, or folders of them; `-` is standard input.",
            readable=False,
        ),
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the run: logs, incident files, Flight Recorder dumps, configuration.",
            readable=False,
        ),
    ] = None,
    exit_code: Annotated[
        int | None, typer.Option(help="Exit code of the launcher, in any spelling (-9, 137, 247).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print causes and evidence as JSON.")] = False,
) -> None:
    """Say why a run failed, with evidence and a fix; exit code 1 if a cause is found, 2 if it cannot look.

    Secrets in quoted lines are masked. What follows from another rank's end is set aside.
    """
    from ds_toolkit.doctor.diagnose import diagnose as look
    from ds_toolkit.errors import ToolkitError

    if not logs and run_dir is None and exit_code is None:
        raise ToolkitError("there is nothing to look at", fix="name a log, --run-dir or --exit-code")
    result = look(logs or [], run_dir, exit_code)
    if as_json:
        _print_json(result)
    else:
        _print_text(result)
    if result.errors:
        raise typer.Exit(FAILURE)
    if result.causes:
        raise typer.Exit(FINDINGS)


def _print_text(result: Diagnosis) -> None:
    from ds_toolkit.cli.output import print_error
    from ds_toolkit.cli.reports import print_findings

    size = sum(num_bytes for _, num_bytes in result.looked_at)
    looked_at = f"{counted(len(result.looked_at), 'file')} ({_size(size)})"
    print_findings([_with_evidence(cause) for cause in result.causes], looked_at, _about(result))
    for error in result.errors:
        print_error(error, as_json=False)


def _size(num_bytes: int) -> str:
    from ds_toolkit.units import format_bytes

    return format_bytes(num_bytes)


def _with_evidence(cause: Cause) -> Finding:
    """The finding with its evidence below what it says."""
    lines = [f"{cause.finding.message}; {cause.confidence.value}"]
    lines += [f"  {line}" for line in cause.evidence]
    return replace(cause.finding, message="\n  ".join(lines))


def _about(result: Diagnosis) -> list[str]:
    from ds_toolkit.doctor.signatures import SIGNATURES
    from ds_toolkit.errors import printable

    lines = []
    if result.first is not None:
        who = "a rank that cannot be told" if result.first.rank is None else f"rank {result.first.rank}"
        lines.append(f"first to fail: {who} ({result.first.how})")
        if result.first.raised is not None:
            lines.append(f"first exception: {_exception(result)}")
    if result.set_aside:
        lines.append(f"set aside, as consequences: {printable('; '.join(result.set_aside[:3]))}")
    lines += [f"note: {printable(note)}" for note in result.notes]
    if not result.causes or any(cause.name.startswith("unknown") for cause in result.causes):
        lines.append(
            f"looked for {len(SIGNATURES)} known failures (docs/diagnose.md), exceptions and exit codes"
        )
    return lines


def _exception(result: Diagnosis) -> str:
    from ds_toolkit.doctor.masking import masked
    from ds_toolkit.errors import printable

    raised = result.first.raised if result.first else None
    if raised is None:
        return ""
    place = f", at {raised.place}" if raised.place else ""
    return printable(masked(f"{raised.text[:300]}{place} ({raised.line.file}:{raised.line.number})"))


def _print_json(result: Diagnosis) -> None:
    from ds_toolkit.cli.output import print_json
    from ds_toolkit.cli.reports import as_json

    findings = [
        {
            **as_json(cause.finding),
            "name": cause.name,
            "confidence": cause.confidence.value,
            "evidence": list(cause.evidence),
            "ranks": list(cause.ranks),
        }
        for cause in result.causes
    ]
    first = result.first
    unread = {"errors": [error.as_dict() for error in result.errors]} if result.errors else {}
    print_json(
        {
            "findings": findings,
            "first_failure": first
            and {"rank": first.rank, "how": first.how, "exception": _exception(result) or None},
            "set_aside": list(result.set_aside),
            "files": [{"file": name, "num_bytes": size} for name, size in result.looked_at],
            "notes": list(result.notes),
            **unread,
        }
    )
