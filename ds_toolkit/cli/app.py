"""The table of commands, and the one place where errors become exit codes."""

from __future__ import annotations

import sys

import typer

from ds_toolkit.cli import consolidate, explain, gen_config, gen_env, gen_launch, lint, plan, schema
from ds_toolkit.errors import ToolkitError

FAILURE = 2

app = typer.Typer(
    name="ds-toolkit",
    help="Configs, checkpoints and failures of DeepSpeed runs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("gen-config")(gen_config.gen_config)
app.command("gen-env")(gen_env.gen_env)
app.command("gen-launch")(gen_launch.gen_launch)
app.add_typer(plan.app, name="plan")
app.command("lint")(lint.lint)
app.command("explain")(explain.explain)
app.command("schema")(schema.schema)
app.command("consolidate")(consolidate.consolidate)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        from ds_toolkit import __version__

        typer.echo(__version__)
        raise typer.Exit


def run() -> None:
    """Run the command that `sys.argv` names and end the process with its exit code."""
    try:
        app()
    except ToolkitError as error:
        from ds_toolkit.cli.output import print_error

        print_error(error, as_json="--json" in sys.argv)
        sys.exit(FAILURE)
    except KeyboardInterrupt:
        sys.exit(130)
