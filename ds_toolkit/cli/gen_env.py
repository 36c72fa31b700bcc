"""`ds-toolkit gen-env`: a `.deepspeed_env` for this fabric, explained on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ds_toolkit.env.launchers import Launcher


def gen_env(
    hostfile: Annotated[Path | None, typer.Option(help="Hosts that the run is for.")] = None,
    launcher: Annotated[Launcher, typer.Option(help="What carries the file to the ranks.")] = Launcher.PDSH,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path(".deepspeed_env"),
    debug: Annotated[bool, typer.Option("--debug", help="Make NCCL and torch say what they do.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the file, write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Write NCCL and torch settings for this fabric into an environment file, and say why.

    Lines of one's own in an existing file stay as they are, and win.
    """
    from ds_toolkit.advise.environment import advise_environment
    from ds_toolkit.cli.output import console, print_json
    from ds_toolkit.env.envfile import read_env_file
    from ds_toolkit.env.fabric import detect_host
    from ds_toolkit.env.hostfile import read_hostfile
    from ds_toolkit.files import write_output

    hosts = [] if hostfile is None else list(read_hostfile(hostfile).slots)
    existing = read_env_file(output) if output.exists() else None
    advice = advise_environment(detect_host(), hosts=hosts, launcher=launcher, debug=debug, existing=existing)
    if not dry_run:
        write_output(output, advice.text.encode())
    if as_json:
        settings = {setting.name: {"value": setting.value, "why": setting.why} for setting in advice.settings}
        file = None if dry_run else str(output)
        print_json(
            {
                "file": file,
                "settings": settings,
                "kept": advice.kept,
                "left_out": advice.left_out,
                "notices": advice.notices,
            }
        )
        return
    out = console()
    for setting in advice.settings:
        out.print(f"- {setting.name}={setting.value}: {setting.why}", markup=False)
    for name in advice.kept:
        out.print(f"- {name}: kept as it was", markup=False)
    for reason in advice.left_out:
        out.print(f"- not set: {reason}", markup=False)
    for notice in advice.notices:
        out.print(f"- note: {notice}", markup=False)
    if not launcher.reads_env_file:
        out.print(f"- {launcher.value} does not read the file: gen-launch's script sets it", markup=False)
    out.print(advice.text if dry_run else f"written: {output}", markup=False, end="" if dry_run else "\n")
