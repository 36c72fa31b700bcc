"""DS72x: variables that are misspelt, old, wrong for these hosts, or left over from debugging."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from ds_toolkit.env.interfaces import is_tunnel, is_virtual
from ds_toolkit.env.target import RULES, EnvTarget, at_name, at_value
from ds_toolkit.env.variables import DEBUGGING, REPLACED, VARIABLES
from ds_toolkit.findings import Severity
from ds_toolkit.rules import Problem

_CHECKED_PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "TORCH_DISTRIBUTED_")


@RULES.rule("DS721", "misspelt-variable", Severity.WARNING)
def misspelt_variable(target: EnvTarget) -> Iterator[Problem]:
    """A name is a small edit away from a variable of NCCL or torch, and unknown variables do nothing.

    Bad:
        NCCL_SOCKET_IFNAMES=eth0
    Good:
        NCCL_SOCKET_IFNAME=eth0
    """
    for line in target.settings:
        key = line.key or ""
        if key in VARIABLES or key in REPLACED or not key.startswith(_CHECKED_PREFIXES):
            continue
        near = difflib.get_close_matches(key, VARIABLES, n=1, cutoff=0.88)
        if near:
            yield Problem(at_name(line), f"there is no variable `{key}`", f"did you mean `{near[0]}`?")


@RULES.rule("DS722", "old-variable", Severity.WARNING)
def old_variable(target: EnvTarget) -> Iterator[Problem]:
    """A variable has a new name; the old one is deprecated, or not read any more.

    Older versions know the old name only: the fix says since when the new one is read. A file that sets both
    is a matter of DS729.

    Bad:
        NCCL_ASYNC_ERROR_HANDLING=1
    Good:
        TORCH_NCCL_ASYNC_ERROR_HANDLING=1
    """
    names = {line.key for line in target.settings}
    for line in target.settings:
        new = REPLACED.get(line.key or "")
        if new and new.name not in names:
            since = f", which {new.since} and newer read" if new.since else ""
            yield Problem(at_name(line), f"`{line.key}` is an old name", f"write {new.name}{since}")


@RULES.rule("DS723", "value-not-understood", Severity.ERROR)
def value_not_understood(target: EnvTarget) -> Iterator[Problem]:
    """A variable holds what NCCL or torch does not understand, and the default holds instead.

    NCCL wants numbers for switches: `true` is none.

    Bad:
        NCCL_IB_DISABLE=true
    Bad:
        NCCL_DEBUG=WARNING
    Good:
        NCCL_IB_DISABLE=1
    """
    for line in target.settings:
        variable = VARIABLES.get(line.key or "")
        if variable is not None and not variable.takes(line.value):
            message = f"`{line.key}` cannot be `{line.value}`"
            yield Problem(at_value(line), message, f"expected: {variable.expected}")


@RULES.rule("DS724", "debugging-left-on", Severity.WARNING)
def debugging_left_on(target: EnvTarget) -> Iterator[Problem]:
    """A variable for debugging is on: it slows every step, or floods the logs of every rank.

    Bad:
        NCCL_DEBUG=INFO
    Bad:
        CUDA_LAUNCH_BLOCKING=1
    Good:
        NCCL_DEBUG=WARN
    """
    for line in target.settings:
        pattern = DEBUGGING.get(line.key or "")
        if pattern and re.fullmatch(pattern, line.value, re.IGNORECASE):
            fix = "write WARN" if line.key == "NCCL_DEBUG" else "remove the line"
            yield Problem(at_value(line), f"`{line.key}={line.value}` is for debugging", fix)


@RULES.rule("DS725", "infiniband-that-is-not-there", Severity.WARNING)
def infiniband_that_is_not_there(target: EnvTarget) -> Iterator[Problem]:
    """InfiniBand is asked for on hosts without an InfiniBand or RoCE device.

    Bad (infiniband=no):
        NCCL_IB_DISABLE=0
    Bad (infiniband=no):
        NCCL_IB_HCA=mlx5_0
    Good (infiniband=no):
        NCCL_IB_DISABLE=1
    Good (infiniband=yes):
        NCCL_IB_HCA=mlx5_0
    """
    if target.infiniband is not False:
        return
    for line in target.settings:
        asked = (line.key, line.value.lower()) in (("NCCL_IB_DISABLE", "0"), ("NCCL_NET", "ib"))
        if asked or (line.key == "NCCL_IB_HCA" and line.value):
            message = f"`{line.key}={line.value}` asks for InfiniBand, and there is none here"
            yield Problem(at_name(line), message, "write NCCL_IB_DISABLE=1")


@RULES.rule("DS726", "infiniband-left-unused", Severity.WARNING)
def infiniband_left_unused(target: EnvTarget) -> Iterator[Problem]:
    """`NCCL_IB_DISABLE=1` on hosts with InfiniBand sends all traffic over slower sockets.

    Bad (infiniband=yes):
        NCCL_IB_DISABLE=1
    Good (infiniband=yes):
        NCCL_IB_DISABLE=0
    """
    for line in target.settings:
        if target.infiniband and line.key == "NCCL_IB_DISABLE" and line.value == "1":
            yield Problem(at_name(line), "InfiniBand is there and left unused", "remove the line")


@RULES.rule("DS727", "interface-that-leads-nowhere", Severity.ERROR)
def interface_that_leads_nowhere(target: EnvTarget) -> Iterator[Problem]:
    """The interface leads to no other host: loopback, or a bridge of containers or virtual machines.

    A tunnel leads there by a detour, and is a warning. A leading `^` leaves all interfaces of the list out,
    and is fine.

    Bad:
        NCCL_SOCKET_IFNAME=docker0
    Bad:
        GLOO_SOCKET_IFNAME=lo
    Bad:
        NCCL_SOCKET_IFNAME=wg0
    Good:
        NCCL_SOCKET_IFNAME=eth0
    Good (launcher=pdsh):
        NCCL_SOCKET_IFNAME=^lo,docker0
    """
    for line in target.settings:
        if line.key in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") and not line.value.startswith("^"):
            # A leading `=` asks NCCL for exactly these names, not for all that begin like them.
            for name in line.value.removeprefix("=").split(","):
                if is_virtual(name):
                    tunnel = is_tunnel(name)
                    message = f"`{name}` " + ("is a tunnel" if tunnel else "leads to no other host")
                    fix = "name the interface that routes to the other hosts"
                    severity = Severity.WARNING if tunnel else None
                    yield Problem(at_value(line), message, fix, severity=severity)


@RULES.rule("DS728", "errors-that-hang", Severity.WARNING)
def errors_that_hang(target: EnvTarget) -> Iterator[Problem]:
    """`TORCH_NCCL_ASYNC_ERROR_HANDLING=0` lets ranks wait for ever for one that is gone.

    Bad:
        TORCH_NCCL_ASYNC_ERROR_HANDLING=0
    Good:
        TORCH_NCCL_ASYNC_ERROR_HANDLING=3
    """
    for line in target.settings:
        if line.key == "TORCH_NCCL_ASYNC_ERROR_HANDLING" and line.value == "0":
            message = "a failed collective would leave the other ranks waiting"
            yield Problem(at_value(line), message, "write 3: ranks end, and the launcher can act")


@RULES.rule("DS729", "old-and-new-name", Severity.WARNING)
def old_and_new_name(target: EnvTarget) -> Iterator[Problem]:
    """A variable is set under its old name and under its new one, to different values: only one counts.

    For most the new name wins. Equal values do no harm, and versions that know only one of the names may
    need both: they are a note.

    Bad:
        NCCL_ASYNC_ERROR_HANDLING=1
        TORCH_NCCL_ASYNC_ERROR_HANDLING=3
    Good:
        TORCH_NCCL_ASYNC_ERROR_HANDLING=3
    """
    values = {line.key: line.value for line in target.settings}
    for line in target.settings:
        new = REPLACED.get(line.key or "")
        if new and new.name in values:
            equal = values[line.key] == values[new.name]
            message = f"`{line.key}` and its new name `{new.name}` are both set: {new.together}"
            yield Problem(
                at_name(line),
                message,
                f"remove the line, keep {new.name}",
                severity=Severity.INFO if equal else None,
            )
