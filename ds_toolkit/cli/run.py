"""`ds-toolkit run`: a job that is started again until it is done."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ds_toolkit.integrations.supervising import DEFAULT_MAX_RESTARTS

if TYPE_CHECKING:
    from ds_toolkit.integrations.supervising import Supervised


def run(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND...", help="What starts the job, and its arguments.")
    ],
    max_restarts: Annotated[
        int, typer.Option(min=0, metavar="N", help="How often it is started again at most.")
    ] = DEFAULT_MAX_RESTARTS,
    checkpoint_dir: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="D",
            help="Where checkpoints show how far it has come; repeatable. Those of guards are found anyway.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a summary as JSON; the job's own output goes to stderr.")
    ] = False,
) -> None:
    """Start a job, wait for its guardian, and start it again after a failure. Write `--` before the command.

    It stops when the job ends with 0, when the same step fails twice in the same way, after SIGTERM or SIGINT
    (passed on to the job), and when there are no restarts left. The exit code is that of the job. It may be
    process 1 of a container.
    """
    from ds_toolkit.integrations.supervising import Supervisor

    supervised = Supervisor(
        command,
        max_restarts=max_restarts,
        directories=checkpoint_dir or (),
        stdout=sys.stderr.fileno() if as_json else None,
        say=_say,
    ).run()
    if as_json:
        from ds_toolkit.cli.output import print_json

        print_json(_as_json(supervised))
    raise typer.Exit(supervised.exit_code)


def _say(line: str) -> None:
    print(f"[ds-toolkit run] {line}", file=sys.stderr, flush=True)


def _as_json(supervised: Supervised) -> dict[str, object]:
    last = len(supervised.attempts) - 1
    attempts = [
        {
            "exit_code": attempt.exit_code,
            "seconds": round(attempt.seconds, 3),
            "step": attempt.headway.step,
            "failed_at_step": attempt.headway.failed_at,
            "restarted": number < last,
        }
        for number, attempt in enumerate(supervised.attempts)
    ]
    return {"exit_code": supervised.exit_code, "why": supervised.why, "attempts": attempts}
