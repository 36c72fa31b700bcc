"""A hostfile, read as DeepSpeed's launcher reads it: a host and its slots on each line."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from pathlib import Path

from ds_toolkit.errors import ToolkitError
from ds_toolkit.files import read_utf8

_ENTRY = re.compile(r"(\S+)\s+slots=(\d+)(.*)")


@dataclass(frozen=True)
class HostLine:
    """One line that is neither blank nor a comment.

    Attributes:
        number: counted from 1.
        text: the line without blanks around it.
        host: its name or address, with or without a user; None where the launcher cannot read the line.
        slots: ranks that it is to run.
        rest: what stands behind, which the launcher ignores.
    """

    number: int
    text: str
    host: str | None
    slots: int
    rest: str


@dataclass(frozen=True)
class Hostfile:
    """The entries of a hostfile; `file` is the name to show to people."""

    lines: tuple[HostLine, ...]
    file: str | None = None

    @property
    def slots(self) -> dict[str, int]:
        """Ranks of each host, in the order of the file.

        Raises:
            ToolkitError: the launcher would refuse the file.
        """
        slots: dict[str, int] = {}
        for line in self.lines:
            if line.host is None or line.host in slots:
                what = "stands twice" if line.host else "cannot be read"
                where = f"{self.file or 'hostfile'}:{line.number}"
                raise ToolkitError(
                    f"`{line.host or line.text}` {what}", where=where, fix="write NAME slots=N"
                )
            slots[line.host] = line.slots
        if not slots:
            raise ToolkitError("the hostfile names no host", where=self.file, fix="write NAME slots=N lines")
        return slots


def read_hostfile(path: Path) -> Hostfile:
    """Read a file as the launcher does.

    Raises:
        ToolkitError: it cannot be opened, or is not UTF-8 text.
    """
    return parse_hostfile_text(read_utf8(path, "hostfile"), file=str(path))


def parse_hostfile_text(text: str, file: str | None = None) -> Hostfile:
    """Read a text as the launcher does: blank lines and comments are left out."""
    lines = []
    for number, raw in enumerate(io.StringIO(text, newline=None), start=1):
        line = raw.strip()
        if line and not line.startswith("#"):
            match = _ENTRY.match(line)
            host, slots, rest = match.groups() if match else (None, "0", "")
            lines.append(HostLine(number, line, host, int(slots), rest.strip()))
    return Hostfile(tuple(lines), file)
