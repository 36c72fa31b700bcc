"""`ds-toolkit gen-launch`: the script that starts a run, and its hostfile."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ds_toolkit.config.consumers import Consumer


class LaunchChoice(str, Enum):
    """The launchers that there are scripts for."""

    PDSH = "pdsh"
    SLURM = "slurm"
    TORCHRUN = "torchrun"
    OPENMPI = "openmpi"


def gen_launch(
    launcher: Annotated[LaunchChoice, typer.Option(help="What starts the ranks.")],
    num_nodes: Annotated[int, typer.Option(help="Hosts.")],
    gpus_per_node: Annotated[int, typer.Option(help="GPUs a host.")],
    hosts: Annotated[
        str | None, typer.Option(help="Names of the hosts, with commas: writes the hostfile too.")
    ] = None,
    script: Annotated[str, typer.Option(help="Training script.")] = "train.py",
    config: Annotated[str, typer.Option(help="ds_config.")] = "ds_config.json",
    env_file: Annotated[str, typer.Option(help="Environment file.")] = ".deepspeed_env",
    hostfile: Annotated[str, typer.Option(help="Hostfile, for pdsh and openmpi.")] = "hostfile",
    python: Annotated[str, typer.Option(help="Interpreter on every host.")] = sys.executable,
    master_port: Annotated[int, typer.Option(help="TCP port of the first rank.")] = 29500,
    master_addr: Annotated[
        str | None, typer.Option(help="Address of the first host. [default: DeepSpeed asks it]")
    ] = None,
    consumer: Annotated[
        Consumer, typer.Option("--for", help="Whose arguments the script takes: native or hf.")
    ] = Consumer.NATIVE,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write. [default: standard output]")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
) -> None:
    """Write the script that starts a run, with room for last words, and the hostfile that it needs."""
    from ds_toolkit.advise.launching import Launch, hostfile_text, launch_script
    from ds_toolkit.cli.gen_config import refuse_output
    from ds_toolkit.cli.output import console
    from ds_toolkit.env.launchers import Launcher
    from ds_toolkit.errors import ToolkitError
    from ds_toolkit.files import write_output

    folder = (output.parent if output else Path()).resolve()
    launch = Launch(
        launcher=Launcher(launcher.value),
        num_nodes=num_nodes,
        gpus_per_node=gpus_per_node,
        python=python,
        folder=str(folder),
        script=script,
        config=config,
        env_file=env_file,
        hostfile=hostfile,
        master_port=master_port,
        master_addr=master_addr,
        consumer=consumer,
    )
    text = launch_script(launch)
    files: list[tuple[Path, str]] = []
    if hosts is not None:
        names = [name.strip() for name in hosts.split(",")]
        if len(names) != num_nodes:
            raise ToolkitError(f"--hosts names {len(names)} hosts, --num-nodes says {num_nodes}")
        files.append((folder / hostfile, hostfile_text(names, gpus_per_node)))
    if output is not None:
        files.append((output, text))
    for path, _ in files:
        refuse_output(path, force=force)
    for path, content in files:
        write_output(path, content.encode(), executable=path == output)
    if output is None:
        sys.stdout.write(text)
    else:
        for path, _ in files:
            console().print(f"written: {path}", markup=False)
