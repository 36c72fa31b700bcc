"""`ds-toolkit check-script`: what in a training script will hang, be lost, or differ from rank to rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ds_toolkit.cli.exit_codes import FailOn, end
from ds_toolkit.cli.reports import Format
from ds_toolkit.findings import Finding

if TYPE_CHECKING:
    from ds_toolkit.doctor.scripts.known_config import KnownConfig
    from ds_toolkit.errors import ToolkitError

_STANDARD_INPUT = "-"


def check_script(
    scripts: Annotated[
        list[str],
        typer.Argument(metavar="SCRIPT...", help="Scripts or notebooks to look at; - is standard input."),
    ],
    config: Annotated[
        Path | None,
        typer.Option(help="Their ds_config. [default: what the script says about it, where it does]"),
    ] = None,
    form: Annotated[Format, typer.Option("--format", help="Form of the report.")] = Format.TEXT,
    fail_on: Annotated[
        FailOn, typer.Option(help="The least severity that makes the exit code 1.")
    ] = FailOn.WARNING,
    ignore: Annotated[
        list[str] | None, typer.Option(metavar="CODE", help="Leave a rule out; may be repeated.")
    ] = None,
) -> None:
    """Find what hangs, is lost or differs between ranks in a training script, which is read and never run."""
    from ds_toolkit.cli.catalogue import rule_named
    from ds_toolkit.cli.reports import report
    from ds_toolkit.errors import ToolkitError

    ignored = frozenset(rule_named(word).code for word in ignore or ())
    known = _known(config) if config is not None else None
    findings: list[Finding] = []
    errors: list[ToolkitError] = []
    for name in scripts:
        try:
            findings += [found for found in _checked(name, known) if found.code not in ignored]
        except ToolkitError as error:
            errors.append(error)
    report(findings, errors, len(scripts) - len(errors), form)
    end(findings, errors, fail_on)


def _checked(name: str, known: KnownConfig | None) -> list[Finding]:
    from ds_toolkit.doctor.scripts.checking import check_script as check

    if name == _STANDARD_INPUT:
        return check(_bytes_of(None), "<stdin>", config=known)
    path = Path(name)
    return check(_bytes_of(path), name, folder=path.parent, config=known)


def _bytes_of(path: Path | None) -> bytes:
    from ds_toolkit.doctor.scripts.source import MAX_BYTES
    from ds_toolkit.errors import ToolkitError

    try:
        if path is None:
            return sys.stdin.buffer.read(MAX_BYTES + 1)
        if path.exists() and not path.is_file() and not path.is_dir():
            # A pipe may never end, and a device never stop.
            raise ToolkitError("this is no file", where=path, fix="use - to read standard input")
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except IsADirectoryError as error:
        fix = f"name its scripts, such as {path}/*.py"
        raise ToolkitError("the file cannot be read", where=path, why=error.strerror, fix=fix) from error
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ToolkitError("the file cannot be read", where=path, why=why) from error


def _known(path: Path) -> KnownConfig:
    from ds_toolkit.cli.inputs import Kind, read_input
    from ds_toolkit.config.reader import read_config_text
    from ds_toolkit.doctor.scripts.known_config import known_of

    read = read_input(str(path), Kind.DS_CONFIG)
    return known_of(read_config_text(read.text, read.name).data)
