"""The one noun for whatever the toolkit has to say about a config, an env file, a checkpoint or a failure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from ds_toolkit.errors import printable


class Severity(str, Enum):
    """How bad a finding is; only an `ERROR` makes the thing that was looked at unusable."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True)
class Where:
    """Where a finding points: a file, and inside it a JSON pointer and a position (both counted from 1)."""

    file: str | None = None
    pointer: str | None = None
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        place = ":".join(str(part) for part in (self.file, self.line, self.column) if part is not None)
        return printable(" ".join(part for part in (place, self.pointer) if part))


class _Unchanged(Enum):
    UNCHANGED = "unchanged"


UNCHANGED = _Unchanged.UNCHANGED


@dataclass(frozen=True)
class Edit:
    """A change of one member of a configuration that mends a finding and can do no harm.

    Attributes:
        pointer: the member.
        key: its new name; None keeps the name.
        value: its new value; `UNCHANGED` keeps the value.
        section: the pointer of the object that it moves to; None leaves it where it is.
    """

    pointer: str
    key: str | None = None
    value: object = UNCHANGED
    section: str | None = None


@dataclass(frozen=True)
class Finding:
    """One thing found: a permanent code, how bad it is, where, what, and how to mend it.

    `edit` is there where the toolkit can mend it by itself.
    """

    code: str
    severity: Severity
    message: str
    where: Where = field(default_factory=Where)
    fix: str | None = None
    edit: Edit | None = field(default=None, compare=False)


def has_errors(findings: Iterable[Finding]) -> bool:
    """Whether any of them is an error."""
    return any(finding.severity is Severity.ERROR for finding in findings)
