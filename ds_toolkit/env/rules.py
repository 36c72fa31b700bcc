"""DS70x: lines of a `.deepspeed_env` that end the launcher, or reach the ranks changed or not at all."""

from __future__ import annotations

from collections.abc import Iterator

# Importing the other family registers it.
from ds_toolkit.env import variable_rules as variable_rules
from ds_toolkit.env.envfile import NAME, SAFE_VALUE, EnvFile
from ds_toolkit.env.launchers import Launcher
from ds_toolkit.env.secret_names import looks_like_a_secret
from ds_toolkit.env.target import RULES, EnvTarget, at_name, at_value
from ds_toolkit.env.variables import SET_BY_THE_LAUNCHER
from ds_toolkit.findings import Finding, Severity, Where
from ds_toolkit.rules import Problem

_OPTIONS = {
    "MASTER_ADDR": "--master_addr",
    "MASTER_PORT": "--master_port",
    "CUDA_VISIBLE_DEVICES": "--include",
}


def lint_env(
    env_file: EnvFile, launcher: Launcher | None = None, infiniband: bool | None = None
) -> list[Finding]:
    """What the rules find in a `.deepspeed_env`, in the order of its lines.

    Args:
        env_file: its lines.
        launcher: what starts the ranks; None leaves out what depends on it.
        infiniband: whether the hosts have InfiniBand or RoCE devices; None leaves out what depends on it.
    """
    lines = {str(line.number): line for line in env_file.lines}

    def where(pointer: str) -> Where:
        number, _, part = pointer.partition("/")
        line = lines.get(number)
        text = line.text if line else ""
        # Behind the first `=` and blanks stands the value.
        column = len(text) - len(text.partition("=")[2].lstrip()) if part == "value" else 0
        return Where(env_file.file, None, int(number), column + 1)

    findings = RULES.findings(EnvTarget(env_file, launcher, infiniband), where)
    return sorted(findings, key=lambda finding: finding.where.line or 0)


@RULES.rule("DS701", "line-without-equals", Severity.ERROR)
def line_without_equals(target: EnvTarget) -> Iterator[Problem]:
    """A line holds no `=`: the launcher ends with `ValueError: not enough values to unpack`.

    Blank lines and comments are no exception.

    Bad:
        # how the nodes talk to each other
        NCCL_SOCKET_IFNAME=eth0
    Good:
        NCCL_SOCKET_IFNAME=eth0
    """
    for line in target.lines:
        if line.key is None:
            found = f"`{line.text}` holds no `=`" if line.text.strip() else "a blank line"
            yield Problem(at_name(line), f"{found}: the launcher ends here", "remove the line")


@RULES.rule("DS702", "impossible-name", Severity.ERROR)
def impossible_name(target: EnvTarget) -> Iterator[Problem]:
    """What stands before `=` is not the name of a variable.

    `# NAME=value` is not a comment to the launcher. With pdsh it puts the line into the remote command,
    where the shell takes the rest of the command for a comment: no rank starts, and the exit status is 0.
    `export NAME=value` fails with every launcher but pdsh.

    Bad:
        # NCCL_DEBUG=WARN
    Bad:
        export NCCL_DEBUG=WARN
    Good:
        NCCL_DEBUG=WARN
    """
    for line in target.lines:
        if line.key is not None and not NAME.fullmatch(line.key):
            message = f"`{line.key}` is not the name of a variable"
            yield Problem(at_name(line), message, "write NAME=value, or remove the line")


@RULES.rule("DS703", "value-for-a-shell", Severity.WARNING)
def value_for_a_shell(target: EnvTarget) -> Iterator[Problem]:
    """A value holds quotes, blanks, `$` or another character that does not reach the ranks as it is.

    The launcher puts double quotes around such a value and escapes nothing. Quotes of one's own then end it
    early, `$` is expanded on the remote host, and under MPI and Slurm the quotes become part of the value.
    Inside the quotes a `~` stays as it is: no shell puts the home in its place. Under pdsh blanks alone do
    no harm, but a `# note` behind the value becomes part of it.

    Bad:
        NCCL_SOCKET_IFNAME="eth0"
    Bad:
        HF_HOME=$HOME/cache
    Bad (launcher=slurm):
        WANDB_NAME=second try
    Bad (launcher=pdsh):
        HF_HOME=~/cache
    Good:
        HF_HOME=/data/cache
    Good (launcher=pdsh):
        WANDB_NAME=second try
    """
    for line in target.settings:
        if SAFE_VALUE.fullmatch(line.value):
            continue
        shell = target.launcher is not None and target.launcher.has_a_shell
        changed = any(mark in line.value for mark in "\"'$`\\~") or " #" in line.value
        # Quoted by the launcher, a ~ is not expanded on the other side, and nothing else happens to it.
        only_tilde = SAFE_VALUE.fullmatch(line.value.replace("~", ""))
        if only_tilde and (shell or target.launcher is None):
            message = f"`{line.value}` reaches the ranks with the `~` as it is"
            yield Problem(at_value(line), message, "write the whole path")
        elif not shell or changed:
            message = f"`{line.value}` reaches the ranks changed"
            yield Problem(at_value(line), message, "write the value itself: no quotes, blanks or $")


