"""DS75x: lines of a hostfile that the launcher refuses, or takes otherwise than they were meant."""

from __future__ import annotations

from collections.abc import Iterator

from ds_toolkit.env.hostfile import Hostfile
from ds_toolkit.findings import Finding, Severity, Where
from ds_toolkit.rules import Problem, Registry

RULES: Registry[Hostfile] = Registry()
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def lint_hostfile(hostfile: Hostfile) -> list[Finding]:
    """What the rules find in a hostfile, in the order of its lines."""
    findings = RULES.findings(hostfile, lambda number: Where(hostfile.file, None, int(number), 1))
    return sorted(findings, key=lambda finding: finding.where.line or 0)


@RULES.rule("DS751", "line-without-slots", Severity.ERROR)
def line_without_slots(hostfile: Hostfile) -> Iterator[Problem]:
    """A line is not `NAME slots=N`, and the launcher stops. No blanks may stand around the `=`.

    Bad:
        worker-0 slots=8
        worker-1
    Bad:
        worker-0 slots = 8
        worker-1 slots=8
    Good:
        # two hosts
        worker-0 slots=8
        worker-1 slots=8
    """
    for line in hostfile.lines:
        if line.host is None:
            yield Problem(str(line.number), f"the launcher cannot read `{line.text}`", "write NAME slots=N")


@RULES.rule("DS752", "host-twice", Severity.ERROR)
def host_twice(hostfile: Hostfile) -> Iterator[Problem]:
    """A host stands on two lines, and the launcher stops.

    Bad:
        worker-0 slots=4
        worker-0 slots=4
        worker-1 slots=4
    Good:
        worker-0 slots=4
        worker-1 slots=4
    """
    seen: set[str] = set()
    for line in hostfile.lines:
        if line.host in seen:
            yield Problem(
                str(line.number), f"`{line.host}` stands twice", "write one line with all its slots"
            )
        if line.host is not None:
            seen.add(line.host)


@RULES.rule("DS753", "no-hosts", Severity.ERROR)
def no_hosts(hostfile: Hostfile) -> Iterator[Problem]:
    """A hostfile names no host, and the launcher stops.

    Bad:
        # worker-0 slots=8
    Good:
        worker-0 slots=8
        worker-1 slots=8
    """
    if not hostfile.lines:
        yield Problem("1", "the hostfile names no host", "write NAME slots=N lines")


@RULES.rule("DS754", "no-slots", Severity.ERROR)
def no_slots(hostfile: Hostfile) -> Iterator[Problem]:
    """A host has no slots: nothing starts there, and where none has any the launcher ends with status 0.

    Bad:
        worker-0 slots=8
        worker-1 slots=0
    Good:
        worker-0 slots=8
        worker-1 slots=8
    """
    for line in hostfile.lines:
        if line.host is not None and line.slots == 0:
            yield Problem(str(line.number), f"`{line.host}` has no slots", "write its number of GPUs")


@RULES.rule("DS755", "single-host", Severity.WARNING)
def single_host(hostfile: Hostfile) -> Iterator[Problem]:
    """A hostfile names one host: the launcher starts the ranks right here, even if that host is another one.

    A `.deepspeed_env` is not read either, unless `--force_multi` is given.

    Bad:
        worker-0 slots=8
    Good:
        worker-0 slots=8
        worker-1 slots=8
    """
    hosts = {line.host for line in hostfile.lines}
    if len(hosts) == 1 and None not in hosts:
        line = hostfile.lines[0]
        message = f"with one host the ranks start here, whether or not this is `{line.host}`"
        yield Problem(str(line.number), message, "give --force_multi to the launcher")


@RULES.rule("DS756", "unequal-slots", Severity.WARNING)
def unequal_slots(hostfile: Hostfile) -> Iterator[Problem]:
    """Hosts have different numbers of slots, on which hpZ and ranks by node cannot rely.

    Bad:
        worker-0 slots=8
        worker-1 slots=4
    Good:
        worker-0 slots=4
        worker-1 slots=4
    """
    slots = [line.slots for line in hostfile.lines if line.host is not None and line.slots]
    usual = max(set(slots), key=slots.count, default=0)
    for line in hostfile.lines:
        if line.host is not None and line.slots not in (0, usual):
            message = f"`{line.host}` has {line.slots} slots, others have {usual}"
            yield Problem(str(line.number), message, "use the same number on every host")


@RULES.rule("DS757", "loopback-among-hosts", Severity.ERROR)
def loopback_among_hosts(hostfile: Hostfile) -> Iterator[Problem]:
    """A host is named by its loopback address, by which the others cannot reach it.

    Bad:
        localhost slots=8
        worker-1 slots=8
    Good:
        worker-0 slots=8
        worker-1 slots=8
    """
    named = [line for line in hostfile.lines if line.host is not None]
    for line in named:
        if (line.host or "").rpartition("@")[2] in _LOOPBACK and len(named) > 1:
            yield Problem(
                str(line.number), f"other hosts cannot reach `{line.host}`", "write its name or address"
            )


@RULES.rule("DS758", "text-behind-slots", Severity.WARNING)
def text_behind_slots(hostfile: Hostfile) -> Iterator[Problem]:
    """The launcher ignores what stands behind the slots.

    Bad:
        worker-0 slots=8 max_slots=16
        worker-1 slots=8
    Good:
        worker-0 slots=8
        worker-1 slots=8
    """
    for line in hostfile.lines:
        if line.rest and not line.rest.startswith("#"):
            yield Problem(str(line.number), f"the launcher ignores `{line.rest}`", "remove it")
