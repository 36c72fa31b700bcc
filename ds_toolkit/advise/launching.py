"""The script that starts a run, for each launcher, and the hostfile that goes with it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ds_toolkit.config.consumers import Consumer
from ds_toolkit.env.envfile import DEFAULT_NAME
from ds_toolkit.env.hostfile import parse_hostfile_text
from ds_toolkit.env.launchers import Launcher
from ds_toolkit.errors import ToolkitError
from ds_toolkit.rendering import render

# From the notice to the end: DeepSpeed's and torch's launchers give survivors 30 seconds.
NOTICE_SECONDS = 120
LAUNCHERS = (Launcher.PDSH, Launcher.SLURM, Launcher.TORCHRUN, Launcher.OPENMPI)
# A name that begins with a dash would be an option of ssh and pdsh.
_HOST = re.compile(r"[A-Za-z0-9_.@:][A-Za-z0-9_.@:-]*", re.ASCII)
# DeepSpeed's PDSHRunner joins these with blanks and quotes none of them (deepspeed/launcher/
# multinode_runner.py); it takes %n for the number of the host, hence no percent sign.
_UNQUOTED = re.compile(r"[\w@+=:,./-]+", re.ASCII)
# What each consumer's script takes; Accelerate and Lightning get the file from their own settings.
_ARGUMENTS = {Consumer.NATIVE: "--deepspeed --deepspeed_config", Consumer.HF: "--deepspeed"}
_LINE_BREAK = re.compile(r"[\r\n\0]")


@dataclass(frozen=True)
class Launch:
    """What is to be started.

    Attributes:
        launcher: one of LAUNCHERS.
        num_nodes: hosts.
        gpus_per_node: ranks a host.
        python: the interpreter, by its absolute path: remote shells have other PATHs.
        folder: where the script lies on every host.
        script: the training script, relative to it.
        config: the ds_config, relative to it.
        env_file: the environment file, relative to it.
        hostfile: likewise, for launchers that read one.
        master_port: TCP port of the first rank.
        consumer: whose arguments the script takes; `HfArgumentParser` refuses what DeepSpeed's parser takes.
        master_addr: its address; None lets DeepSpeed ask the first host for one.
    """

    launcher: Launcher
    num_nodes: int
    gpus_per_node: int
    python: str
    folder: str
    script: str = "train.py"
    config: str = "ds_config.json"
    env_file: str = DEFAULT_NAME
    hostfile: str = "hostfile"
    master_port: int = 29500
    master_addr: str | None = None
    consumer: Consumer = Consumer.NATIVE

    def __post_init__(self) -> None:
        if self.launcher not in LAUNCHERS:
            names = ", ".join(launcher.value for launcher in LAUNCHERS)
            raise ToolkitError(f"there is no script for {self.launcher.value}", fix=f"one of {names}")
        if self.consumer not in _ARGUMENTS:
            raise ToolkitError(
                f"there is no script for {self.consumer.label}",
                why="it hands the configuration to DeepSpeed by itself, not by arguments of the script",
                fix="name the file in its own settings; --for takes native or hf",
            )
        for value, noun in (
            (self.num_nodes, "number of nodes"),
            (self.gpus_per_node, "number of GPUs a node"),
        ):
            if value < 1:
                raise ToolkitError(f"the {noun} is {value}", fix="give 1 or more")
        if self.master_addr is not None and not _HOST.fullmatch(self.master_addr):
            raise ToolkitError(f"`{self.master_addr}` is not the address of a host")
        if not 0 < self.master_port < 65_536:
            raise ToolkitError(f"{self.master_port} is not a port")
        for path in (self.python, self.folder):
            if not Path(path).is_absolute():
                raise ToolkitError(
                    "the path is not absolute", where=path, why="other hosts have other folders"
                )
        # A line break would end a comment of the script and begin a command.
        for text in (self.python, self.folder, self.script, self.config, self.env_file, self.hostfile):
            if _LINE_BREAK.search(text):
                raise ToolkitError("a path holds a line break", where=repr(text))
        if self.launcher is Launcher.PDSH:
            for text in (self.python, self.folder, self.script, self.config):
                if not _UNQUOTED.fullmatch(text):
                    raise ToolkitError(
                        "pdsh would not carry the path as it is",
                        where=text,
                        why="DeepSpeed puts it into the command of a remote shell without quoting it",
                        fix="use letters, digits and @ + = : , . / _ - only, or another --launcher",
                    )


def launch_script(launch: Launch) -> str:
    """A bash script that starts the run on all hosts; clean under shellcheck."""
    # `.` looks a name without a slash up on PATH.
    sourced = launch.env_file if "/" in launch.env_file else f"./{launch.env_file}"
    paths = (launch.python, launch.folder, launch.script, launch.config, launch.env_file, launch.hostfile)
    values = {
        **vars(launch),
        "sourced_env_file": sourced,
        "notice_seconds": NOTICE_SECONDS,
        "arguments": _ARGUMENTS[launch.consumer],
        "has_dollars": any(character in path for path in paths for character in "$`"),
    }
    return render(f"launch/{launch.launcher.value}.sh.j2", **values)


def hostfile_text(hosts: list[str], gpus_per_node: int) -> str:
    """A hostfile of equal hosts.

    Raises:
        ToolkitError: no host, one twice, or a name with a blank in it or a dash before it.
    """
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise ToolkitError(f"`{host}` is not the name of a host")
    text = render("launch/hostfile.j2", hosts=hosts, gpus_per_node=gpus_per_node)
    parse_hostfile_text(text).slots  # noqa: B018  (refuses what the launcher would refuse)
    return text
