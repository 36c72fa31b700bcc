"""A `.deepspeed_env` for this fabric: NCCL and torch settings, each with its reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ds_toolkit.env.envfile import EnvFile, env_line, parse_env_text
from ds_toolkit.env.fabric import Host
from ds_toolkit.env.interfaces import interface_to, is_virtual
from ds_toolkit.env.launchers import Launcher
from ds_toolkit.env.rules import lint_env
from ds_toolkit.env.secret_names import looks_like_a_secret
from ds_toolkit.env.variables import REPLACED
from ds_toolkit.errors import ToolkitError
from ds_toolkit.findings import has_errors
from ds_toolkit.rendering import render

TEMPLATE = "env/deepspeed_env.j2"
# Early drivers of these report peer access that then hangs (reported for NCCL's own tests).
_BROKEN_PEER_ACCESS = ("RTX 4090", "RTX 4080", "RTX 6000 ADA")


@dataclass(frozen=True)
class Setting:
    """One line and why it is there."""

    name: str
    value: str
    why: str


@dataclass(frozen=True)
class EnvAdvice:
    """A file's text and how it came about.

    Attributes:
        text: lines that DeepSpeed's parser and the launcher carry unharmed.
        settings: what was added, and why.
        kept: the person's own lines that stand, with what would have been written where that differs.
        left_out: what was not set, and why.
        notices: what the person should know about lines that stand.
    """

    text: str
    settings: list[Setting]
    kept: list[str]
    left_out: list[str]
    notices: list[str]


def advise_environment(
    host: Host,
    *,
    hosts: Sequence[str] = (),
    launcher: Launcher = Launcher.PDSH,
    debug: bool = False,
    existing: EnvFile | None = None,
    find_interface: Callable[[str], str | None] = interface_to,
) -> EnvAdvice:
    """The settings for these hosts, merged with the person's own lines, which win.

    NCCL_DEBUG=WARN is the toolkit's own line and follows `debug`, and so do those that `debug` adds where all
    of them stand.

    Args:
        host: what this host has; the others are taken to have the same.
        hosts: names or addresses of all hosts, as a hostfile has them.
        launcher: what carries the file to the ranks; for Slurm and torchrun gen-launch's script does it, by
            setting the variables in its own shell.
        debug: make NCCL and torch say what they do.
        existing: the file that is there already.
        find_interface: gives the interface that leads to a host.

    Raises:
        ToolkitError: the existing file holds a secret, or a line that would not reach the ranks.
    """
    settings, left_out = _for_fabric(host, hosts, find_interface)
    settings += _for_failures()
    settings += _for_debugging() if debug else _for_quiet()
    own = _own_lines(existing, launcher)
    proposals = {setting.name: setting.value for setting in settings}
    # What an earlier call wrote, with --debug or without it, is no wish of the person's; one of its lines is.
    debugged = all(own.get(setting.name) == setting.value for setting in _for_debugging())
    for earlier in _for_quiet() + (_for_debugging() if debugged else []):
        proposal = proposals.get(earlier.name)
        if own.get(earlier.name) == earlier.value != proposal:
            del own[earlier.name]
            if proposal is None:
                left_out.append(f"{earlier.name}={earlier.value}: --debug wrote it, and it is off now")
    settings, under_old_names = _without_renamed(settings, own)
    left_out += under_old_names
    kept = [
        name if proposed in (None, value) else f"{name} (proposed: {proposed})"
        for name, value in own.items()
        for proposed in [proposals.get(name)]
    ]
    added = [setting for setting in settings if setting.name not in own]
    variables = {**own, **{setting.name: setting.value for setting in added}}
    for name, value in variables.items():
        env_line(name, value)
    text = render(TEMPLATE, variables=variables)
    return EnvAdvice(text, added, kept, left_out, _notices(text, variables, launcher))


def _without_renamed(settings: list[Setting], own: dict[str, str]) -> tuple[list[Setting], list[str]]:
    # A new name beside the person's old one would overrule what the person wrote.
    old_names = {new.name: old for old, new in REPLACED.items() if old in own and new.is_read}
    renamed = [setting for setting in settings if setting.name in old_names and setting.name not in own]
    reasons = [
        f"{name}={setting.value}: your {old}={own[old]} is its old name and stands, and the new one would "
        f"overrule it; write {name} in its place"
        for setting in renamed
        for name, old in [(setting.name, old_names[setting.name])]
    ]
    return [setting for setting in settings if setting not in renamed], reasons


def _notices(text: str, variables: dict[str, str], launcher: Launcher) -> list[str]:
    findings = lint_env(parse_env_text(text))
    notices = [f"{finding.message}; {finding.fix}" for finding in findings if finding.code == "DS729"]
    if launcher is Launcher.SLURM:
        notices += [
            f"{name}={value}: gen-launch's script hands the commas on; `deepspeed --launcher slurm` cuts the "
            "value off at the first"
            for name, value in variables.items()
            if "," in value
        ]
    return notices


def _for_fabric(
    host: Host, hosts: Sequence[str], find_interface: Callable[[str], str | None]
) -> tuple[list[Setting], list[str]]:
    settings, left_out = [], []
    interface = _interface(host, hosts, find_interface)
    if interface is None:
        left_out.append("NCCL_SOCKET_IFNAME: no interface of this host is known to lead to the others")
    else:
        why = f"{interface} leads to the other hosts; NCCL and gloo might pick a bridge of containers"
        settings += [Setting(name, interface, why) for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")]
    if host.infiniband_devices:
        devices = ", ".join(host.infiniband_devices)
        why = (
            f"{devices}: 4.096 us x 2^22 = 17 s until a packet is sent again, enough for a switch to recover"
        )
        settings.append(Setting("NCCL_IB_TIMEOUT", "22", why))
    elif host.gpus:
        settings.append(
            Setting("NCCL_IB_DISABLE", "1", "no InfiniBand or RoCE device: NCCL need not look for one")
        )
    else:
        left_out.append("NCCL_IB_DISABLE: a host without GPUs does not tell what those with GPUs have")
    broken = [gpu.name for gpu in host.gpus if any(name in gpu.name.upper() for name in _BROKEN_PEER_ACCESS)]
    if len(broken) > 1:
        why = f"{broken[0]}: early drivers report peer access that hangs; remove it where it works"
        settings.append(Setting("NCCL_P2P_DISABLE", "1", why))
    return settings, left_out


def _interface(host: Host, hosts: Sequence[str], find_interface: Callable[[str], str | None]) -> str | None:
    real = [name for name in host.network_interfaces if not is_virtual(name)]
    found = {
        interface
        for name in hosts
        for interface in [find_interface(name.rpartition("@")[2])]
        if interface is not None and not is_virtual(interface)
    }
    if len(found) == 1:
        return found.pop()
    # Without names the only real one is it; of several, a wrong one would be worse than none.
    return real[0] if not hosts and len(real) == 1 else None


def _for_failures() -> list[Setting]:
    # Last words need ranks that end: torch's watchdog acts when a collective fails or takes too long, its
    # monitor when the watchdog itself hangs.
    return [
        Setting(
            "TORCH_NCCL_ASYNC_ERROR_HANDLING",
            "3",
            "a rank whose collective failed ends at once, without waiting to tear NCCL down",
        ),
        Setting("TORCH_NCCL_ENABLE_MONITORING", "1", "a rank whose watchdog hangs is ended too"),
        Setting("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "300", "after five minutes; torch's default is eight"),
        Setting("DEEPSPEED_TIMEOUT", "10", "minutes that a collective may take before it counts as failed"),
        Setting("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", "the flight recorder says which collective hung"),
        Setting(
            "TORCH_FR_BUFFER_SIZE",
            "2000",
            "collectives that it remembers; torch before 2.8 knows it as TORCH_NCCL_TRACE_BUFFER_SIZE",
        ),
    ]


def _for_quiet() -> list[Setting]:
    return [Setting("NCCL_DEBUG", "WARN", "warnings only: INFO floods logs")]


def _for_debugging() -> list[Setting]:
    return [
        Setting("NCCL_DEBUG", "INFO", "--debug: NCCL says what it connects, and how"),
        Setting("NCCL_DEBUG_SUBSYS", "NET", "--debug: about networks only"),
        Setting(
            "TORCH_DISTRIBUTED_DEBUG", "DETAIL", "--debug: torch checks each collective on all ranks; slow"
        ),
        Setting("TORCH_NCCL_DESYNC_DEBUG", "1", "--debug: ranks that are out of step are named on a timeout"),
    ]


def _own_lines(existing: EnvFile | None, launcher: Launcher) -> dict[str, str]:
    if existing is None:
        return {}
    own = existing.variables
    secret = next((name for name, value in own.items() if value and looks_like_a_secret(name)), None)
    if secret is not None:
        raise ToolkitError(
            f"`{secret}` looks like a secret",
            where=existing.file,
            why="the launcher prints the values of this file into its log and into the process list",
            fix="keep it in a file that the script reads",
        )
    # What a shell sets is not bound by what DeepSpeed's launcher makes of a line.
    findings = lint_env(existing, None if launcher.script_sets_variables else launcher)
    if has_errors(findings):
        worst = next(finding for finding in findings if finding.severity.value == "error")
        raise ToolkitError(worst.message, where=str(worst.where), fix=worst.fix or "mend the line first")
    return own
