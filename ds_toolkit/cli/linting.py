"""One file for the linter at a time: which rules look at it, and what is mended in it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ds_toolkit.cli.inputs import Input, Kind
from ds_toolkit.config.consumers import Consumer
from ds_toolkit.env.launchers import Launcher
from ds_toolkit.findings import Finding, Where

if TYPE_CHECKING:
    from ds_toolkit.advise.surroundings import Surroundings
    from ds_toolkit.config.reader import Document
    from ds_toolkit.env.envfile import EnvFile

_MAX_ROUNDS = 10
# What is asked of the GPUs' names; asking the driver takes a second.
_ABOUT_PEER_ACCESS = {"NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"}


@dataclass(frozen=True)
class Options:
    """What was asked for besides the files.

    Attributes:
        world_size: all ranks; None leaves out what depends on it.
        surroundings: model and machine; None where nothing was said about them.
        changes_to_stderr: whether the changes of `--fix` would spoil the report on standard output.
    """

    consumer: Consumer
    world_size: int | None
    launcher: Launcher | None
    ignored: frozenset[str]
    fix: bool
    changes_to_stderr: bool
    surroundings: Surroundings | None = None


def lint_one(read: Input, options: Options) -> list[Finding]:
    """What is wrong with a text; with `fix`, what is left after its file was mended.

    Raises:
        ToolkitError: it cannot be read as what it is, or the mended file cannot be written.
    """
    if read.kind is Kind.ENV:
        found = _lint_env(read, options)
    elif read.kind is Kind.HOSTFILE:
        from ds_toolkit.env.hostfile import parse_hostfile_text
        from ds_toolkit.env.hostfile_rules import lint_hostfile

        found = lint_hostfile(parse_hostfile_text(read.text, read.name))
    else:
        from ds_toolkit.config.reader import read_config_text

        document = read_config_text(read.text, read.name)
        found = _lint_config(document, options)
        if options.fix:
            document = _mended(document, found, read.path, options)
            found = _lint_config(document, options)
        found += _around_config(document, options)
        found.sort(key=lambda finding: (finding.where.line or 0, finding.where.column or 0))
    return [finding for finding in found if finding.code not in options.ignored]


def _lint_env(read: Input, options: Options) -> list[Finding]:
    from ds_toolkit.env.envfile import parse_env_text
    from ds_toolkit.env.fabric import has_infiniband
    from ds_toolkit.env.rules import lint_env

    env_file = parse_env_text(read.text, read.name)
    # What was said about the network beats what this host has.
    said = options.surroundings is not None and options.surroundings.network is not None
    found = lint_env(env_file, options.launcher, None if said else has_infiniband())
    found += _around_variables(env_file, options)
    return sorted(found, key=lambda finding: finding.where.line or 0)


def _around_variables(env_file: EnvFile, options: Options) -> list[Finding]:
    lines = {line.key: line for line in env_file.lines if line.key is not None}
    asks_for_gpus = not _ABOUT_PEER_ACCESS.isdisjoint(lines)
    if options.surroundings is None and not asks_for_gpus:
        return []
    from ds_toolkit.advise.rules import lint_plan
    from ds_toolkit.advise.surroundings import Surroundings
    from ds_toolkit.env.fabric import gpus

    names = tuple(gpu.name for gpu in gpus()) if asks_for_gpus else ()
    # Lines that end the launcher have findings of their own.
    variables = {key: line.value for key, line in lines.items()}
    plan = (options.surroundings or Surroundings()).around_variables(variables, names)
    return lint_plan(plan, lambda name: Where(env_file.file, None, lines[name].number, 1))


def _around_config(document: Document, options: Options) -> list[Finding]:
    if options.surroundings is None:
        return []
    from ds_toolkit.advise.rules import lint_plan

    return lint_plan(options.surroundings.around_config(document.data), document.where)


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
    _show_changes(document.text, fixed.text, str(path), to_stderr=options.changes_to_stderr)
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
