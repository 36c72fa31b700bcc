"""The one error a user of the toolkit ever sees: what, where, why, and how to mend it."""

from __future__ import annotations

import os


def printable(text: str, keep: str = "") -> str:
    """The text with everything escaped that a terminal would obey, or could not show; `keep` stays.

    Names of files and keys may hold line ends, escape sequences and half characters.
    """
    if text.isprintable():
        return text
    return "".join(mark if mark.isprintable() or mark in keep else repr(mark)[1:-1] for mark in text)


class ToolkitError(Exception):
    """A failure that a person can act on.

    The command line prints it without a traceback and exits with 2; the Python API raises it as it is.
    Mistakes of the programmer stay `AssertionError`, `TypeError` and the like.

    Attributes:
        what: the failure in one line, no full stop.
        where: the file, folder, key or rank it happened at.
        why: the cause, or the evidence for it.
        fix: what to do next.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | os.PathLike[str] | None = None,
        why: str | None = None,
        fix: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = os.fspath(where) if where is not None else None
        self.why = why
        self.fix = fix

    def as_dict(self) -> dict[str, str | None]:
        """The four parts by name, for JSON output and for sending an error to another rank."""
        return {"what": self.what, "where": self.where, "why": self.why, "fix": self.fix}

    @classmethod
    def from_dict(cls, parts: dict[str, str | None]) -> ToolkitError:
        """Rebuild what `as_dict` gave."""
        return cls(parts["what"] or "", where=parts["where"], why=parts["why"], fix=parts["fix"])

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword arguments are lost by Exception's own pickling, and errors cross process borders.
        return (ToolkitError.from_dict, (self.as_dict(),))

    def __str__(self) -> str:
        parts = [printable(self.what)]
        parts += [
            f"  {name + ':':<7}{_indented(printable(value, keep))}"
            for name, value, keep in (
                ("where", self.where, ""),
                ("why", self.why, "\n\t"),
                ("fix", self.fix, "\n\t"),
            )
            if value
        ]
        return "\n".join(parts)


def _indented(value: str) -> str:
    return value.replace("\n", "\n         ")