@RULES.rule("DS704", "comma-under-slurm", Severity.ERROR)
def comma_under_slurm(target: EnvTarget) -> Iterator[Problem]:
    """Slurm ends a value at a comma: `--export` takes the rest for another variable.

    That is what `deepspeed --launcher slurm` does with the file. The script that
    `ds-toolkit gen-launch --launcher slurm` writes sets the variables in its own shell, and commas stay.

    Bad (launcher=slurm):
        NCCL_IB_HCA=mlx5_0,mlx5_1
    Good (launcher=slurm):
        NCCL_IB_HCA=mlx5
    Good (launcher=pdsh):
        NCCL_IB_HCA=mlx5_0,mlx5_1
    """
    for line in target.settings:
        if target.launcher is Launcher.SLURM and "," in line.value:
            message = f"Slurm cuts the value off at the comma: `{line.value.partition(',')[0]}`"
            fix = "export it in the batch script, or start with the one that `ds-toolkit gen-launch` writes"
            yield Problem(at_value(line), message, fix)


@RULES.rule("DS705", "file-that-is-not-read", Severity.WARNING)
def file_that_is_not_read(target: EnvTarget) -> Iterator[Problem]:
    """torchrun knows no `.deepspeed_env`: only DeepSpeed's own launcher reads it.

    Bad (launcher=torchrun):
        NCCL_SOCKET_IFNAME=eth0
    Good (launcher=pdsh):
        NCCL_SOCKET_IFNAME=eth0
    """
    if target.launcher is not None and not target.launcher.reads_env_file and target.lines:
        message = f"{target.launcher.value} does not read this file"
        yield Problem("1", message, "export the variables in the script that calls it")


@RULES.rule("DS706", "placeholder-of-pdsh", Severity.ERROR)
def placeholder_of_pdsh(target: EnvTarget) -> Iterator[Problem]:
    """pdsh puts the host's name in place of `%h`, the user's for `%u` and the rank's for `%n`.

    Bad (launcher=pdsh):
        NCCL_DEBUG_FILE=/logs/nccl.%h.log
    Good (launcher=slurm):
        NCCL_DEBUG_FILE=/logs/nccl.%h.log
    """
    for line in target.settings:
        if target.launcher is Launcher.PDSH:
            for placeholder in ("%h", "%u", "%n"):
                if placeholder in line.value:
                    message = f"pdsh puts something else in place of `{placeholder}`"
                    yield Problem(at_value(line), message, "set the variable in the training script")
                    break


@RULES.rule("DS707", "variable-set-twice", Severity.WARNING)
def variable_set_twice(target: EnvTarget) -> Iterator[Problem]:
    """A variable is set on two lines, and the last one counts.

    Bad:
        NCCL_SOCKET_IFNAME=eth0
        NCCL_SOCKET_IFNAME=eth1
    Good:
        NCCL_SOCKET_IFNAME=eth1
    """
    first: dict[str, int] = {}
    for line in target.settings:
        key = line.key or ""
        if key in first:
            message = f"`{key}` is set on line {first[key]} already, and this line wins"
            yield Problem(at_name(line), message, "keep one of them")
        first.setdefault(key, line.number)


@RULES.rule("DS708", "variable-of-the-launcher", Severity.WARNING)
def variable_of_the_launcher(target: EnvTarget) -> Iterator[Problem]:
    """The launcher sets the variable for each rank itself, whatever stands here.

    Bad:
        MASTER_PORT=29501
    Good:
        TORCH_NCCL_ASYNC_ERROR_HANDLING=3
    """
    for line in target.settings:
        if line.key in SET_BY_THE_LAUNCHER:
            option = _OPTIONS.get(line.key or "")
            fix = f"use {option} of the launcher" if option else "remove the line"
            yield Problem(at_name(line), f"the launcher sets `{line.key}` itself", fix)


@RULES.rule("DS709", "secret-in-the-open", Severity.WARNING)
def secret_in_the_open(target: EnvTarget) -> Iterator[Problem]:
    """The launcher logs the remote command with all values in it, and others see it on command lines.

    Names count in small letters too.

    Bad:
        WANDB_API_KEY=0123456789abcdef
    Bad:
        hf_token=0123456789abcdef
    Good:
        WANDB_PROJECT=tiny
    """
    for line in target.settings:
        if line.value and looks_like_a_secret(line.key or ""):
            message = f"`{line.key}` ends up in the launcher's log and on command lines"
            yield Problem(at_name(line), message, "log in on each host, or read it from a file in the script")
