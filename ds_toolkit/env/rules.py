"""DS7xx: lines of a `.deepspeed_env` that end the launcher, or reach the ranks changed."""

from __future__ import annotations

from collections.abc import Iterator

from ds_toolkit.env.envfile import NAME, SAFE_VALUE, EnvFile
from ds_toolkit.findings import Finding, Severity, Where
from ds_toolkit.rules import Problem, Registry

RULES: Registry[EnvFile] = Registry()


def lint_env(env_file: EnvFile) -> list[Finding]:
    """What the rules find in a `.deepspeed_env`, in the order of its lines."""
    findings = RULES.findings(env_file, lambda number: Where(env_file.file, None, int(number), 1))
    return sorted(findings, key=lambda finding: finding.where.line or 0)


@RULES.rule("DS701", "line-without-equals", Severity.ERROR)
def line_without_equals(env_file: EnvFile) -> Iterator[Problem]:
    """A line holds no `=`: the launcher ends with `ValueError: not enough values to unpack`.

    Blank lines and comments are no exception.

    Bad:
        # how the nodes talk to each other
        NCCL_SOCKET_IFNAME=eth0
    Good:
        NCCL_SOCKET_IFNAME=eth0
    """
    for line in env_file.lines:
        if line.key is None:
            found = f"`{line.text}` holds no `=`" if line.text.strip() else "a blank line"
            yield Problem(str(line.number), f"{found}: the launcher ends here", "remove the line")


@RULES.rule("DS702", "impossible-name", Severity.ERROR)
def impossible_name(env_file: EnvFile) -> Iterator[Problem]:
    """What stands before `=` is not the name of a variable.

    `# NAME=value` is not a comment to the launcher. With pdsh it puts the line into the remote command,
    where the shell takes the rest of the command for a comment: no rank starts, and the exit status is 0.
    `export NAME=value` fails with every launcher but pdsh.

    Bad:
        # NCCL_DEBUG=INFO
    Bad:
        export NCCL_DEBUG=INFO
    Good:
        NCCL_DEBUG=WARN
    """
    for line in env_file.lines:
        if line.key is not None and not NAME.fullmatch(line.key):
            message = f"`{line.key}` is not the name of a variable"
            yield Problem(str(line.number), message, "write NAME=value, or remove the line")


@RULES.rule("DS703", "value-for-a-shell", Severity.WARNING)
def value_for_a_shell(env_file: EnvFile) -> Iterator[Problem]:
    """A value holds quotes, blanks, `$` or another character that does not reach the ranks as it is.

    The launcher puts double quotes around such a value and escapes nothing. Quotes of one's own then end it
    early, `$` is expanded on the remote host, and under MPI and Slurm the quotes become part of the value.

    Bad:
        NCCL_SOCKET_IFNAME="eth0"
    Bad:
        HF_HOME=$HOME/cache
    Good:
        HF_HOME=/data/cache
    """
    for line in env_file.lines:
        if line.key is not None and not SAFE_VALUE.fullmatch(line.value):
            message = f"`{line.value}` reaches the ranks changed"
            yield Problem(str(line.number), message, "write the value itself: no quotes, blanks or $")
