"""Results as Markdown tables, appended to a page behind the earlier ones."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Sequence
from pathlib import Path


def as_table(how: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The rows as Markdown; above them the day, the machine and how it was measured."""
    machine = f"{os.cpu_count()} CPUs, {platform.machine()}, Python {platform.python_version()}"
    head = f"{datetime.date.today().isoformat()}, {machine}, {how}:"
    lines = [head, "", _row(header), _row(["---"] * len(header)), *map(_row, rows)]
    return "\n".join(lines)


def append(page: Path, title: str, table: str) -> None:
    """Put the table behind the earlier ones of the page's chapter with this title (`## ...`)."""
    text = page.read_text()
    if title not in text:
        text = f"{text.rstrip()}\n\n{title}\n"
    before, title, rest = text.partition(title)
    chapter, separator, after = rest.partition("\n## ")
    page.write_text(f"{before}{title}{chapter.rstrip()}\n\n{table}\n{separator}{after}")


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
