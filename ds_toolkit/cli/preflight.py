"""`ds-toolkit preflight`: would this job start on every host, and would it last?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ds_toolkit.cli.exit_codes import FINDINGS
from ds_toolkit.env.launchers import Launcher


def preflight(
    hostfile: Annotated[
        Path | None,
        typer.Option(help="Hosts and slots. [default: /job/hostfile, else this host]", readable=False),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="The ds_config: how many checkpoints are kept.", readable=False)
    ] = None,
    env_file: Annotated[
        Path | None, typer.Option(help="[default: what the launcher would read]", readable=False)
    ] = None,
    checkpoint_dir: Annotated[
        Path | None, typer.Option(help="64 MiB are written there. [default: left out]", readable=False)
    ] = None,
    launcher: Annotated[Launcher, typer.Option(help="What starts the ranks.")] = Launcher.PDSH,
    script: Annotated[
        Path | None, typer.Option(help="The training script. [default: left out]", readable=False)
    ] = None,
    python: Annotated[
        Path | None, typer.Option(help="The interpreter of the launch. [default: this one]", readable=False)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Sizes checkpoints: 7B, or a config.json. [default: those in the directory]"),
    ] = None,
    master_port: Annotated[int, typer.Option(min=1, max=65535, help="TCP port of the first rank.")] = 29500,
    timeout: Annotated[
        float, typer.Option(min=1, max=3600, help="Seconds that a host may take for a question.")
    ] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print findings and hosts as JSON.")] = False,
) -> None:
    """Ask every host at once, before the job does; the exit code is 1 if something is wrong.

    Hosts are reached as DeepSpeed's launcher reaches them, without ever asking for a password.
    """
    from ds_toolkit.cli.preflight_report import print_report, report_as_json
    from ds_toolkit.doctor.preflight.asking import ask_all
    from ds_toolkit.doctor.preflight.judging import judge, worst_first
    from ds_toolkit.doctor.preflight.preparing import Files, prepare
    from ds_toolkit.findings import Severity

    files = Files(hostfile, config, env_file, checkpoint_dir, script, python)
    num_parameters = None if model is None else _num_parameters(model)
    intent, of_files = prepare(files, launcher, master_port, num_parameters)
    fleet = ask_all(intent, timeout)
    findings = worst_first([*judge(fleet), *of_files])
    if as_json:
        from ds_toolkit.cli.output import print_json

        print_json(report_as_json(fleet, findings))
    else:
        print_report(fleet, findings)
    if any(finding.severity is not Severity.INFO for finding in findings):
        raise typer.Exit(FINDINGS)


def _num_parameters(model: str) -> int:
    from ds_toolkit.cli.answers import parse_model

    parsed = parse_model(model)
    return parsed if isinstance(parsed, int) else parsed.num_parameters
