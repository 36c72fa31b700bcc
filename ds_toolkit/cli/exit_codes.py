"""How commands end: 0 is well, 1 says that something was found, 2 that the work could not be done."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import typer

from ds_toolkit.findings import Finding, Severity

FINDINGS = 1
FAILURE = 2


class FailOn(str, Enum):
    """The severities that can be asked to make a command fail."""

    ERROR = "error"
    WARNING = "warning"


def end(findings: Sequence[Finding], errors: Sequence[object], fail_on: FailOn) -> None:
    """Return if all is well.

    Args:
        findings: what was found.
        errors: what could not be read.
        fail_on: the least severity that counts.

    Raises:
        typer.Exit: with `FAILURE` or `FINDINGS`.
    """
    if errors:
        raise typer.Exit(FAILURE)
    failing = {Severity.ERROR, Severity.WARNING} if fail_on is FailOn.WARNING else {Severity.ERROR}
    if any(finding.severity in failing for finding in findings):
        raise typer.Exit(FINDINGS)
