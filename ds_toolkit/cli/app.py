"""The table of commands, and the one place where errors become exit codes."""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
from typing import NoReturn

import typer

from ds_toolkit.errors import ToolkitError

FAILURE = 2

# In the order of the help; each is a function, or a table of commands, in a module of this room.
_COMMANDS = {
    "gen-config": ("gen_config", "gen_config"),
    "gen-env": ("gen_env", "gen_env"),
    "gen-launch": ("gen_launch", "gen_launch"),
    "plan": ("plan", "app"),
    "lint": ("lint", "lint"),
    "explain": ("explain", "explain"),
    "schema": ("schema", "schema"),
    "consolidate": ("consolidate", "consolidate"),
}


def make_app(only: str | None = None) -> typer.Typer:
    """The command with all its commands; `only` leaves the others out, which a run of one has no use for."""
    app = typer.Typer(
        name="ds-toolkit",
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
    stopped_by: list[int] = []

    def stop(number: int, _: object) -> NoReturn:
        # As an exception, so that what is half written is removed on the way out.
        stopped_by.append(number)
        sys.exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        first = sys.argv[1] if len(sys.argv) > 1 else None
        make_app(first if first in _COMMANDS else None)()
    except BaseException as error:
        if stopped_by:
            # Cleaning up may have failed on the way, as torch's does in the middle of a file.
            sys.exit(128 + stopped_by[0])
        if isinstance(error, ToolkitError):
            _fail(error)
        if isinstance(error, OSError):
            # Permissions and full disks at places that no command has a word of its own for.
            _fail(ToolkitError(error.strerror or str(error), where=error.filename))
        raise


def _fail(error: ToolkitError) -> NoReturn:
    # Rarely needed, and it loads rich.
    from ds_toolkit.cli.output import print_error

    # Standard output may be the very thing that failed; standard error has the word then.
    with contextlib.suppress(OSError):
        print_error(error, as_json="--json" in sys.argv)
    sys.exit(FAILURE)
