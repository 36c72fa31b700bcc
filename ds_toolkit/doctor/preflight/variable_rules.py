"""DS1123 and DS1124: the variables that will really reach the ranks, and what they find there already."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ds_toolkit.doctor.preflight.answers import Answer
from ds_toolkit.doctor.preflight.fleet import ALL_HOSTS, RULES, Fleet, Intent
from ds_toolkit.env.envfile import NAME, SAFE_VALUE
from ds_toolkit.env.launchers import Launcher
from ds_toolkit.env.secret_names import looks_like_a_secret
from ds_toolkit.findings import Severity
from ds_toolkit.rules import Problem

MASKED = "********"
ONE_HOST = "the launcher reads the file for several hosts only"
# DeepSpeed hands these on from the shell of the launch: EXPORT_ENVS in deepspeed/launcher/runner.py, and NCCL
# where the accelerator is CUDA.
_HANDED_ON = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")
# Of the launchers that start processes with nothing else from that shell.
_HAND_ON_FEW = (Launcher.PDSH, Launcher.OPENMPI)

# Between double quotes; a backslash stays before anything but another one, a quote, a dollar and a backtick.
_CHANGED_BY_A_SHELL = re.compile(r"""["$`]|\\(\\|$)""")


@dataclass(frozen=True)
class Carried:
    """A line of the environment file on its way to the ranks.

    Attributes:
        name: of the variable.
        value: what arrives; None where nothing does. Secrets are masked.
        why: what is done to it on the way; None where it arrives as it is.
    """

    name: str
    value: str | None
    why: str | None


def carried(intent: Intent) -> list[Carried]:
    """What becomes of every variable of the environment file with this launcher.

    Source: deepspeed/launcher/runner.py (`main`) and multinode_runner.py (`add_export`, `get_cmd`).
    """
    nobody_reads = _why_nobody_reads(intent)
    found = []
    for name, value in intent.settings.items():
        arriving, why = (None, nobody_reads) if nobody_reads else _on_the_way(intent.launcher, name, value)
        shown = MASKED if arriving and looks_like_a_secret(name) else arriving
        found.append(Carried(name, shown, why))
    return found


def _why_nobody_reads(intent: Intent) -> str | None:
    lines = intent.env_file.lines if intent.env_file else ()
    if any(line.key is None for line in lines):
        return "a line without `=` ends the launcher"
    if intent.launcher.has_a_shell and any((line.key or "").startswith("#") for line in lines):
        return "a line with `#` in front comments the launch away: nothing runs, with exit code 0"
    if not intent.launcher.reads_env_file:
        return f"{intent.launcher.value} does not read the file; the script of `ds-toolkit gen-launch` does"
    if len(intent.slots) < 2:
        return ONE_HOST
    return None


def _on_the_way(launcher: Launcher, name: str, value: str) -> tuple[str | None, str | None]:
    if not NAME.fullmatch(name):
        return None, "this is not the name of a variable"
    if SAFE_VALUE.fullmatch(value):
        if launcher is Launcher.SLURM and "," in value:
            return value.partition(",")[0], "Slurm ends it at the comma"
        return value, None
    if not launcher.has_a_shell:
        return f'"{value}"', "the launcher's quotes become part of it"
    if _CHANGED_BY_A_SHELL.search(value):
        return None, "the remote shell changes it"
    return value, None


@RULES.rule("DS1123", "variables-left-behind", Severity.WARNING)
def variables_left_behind(fleet: Fleet) -> Iterator[Problem]:
    """The launch is one on a single host, for which the launcher does not read the environment file.

    What else happens to variables on their way is found by the rules of the environment file (DS701 to
    DS709), which preflight applies too.

    Bad:
        a `.deepspeed_env`, and a hostfile with one host
    Good:
        the same with two hosts, or with one and `--force_multi`
    """
    names = [variable.name for variable in carried(fleet.intent) if variable.why == ONE_HOST]
    if names:
        message = f"{', '.join(names)}: {ONE_HOST}"
        yield Problem(ALL_HOSTS, message, "give --force_multi to the launcher, or export them in this shell")


@RULES.rule("DS1126", "shell-variables-stay-here", Severity.INFO)
def shell_variables_stay_here(fleet: Fleet) -> Iterator[Problem]:
    """A variable is set in this shell, and the launcher does not hand it on to the ranks of several hosts.

    pdsh and Open MPI get NCCL*, PYTHON*, UCX*, MV2* and MLFLOW* from DeepSpeed's launcher, and the lines of
    the environment file; everything else stays in this shell.

    Bad:
        export TORCH_NCCL_ASYNC_ERROR_HANDLING=1; deepspeed --hostfile hostfile train.py
    Good:
        TORCH_NCCL_ASYNC_ERROR_HANDLING=1 in the environment file
    """
    intent = fleet.intent
    if intent.launcher not in _HAND_ON_FEW or len(intent.slots) < 2:
        return
    staying = [
        name
        for name in intent.shell_variables
        if name not in intent.settings and not name.startswith(_HANDED_ON)
    ]
    if staying:
        message = f"{', '.join(sorted(staying))}: set in this shell, and not handed on"
        yield Problem(ALL_HOSTS, message, "write them into the environment file if the ranks need them")


@RULES.rule("DS1124", "variables-differ", Severity.WARNING)
def variables_differ(fleet: Fleet) -> Iterator[Problem]:
    """A shell on some hosts sets a variable of NCCL, torch, CUDA or DeepSpeed that others set otherwise.

    Start-up files and /etc/environment of a host reach its ranks too, unless the environment file says
    something else.

    Bad:
        NCCL_IB_DISABLE=1 in worker-1's /etc/environment alone
    Good:
        the environment file sets it for all
    """
    arriving = {variable.name for variable in carried(fleet.intent) if variable.value is not None}
    names = {name for _, answer in fleet.answers for name in answer.variables}
    for name in sorted(names - arriving):

        def value(answer: Answer, name: str = name) -> str | None:
            return answer.variables.get(name)

        for host, found, usual in fleet.odd_ones(value):
            here, there = (_shown(name, told) for told in (found, usual))
            fix = "say it in the environment file for all hosts, or remove it from that host's start-up files"
            yield Problem(host.name, f"{name} is {here} here, {there} on others", fix)


def _shown(name: str, value: object) -> str:
    if value is None:
        return "not set"
    return MASKED if looks_like_a_secret(name) else f"`{value}`"
