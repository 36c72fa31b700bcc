"""From answers to findings, and to a table of hosts and checks, the worst first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Importing the families registers their rules.
from ds_toolkit.doctor.preflight import machine_rules as machine_rules
from ds_toolkit.doctor.preflight import start_rules as start_rules
from ds_toolkit.doctor.preflight import storage_rules as storage_rules
from ds_toolkit.doctor.preflight import variable_rules as variable_rules
from ds_toolkit.doctor.preflight.answers import Answer
from ds_toolkit.doctor.preflight.fleet import ALL_HOSTS, THIS_CLOCK, Fleet, Host
from ds_toolkit.doctor.preflight.fleet import RULES as RULES
from ds_toolkit.findings import Finding, Severity, Where
from ds_toolkit.units import format_bytes

# What would contradict a finding beside it.
_WELL = ("ok", "shared")
_ORDER = (Severity.ERROR, Severity.WARNING, Severity.INFO)


@dataclass(frozen=True)
class Check:
    """A column of the table: rules about the same thing, and what was measured where they find nothing."""

    name: str
    codes: tuple[str, ...]
    measured: Callable[[Fleet, Host, Answer], str | None]


@dataclass(frozen=True)
class Cell:
    """What a check came to on a host.

    Attributes:
        severity: of the worst finding; None where there is none.
        text: what was measured; empty where the host did not tell.
    """

    severity: Severity | None
    text: str


def _fine(_: Fleet, __: Host, ___: Answer) -> str:
    return "ok"


def _software(_: Fleet, __: Host, answer: Answer) -> str | None:
    torch = answer.software.versions.get("torch")
    return f"torch {torch}" if torch else None


def _clock(_: Fleet, host: Host, __: Answer) -> str | None:
    if host.clock is None:
        return None
    away = host.clock.ahead_seconds(THIS_CLOCK)
    # Half of the width is how long the answer may have been under way.
    width = (host.clock.most_seconds - host.clock.least_seconds) / 2
    return f"{away:+.1f} s" if away else f"within {max(width, 0.1):.1f} s"


def _script(fleet: Fleet, _: Host, answer: Answer) -> str | None:
    return "ok" if fleet.intent.script and answer.script_sha256 else None


def _storage(_: Fleet, host: Host, answer: Answer) -> str | None:
    if answer.storage is None or answer.storage.error is not None:
        return None
    return "shared" if len(host.tokens or ()) > 1 else "ok"


def _space(_: Fleet, __: Host, answer: Answer) -> str | None:
    space = answer.storage.space if answer.storage else None
    return f"{format_bytes(space.free_bytes)} free" if space else None


def _speed(_: Fleet, __: Host, answer: Answer) -> str | None:
    speed = answer.storage.bytes_per_second if answer.storage else None
    return f"{format_bytes(speed)}/s" if speed else None


def _shared_memory(_: Fleet, __: Host, answer: Answer) -> str | None:
    return format_bytes(answer.shared_memory.free_bytes) if answer.shared_memory else None


def _limits(_: Fleet, __: Host, answer: Answer) -> str:
    files, locked = answer.limits.open_files, answer.limits.memlock_bytes
    shown = "no limit" if locked is None else format_bytes(locked)
    return f"-n {'no limit' if files is None else files}, -l {shown}"


def _memory(_: Fleet, __: Host, answer: Answer) -> str | None:
    free = answer.memory.free_bytes
    return f"{format_bytes(free)} free" if free is not None else None


def _network(_: Fleet, __: Host, answer: Answer) -> str:
    up = [name for name, state in answer.interfaces.items() if state == "up"]
    ports = f", {answer.active_ports} IB" if answer.infiniband else ""
    return f"{'+'.join(up[:2]) or 'none'} up{ports}"


def _port(fleet: Fleet, host: Host, answer: Answer) -> str | None:
    first = host.name == fleet.hosts[0].name
    return f"{fleet.intent.master_port} free" if first and answer.port_error is None else None


def _gpus(_: Fleet, __: Host, answer: Answer) -> str:
    return str(answer.num_gpus) if answer.num_gpus else "not seen"


CHECKS = (
    Check("reached", ("DS1101", "DS1102"), _fine),
    Check("python", ("DS1103",), lambda _, __, answer: answer.software.versions.get("python")),
    Check("folder, script", ("DS1104", "DS1105", "DS1125"), _script),
    Check("versions", ("DS1106", "DS1107"), _software),
    Check("user", ("DS1108",), lambda _, __, answer: f"id {answer.user_id}"),
    Check("clock", ("DS1109",), _clock),
    Check("storage", ("DS1110", "DS1111"), _storage),
    Check("space", ("DS1112",), _space),
    Check("speed", ("DS1113",), _speed),
    Check("/dev/shm", ("DS1114",), _shared_memory),  # noqa: S108
    Check("limits", ("DS1115", "DS1116"), _limits),
    Check("memory", ("DS1117",), _memory),
    Check("network", ("DS1118", "DS1119"), _network),
    Check("port", ("DS1120",), _port),
    Check("gpus", ("DS1121", "DS1122"), _gpus),
    Check("variables", ("DS1123", "DS1124", "DS1126"), _fine),
)


def judge(fleet: Fleet) -> list[Finding]:
    """What the rules find, the worst first; the pointer of a place is the host, or `ALL_HOSTS`."""
    findings = RULES.findings(fleet, lambda host: Where(None, host))
    return worst_first(findings)


def worst_first(findings: Sequence[Finding]) -> list[Finding]:
    """Errors, then warnings, then notes; among equals the order stays."""
    return sorted(findings, key=lambda finding: _ORDER.index(finding.severity))


def table(fleet: Fleet, findings: Sequence[Finding]) -> list[tuple[Host, list[tuple[Check, Cell]]]]:
    """A line for every host with a cell for every check, the worst hosts and the worst checks first."""

    def cell(host: Host, check: Check) -> Cell:
        worst = _worst(findings, check.codes, host.name)
        measured = check.measured(fleet, host, host.answer) if host.answer is not None else None
        return Cell(worst, "" if measured is None or (worst is not None and measured in _WELL) else measured)

    checks = sorted(CHECKS, key=lambda check: _rank(_worst(findings, check.codes, None)))
    rows = [(host, [(check, cell(host, check)) for check in checks]) for host in fleet.hosts]
    # By the worst of a host's cells, and then from the left: the worst checks stand there.
    ranks = {host.name: [_rank(cell.severity) for _, cell in cells] for host, cells in rows}
    return sorted(rows, key=lambda row: (min(ranks[row[0].name]), ranks[row[0].name]))


def _worst(findings: Sequence[Finding], codes: tuple[str, ...], host: str | None) -> Severity | None:
    """The worst of the findings with these codes, on one host (None: on any)."""
    found = [
        finding.severity
        for finding in findings
        if finding.code in codes and (host is None or finding.where.pointer in (host, ALL_HOSTS))
    ]
    return min(found, key=_ORDER.index, default=None)


def _rank(severity: Severity | None) -> int:
    return len(_ORDER) if severity is None else _ORDER.index(severity)
