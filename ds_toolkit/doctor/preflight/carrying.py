"""The command that takes the probe to a host, by the same way on which DeepSpeed would start ranks there."""

from __future__ import annotations

import base64
import inspect
import json
import math
import os
import re
import shlex
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from ds_toolkit.doctor.preflight import probe
from ds_toolkit.env.launchers import Launcher

NO_PYTHON = "DS_TOOLKIT_NO_PYTHON"
# A name that begins with a dash would be an option; ^ and [] mean more than one host to pdsh.
HOST_NAME = re.compile(r"[A-Za-z0-9_.@:][A-Za-z0-9_.@:-]*", re.ASCII)
_CONNECT_SECONDS = 15
# The programs that launchers need on the host where they are started.
_TOOLS = {
    Launcher.PDSH: "pdsh",
    Launcher.OPENMPI: "ompi_info",
    Launcher.MPICH: "mpirun",
    Launcher.IMPI: "mpirun",
    Launcher.SLURM: "sinfo",
}


@dataclass(frozen=True)
class Command:
    """What to start here, and what to add to its environment."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]


def missing_tool(launcher: Launcher) -> str | None:
    """The program that DeepSpeed looks for before it starts this launcher, if it is not installed here.

    Source: `backend_exists` in deepspeed/launcher/multinode_runner.py.
    """
    tool = _TOOLS.get(launcher)
    return tool if tool is not None and shutil.which(tool) is None else None


def local_command(python: str, request: Mapping[str, object]) -> Command:
    """Ask this host, without ssh."""
    return Command(("/bin/sh", "-c", _script(python, request)), {})


def remote_command(
    host: str, launcher: Launcher, python: str, request: Mapping[str, object], timeout_seconds: float
) -> Command:
    """Ask another host: through pdsh where that is the launcher and is installed, else by ssh.

    No question is ever put to a person: a host that wants a password fails. pdsh hands no standard input on,
    so the probe travels in the command.
    """
    # csh and fish may be somebody's shell there; /bin/sh reads the rest.
    words = f"exec /bin/sh -c {shlex.quote(_script(python, request))}"
    options = [
        "BatchMode=yes",
        "PasswordAuthentication=no",
        f"ConnectTimeout={math.ceil(min(_CONNECT_SECONDS, timeout_seconds))}",
    ]
    flags = [part for option in options for part in ("-o", option)]
    if launcher is Launcher.PDSH and missing_tool(launcher) is None:
        said = os.environ.get("PDSH_SSH_ARGS_APPEND", "")
        environment = {"PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": " ".join([said, *flags]).strip()}
        limit = str(math.ceil(timeout_seconds))
        # Without -N every line would begin with the host's name. -u ends the ssh that pdsh has started.
        return Command(("pdsh", "-S", "-N", "-u", limit, "-w", host, words), environment)
    return Command(("ssh", *flags, "--", host, words), {})


def _script(python: str, request: Mapping[str, object]) -> str:
    """Starts the probe with the launch's Python, or with any other where that one does not start."""
    source = inspect.getsource(probe) + f"\nmain(json.loads({json.dumps(request)!r}))\n"
    packed = base64.b64encode(zlib.compress(source.encode(), 9)).decode()
    # What lies in the folder where the shell begins is not to be imported.
    # No percent sign: pdsh puts names of hosts in place of %h, %n and %u.
    unpacked = (
        f"import sys;sys.path[:1]=[];import base64,zlib;exec(zlib.decompress(base64.b64decode('{packed}')))"
    )
    return (
        f"P={shlex.quote(python)}; "
        '"$P" -c "" </dev/null >/dev/null 2>&1 || P=python3; '
        f'command -v "$P" >/dev/null 2>&1 || {{ echo {NO_PYTHON}; exit 0; }}; '
        f'exec "$P" -c "{unpacked}" </dev/null'
    )
