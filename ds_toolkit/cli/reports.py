"""Findings as people and machines want them: text, JSON, GitHub annotations, SARIF."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from enum import Enum
from typing import Any
from urllib.parse import quote

from ds_toolkit.errors import ToolkitError, printable
from ds_toolkit.findings import Finding, Severity
from ds_toolkit.units import counted

_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.INFO: "bold blue"}
_GITHUB = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}
_SARIF = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}
_PLACE = re.compile(r"(.+?):(\d+)(?::(\d+))?")


class Format(str, Enum):
    """The forms that a report can take."""

    TEXT = "text"
    JSON = "json"
    GITHUB = "github"
    SARIF = "sarif"


def report(findings: Sequence[Finding], errors: Sequence[ToolkitError], num_files: int, form: Format) -> None:
    """Print findings on standard output; errors are files that could not be read.

    Errors go to standard error, and into JSON, annotations and SARIF as well.
    """
    if form is Format.JSON:
        from ds_toolkit.cli.output import print_json

        unread = {"errors": [error.as_dict() for error in errors]} if errors else {}
        print_json({"findings": [as_json(finding) for finding in findings], **unread})
    elif form is Format.GITHUB:
        lines = [_annotation(finding) for finding in findings] + [
            _error_annotation(error) for error in errors
        ]
        sys.stdout.write("".join(f"{line}\n" for line in lines))
    elif form is Format.SARIF:
        import json

        json.dump(as_sarif(findings, errors), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        print_findings(findings, counted(num_files, "file"))
    if errors:
        from ds_toolkit.cli.output import print_error

        for error in errors:
            print_error(error, as_json=False)


def as_json(finding: Finding) -> dict[str, object]:
    """One finding by the names of version 1 of the report."""
    return {
        "code": finding.code,
        "severity": finding.severity.value,
        "file": finding.where.file,
        "pointer": finding.where.pointer,
        "line": finding.where.line,
        "column": finding.where.column,
        "message": finding.message,
        "fix": finding.fix,
    }


def as_sarif(findings: Sequence[Finding], errors: Sequence[ToolkitError]) -> dict[str, object]:
    """A log in the Static Analysis Results Interchange Format, version 2.1.0 (OASIS)."""
    from ds_toolkit import __version__
    from ds_toolkit.cli.catalogue import rule_of

    used = sorted({finding.code for finding in findings})
    driver = {
        "name": "ds-toolkit",
        "semanticVersion": __version__,
        "rules": [_sarif_rule(rule_of(code)) for code in used],
    }
    notifications = [
        {
            "level": "error",
            "message": {"text": str(error)},
            "locations": _sarif_locations(*_place(error), None),
        }
        for error in errors
    ]
    invocation = {"executionSuccessful": not errors, "toolExecutionNotifications": notifications}
    results = [
        {
            "ruleId": finding.code,
            "ruleIndex": used.index(finding.code),
            "level": _SARIF[finding.severity],
            "message": {"text": _sentence(finding)},
            "locations": _sarif_locations(
                finding.where.file, finding.where.line, finding.where.column, finding.where.pointer
            ),
        }
        for finding in findings
    ]
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": driver},
                "invocations": [invocation],
                "columnKind": "unicodeCodePoints",
                "results": results,
            }
        ],
    }


def _sarif_rule(rule: Any) -> dict[str, object]:
    summary = rule.manual.splitlines()[0]
    return {
        "id": rule.code,
        "name": rule.name,
        "shortDescription": {"text": summary},
        "help": {"text": rule.manual},
        "defaultConfiguration": {"level": _SARIF[rule.severity]},
    }


def _sarif_locations(
    file: str | None, line: int | None, column: int | None, pointer: str | None
) -> list[dict[str, object]]:
    if file is None:
        return []
    physical: dict[str, object] = {"artifactLocation": {"uri": _uri(file)}}
    if line is not None:
        physical["region"] = {"startLine": line, **({"startColumn": column} if column is not None else {})}
    location: dict[str, object] = {"physicalLocation": physical}
    if pointer is not None:
        location["logicalLocations"] = [{"fullyQualifiedName": pointer, "kind": "member"}]
    return [location]


def _uri(file: str) -> str:
    # A name that is no UTF-8 comes from the system with its odd bytes as half characters.
    return quote(file.replace("\\", "/").encode(errors="surrogateescape"), safe="/")


def _annotation(finding: Finding) -> str:
    from ds_toolkit.cli.catalogue import rule_of

    where = finding.where
    title = f"{finding.code} {rule_of(finding.code).name}"
    return _github_command(
        _GITHUB[finding.severity], where.file, where.line, where.column, title, _sentence(finding)
    )


def _error_annotation(error: ToolkitError) -> str:
    return _github_command("error", *_place(error), "unreadable", str(error))


def _github_command(
    kind: str, file: str | None, line: int | None, column: int | None, title: str, message: str
) -> str:
    properties = {"file": file, "line": line, "col": column, "title": title}
    shown = ",".join(
        f"{name}={_github_escaped(str(value), in_property=True)}"
        for name, value in properties.items()
        if value is not None
    )
    return f"::{kind} {shown}::{_github_escaped(message, in_property=False)}"


def _github_escaped(text: str, *, in_property: bool) -> str:
    text = printable(text, "\r\n").replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if in_property else text


def _place(error: ToolkitError) -> tuple[str | None, int | None, int | None]:
    match = _PLACE.fullmatch(error.where or "")
    if match is None:
        return error.where, None, None
    return match[1], int(match[2]), int(match[3]) if match[3] else None


def _sentence(finding: Finding) -> str:
    return finding.message if finding.fix is None else f"{finding.message}; {finding.fix}"


def print_findings(findings: Sequence[Finding], looked_at: str, lines: Sequence[str] = ()) -> None:
    """Print findings for people, further lines, and how much was found in what (`3 files`)."""
    counts = {severity: sum(finding.severity is severity for finding in findings) for severity in Severity}
    shown = [f"{count} {_plural(severity, count)}" for severity, count in counts.items() if count]
    summary = "\n".join([*lines, f"{', '.join(shown) or 'nothing found'} in {looked_at}"])
    if not sys.stdout.isatty():
        # What is not seen needs no colours, and starts sooner without the library that makes them.
        blocks = ["".join(text for text, _ in _block(finding)) for finding in findings]
        sys.stdout.write("\n".join([*blocks, summary]) + "\n")
        return
    from rich.text import Text

    from ds_toolkit.cli.output import console

    out = console()
    for finding in findings:
        out.print(Text.assemble(*_block(finding)))
    out.print(summary, markup=False)


def _block(finding: Finding) -> list[tuple[str, str]]:
    """The lines about one finding, in pieces with a style each."""
    from ds_toolkit.cli.catalogue import rule_of

    pieces = [
        # What has no place, such as an exit code, is not said to be anywhere.
        (f"{finding.where}: " if str(finding.where) else "", ""),
        (finding.severity.value, _STYLES[finding.severity]),
        (f" {finding.code} {rule_of(finding.code).name}\n", "bold"),
        (f"  {finding.message}", ""),
    ]
    return pieces if finding.fix is None else [*pieces, (f"\n  fix: {finding.fix}", "green")]


def _plural(severity: Severity, count: int) -> str:
    noun = "note" if severity is Severity.INFO else severity.value
    return noun if count == 1 else f"{noun}s"
