"""What preflight found, as a table of hosts and checks for people, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich import box
from rich.table import Table
from rich.text import Text

from ds_toolkit.cli.output import console
from ds_toolkit.cli.reports import as_json, print_findings
from ds_toolkit.doctor.preflight.fleet import ALL_HOSTS, Fleet
from ds_toolkit.doctor.preflight.judging import Cell, Check, table
from ds_toolkit.doctor.preflight.variable_rules import MASKED, Carried, carried
from ds_toolkit.env.secret_names import looks_like_a_secret
from ds_toolkit.errors import printable
from ds_toolkit.findings import Finding, Severity
from ds_toolkit.units import counted

Column = tuple[str, list[Text]]
_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.INFO: "blue"}
# Where there is no terminal; its width counts elsewhere.
_WIDTH = 110
# Of a column of rich's simple tables, beside what stands in it.
_PADDING = 3


def print_report(fleet: Fleet, findings: Sequence[Finding]) -> None:
    """Tables of hosts and checks, the worst first, then each finding with its fix, and the variables."""
    rows = table(fleet, findings)
    names = [Text(printable(host.name)) for host, _ in rows]
    columns = [
        (check.name, [_mark(cells[index][1]) for _, cells in rows])
        for index, (check, _) in enumerate(rows[0][1])
    ]
    out = console()
    for shown in _side_by_side(names, columns, out.width if out.is_terminal else _WIDTH):
        # Never narrower than what stands in it.
        out.print(shown, width=sum(_width(column) for column in columns) + _WIDTH, crop=False)
    print_findings(findings, counted(len(fleet.hosts), "host"), _variables(carried(fleet.intent)))


def _side_by_side(names: list[Text], columns: list[Column], width: int) -> Iterator[Table]:
    """Tables with as many checks as fit beside the hosts' names."""
    while columns:
        left = width - _width(("host", names)) - _PADDING
        count = 0
        while count < len(columns) and (count == 0 or _width(columns[count]) <= left):
            left -= _width(columns[count])
            count += 1
        shown = Table(box=box.SIMPLE, pad_edge=False)
        for name, cells in [("host", names), *columns[:count]]:
            shown.add_column(name, no_wrap=True, min_width=_width((name, cells)) - _PADDING)
        for index, host in enumerate(names):
            shown.add_row(host, *(cells[index] for _, cells in columns[:count]))
        yield shown
        columns = columns[count:]


def _width(column: Column) -> int:
    name, cells = column
    return max(len(name), *(cell.cell_len for cell in cells)) + _PADDING


def _mark(cell: Cell) -> Text:
    if cell.severity is None:
        return Text(printable(cell.text) or "-")
    mark = {Severity.ERROR: "ERROR", Severity.WARNING: "warning", Severity.INFO: "note"}[cell.severity]
    return Text(f"{mark} {printable(cell.text)}".strip(), style=_STYLES[cell.severity])


def _variables(variables: Sequence[Carried]) -> list[str]:
    """What reaches the ranks, a line each; nothing where there is no environment file."""
    if not variables:
        return []
    lines = [
        f"  {variable.name}={variable.value}"
        if variable.why is None
        else f"  {variable.name}: {variable.why}"
        for variable in variables
    ]
    return ["variables of the environment file, as they reach the ranks:", *map(printable, lines), ""]


def report_as_json(fleet: Fleet, findings: Sequence[Finding]) -> dict[str, object]:
    """Findings with their hosts, and all that was measured; values of secrets are masked."""
    rows = table(fleet, findings)
    return {
        "findings": [{**as_json(finding), "host": _host_of(finding)} for finding in findings],
        "hosts": [
            {
                "name": host.name,
                "unreached": host.unreached,
                "no_python": host.no_python,
                "clock": None if host.clock is None else asdict(host.clock),
                "checks": {check.name: _cell_as_json(check, cell) for check, cell in cells},
                "answer": None if host.answer is None else _masked(host.answer.model_dump()),
            }
            for host, cells in rows
        ],
        "variables": [asdict(variable) for variable in carried(fleet.intent)],
    }


def _host_of(finding: Finding) -> str | None:
    about_one = finding.where.file is None and finding.where.pointer != ALL_HOSTS
    return finding.where.pointer if about_one else None


def _cell_as_json(_: Check, cell: Cell) -> dict[str, object]:
    return {"severity": cell.severity.value if cell.severity else None, "measured": cell.text or None}


def _masked(answer: dict[str, object]) -> dict[str, object]:
    variables = answer["variables"]
    if isinstance(variables, dict):
        shown = {name: MASKED if looks_like_a_secret(name) else value for name, value in variables.items()}
        return {**answer, "variables": shown}
    return answer
