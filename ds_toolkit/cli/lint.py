"""`ds-toolkit lint`: what is wrong with a ds_config, a `.deepspeed_env` or a hostfile."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ds_toolkit.cli.inputs import Input, Kind
from ds_toolkit.cli.reports import Format
from ds_toolkit.config.consumers import Consumer
from ds_toolkit.env.launchers import Launcher
from ds_toolkit.findings import Finding, Severity

if TYPE_CHECKING:
    from ds_toolkit.config.reader import Document

FINDINGS = 1
FAILURE = 2
_MAX_ROUNDS = 10


class FailOn(str, Enum):
    """The severities that can be asked to make the command fail."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True)
class Options:
    """What was asked for besides the files."""

    consumer: Consumer
    world_size: int | None
    launcher: Launcher | None
    ignored: frozenset[str]
    fix: bool
    form: Format


def lint(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="Files to look at; - is standard input.")
    ],
    consumer: Annotated[
        Consumer, typer.Option("--for", help="Who hands the configuration to DeepSpeed.")
    ] = Consumer.NATIVE,
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks. [default: what depends on it is left out]")
    ] = None,
    launcher: Annotated[
        Launcher | None, typer.Option(help="What starts the ranks. [default: what depends on it is left out]")
    ] = None,
    form: Annotated[Format, typer.Option("--format", help="Form of the report.")] = Format.TEXT,
    fail_on: Annotated[
        FailOn, typer.Option(help="The least severity that makes the exit code 1.")
    ] = FailOn.WARNING,
    ignore: Annotated[
        list[str] | None, typer.Option(metavar="CODE", help="Leave a rule out; may be repeated.")
    ] = None,
    kind: Annotated[
        Kind | None, typer.Option(help="What the files are. [default: told by name, then by content]")
    ] = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Mend what is safe to mend, and show the changes first.")
    ] = False,
) -> None:
    """Find what DeepSpeed would ignore, refuse or misunderstand; the exit code is 1 if there is any."""
    from ds_toolkit.cli.catalogue import rule_named
    from ds_toolkit.cli.inputs import read_input
    from ds_toolkit.cli.reports import report
    from ds_toolkit.errors import ToolkitError

    ignored = frozenset(rule_named(word).code for word in ignore or ())
    options = Options(consumer, world_size, launcher, ignored, fix, form)
    findings: list[Finding] = []
    errors: list[ToolkitError] = []
    for name in files:
        try:
            findings += _lint_one(read_input(name, kind), options)
        except ToolkitError as error:
            errors.append(error)
    report(findings, errors, len(files) - len(errors), form)
    if errors:
        raise typer.Exit(FAILURE)
    failing = {Severity.ERROR, Severity.WARNING} if fail_on is FailOn.WARNING else {Severity.ERROR}
    if any(finding.severity in failing for finding in findings):
        raise typer.Exit(FINDINGS)


def _lint_one(read: Input, options: Options) -> list[Finding]:
    if read.kind is Kind.ENV:
        from ds_toolkit.env.envfile import parse_env_text
        from ds_toolkit.env.fabric import has_infiniband
        from ds_toolkit.env.rules import lint_env

        found = lint_env(parse_env_text(read.text, read.name), options.launcher, has_infiniband())
    elif read.kind is Kind.HOSTFILE:
        from ds_toolkit.env.hostfile import parse_hostfile_text
        from ds_toolkit.env.hostfile_rules import lint_hostfile

        found = lint_hostfile(parse_hostfile_text(read.text, read.name))
    else:
        from ds_toolkit.config.reader import read_config_text

        document = read_config_text(read.text, read.name)
        found = _lint_config(document, options)
        if options.fix:
            found = _lint_config(_mended(document, found, read.path, options), options)
    return [finding for finding in found if finding.code not in options.ignored]


def _lint_config(document: Document, options: Options) -> list[Finding]:
    from ds_toolkit.config.linter import ABOUT_UNKNOWN_KEYS
    from ds_toolkit.config.linter import lint as lint_config

    lint_for = functools.partial(
        lint_config, document, world_size=options.world_size, consumer=options.consumer
    )
    found = lint_for()
    # Asking for the installed version takes a while, and few findings depend on it.
    if any(finding.code in ABOUT_UNKNOWN_KEYS for finding in found) and _is_newer_deepspeed():
        found = lint_for(newer_deepspeed=True)
    return [finding for finding in found if finding.code not in options.ignored]


def _mended(document: Document, findings: list[Finding], path: Path | None, options: Options) -> Document:
    from ds_toolkit.config.fixes import apply_fixes
    from ds_toolkit.errors import ToolkitError
    from ds_toolkit.files import write_output

    if path is None:
        raise ToolkitError("standard input cannot be mended", fix="name a file, or leave --fix out")
    fixed, mended = apply_fixes(document, findings)
    if not mended:
        return document
    # What was mended may uncover what can be mended too: a second call should have nothing to do.
    for _ in range(_MAX_ROUNDS):
        fixed, mended = apply_fixes(fixed, _lint_config(fixed, options))
        if not mended:
            break
    _show_changes(document.text, fixed.text, str(path), to_stderr=options.form is not Format.TEXT)
    write_output(path, fixed.text.encode())
    return fixed


def _show_changes(before: str, after: str, name: str, *, to_stderr: bool) -> None:
    import difflib

    from rich.text import Text

    from ds_toolkit.cli.output import console, error_console
    from ds_toolkit.errors import printable

    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), f"{name} (before)", f"{name} (after)", lineterm=""
    )
    styles = {"+": "green", "-": "red", "@": "cyan"}
    out = error_console() if to_stderr else console()
    for line in lines:
        line = printable(line, "\t")
        out.print(Text(line, style=styles.get(line[:1], "")))


def _is_newer_deepspeed() -> bool:
    from importlib.metadata import PackageNotFoundError, version

    from ds_toolkit.config.linter import is_newer_than_supported

    try:
        return is_newer_than_supported(version("deepspeed"))
    except PackageNotFoundError:
        return False
