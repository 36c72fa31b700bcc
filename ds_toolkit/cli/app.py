"""The table of commands, and the one place where errors become exit codes."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import typer

from ds_toolkit.cli.exit_codes import FAILURE
from ds_toolkit.errors import ToolkitError

_NAME = "ds-toolkit"
# Typer may keep click under a name of its own; what it hands out is a child of what it raises.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]

# In the order of the help; each is a function, or a table of commands, in a module of this room.
_COMMANDS = {
    "gen-config": ("gen_config", "gen_config"),
    "gen-env": ("gen_env", "gen_env"),
    "gen-launch": ("gen_launch", "gen_launch"),
    "plan": ("plan", "app"),
    "lint": ("lint", "lint"),
    "check-script": ("check_script", "check_script"),
    "preflight": ("preflight", "preflight"),
    "explain": ("explain", "explain"),
    "schema": ("schema", "schema"),
    "inspect": ("inspect", "inspect"),
    "verify": ("verify", "verify"),
    "status": ("status", "status"),
    "diagnose": ("diagnose", "diagnose"),
    "consolidate": ("consolidate", "consolidate"),
    "run": ("run", "run"),
}


def make_app(only: str | None = None) -> typer.Typer:
    """The command with all its commands; `only` leaves the others out, which a run of one has no use for."""
    app = typer.Typer(
        name=_NAME,
        help="Configs, checkpoints and failures of DeepSpeed runs.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        # Else "[default: 1]" in a help text would be taken for markup and vanish.
        rich_markup_mode=None,
    )
    app.callback(invoke_without_command=True)(_root)
    for name, (module, member) in _COMMANDS.items():
        if only in (None, name):
            command = getattr(importlib.import_module(f"ds_toolkit.cli.{module}"), member)
            if isinstance(command, typer.Typer):
                app.add_typer(command, name=name)
            else:
                app.command(name)(command)
    return app


def _root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        from ds_toolkit import __version__

        typer.echo(__version__)
        raise typer.Exit


def run() -> None:
    """Run the command that `sys.argv` names and end the process with its exit code."""
    end_with(_run_command)


def _run_command() -> NoReturn:
    first = sys.argv[1] if len(sys.argv) > 1 else None
    app = make_app(first if first in _COMMANDS else None)
    # What a wrong call is told by itself is text for people.
    as_json = _wants_json(sys.argv[1:])
    sys.exit((app(prog_name=_NAME, standalone_mode=False) or 0) if as_json else app())


def end_with(work: Callable[[], None]) -> None:
    """Do what a process is for; if that fails, end it with an error and its exit code."""
    stopped_by: list[int] = []

    def stop(number: int, _: object) -> NoReturn:
        # As an exception, so that what is half written is removed on the way out.
        stopped_by.append(number)
        sys.exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    as_json = _wants_json(sys.argv[1:])
    try:
        work()
    except BaseException as error:
        if stopped_by:
            # Cleaning up may have failed on the way, as torch's does in the middle of a file.
            sys.exit(128 + stopped_by[0])
        if isinstance(error, ToolkitError):
            _fail(error, as_json=as_json)
        if isinstance(error, OSError):
            # Permissions and full disks at places that no command has a word of its own for.
            _fail(ToolkitError(error.strerror or str(error), where=error.filename), as_json=as_json)
        if isinstance(error, _UsageError):
            _fail(_as_toolkit_error(error), as_json=as_json)
        if isinstance(error, typer.Abort):
            sys.exit(1)
        raise


def _wants_json(arguments: list[str]) -> bool:
    """Whether a program will read the answer; asked before the arguments are known to be right."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    pairs = itertools.pairwise(options)
    return "--json" in options or "--format=json" in options or ("--format", "json") in pairs


def _as_toolkit_error(error: Any) -> ToolkitError:
    """A wrong call of a command, as every other failure is told."""
    what = " ".join(error.format_message().split()).removesuffix(".").replace("Value error, ", "")
    # An option without its value is noticed before it is known whose option it is.
    called = " ".join([_NAME, *(name for name in sys.argv[1:2] if name in _COMMANDS)])
    command = error.ctx.command_path if error.ctx is not None else called
    return ToolkitError(what, where=command, fix=f"see `{command} --help`")


def _fail(error: ToolkitError, *, as_json: bool) -> NoReturn:
    # Rarely needed, and it loads rich.
    from ds_toolkit.cli.output import print_error

    # Standard output may be the very thing that failed; standard error has the word then.
    with contextlib.suppress(OSError):
        print_error(error, as_json=as_json)
    sys.exit(FAILURE)
