"""A rule is a function, its docstring is its manual, the examples in it are its tests."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from ds_toolkit.errors import printable
from ds_toolkit.findings import Edit, Finding, Severity, Where

Subject = TypeVar("Subject")

_CODE = re.compile(r"DS[0-9]{3,4}")
_EXAMPLE = re.compile(
    r"^(?P<kind>Bad|Good)(?: \((?P<context>[^)]*)\))?:\n(?P<text>(?:[ \t]+\S.*\n?|[ \t]*\n)+)", re.MULTILINE
)


@dataclass(frozen=True)
class Problem:
    """What a rule has to say about one place of its subject.

    Attributes:
        pointer: the place: a JSON pointer in a config, a line number in a file that is read line by line.
        message: what is wrong, in one line, no full stop.
        fix: how to mend it.
        edit: the same for a machine, where that is safe.
        severity: where it is not as bad as the rule says in general.
    """

    pointer: str
    message: str
    fix: str | None = None
    edit: Edit | None = None
    severity: Severity | None = None


@dataclass(frozen=True)
class Example:
    """A subject's text from a manual, and what is known beside it, as in `Bad (world_size=7):`."""

    text: str
    context: dict[str, str]


@dataclass(frozen=True)
class Rule(Generic[Subject]):
    """One check, known by a permanent code and by a name that reads well after "allow"."""

    code: str
    name: str
    severity: Severity
    check: Callable[[Subject], Iterator[Problem]]

    @property
    def manual(self) -> str:
        """The whole docstring: what is wrong with it, why, and examples."""
        return inspect.getdoc(self.check) or ""

    @property
    def bad(self) -> list[Example]:
        """Subjects on which this rule, and no other, has something to say."""
        return self._examples("Bad")

    @property
    def good(self) -> list[Example]:
        """Subjects on which no rule has anything to say."""
        return self._examples("Good")

    def _examples(self, kind: str) -> list[Example]:
        return [
            Example(
                text=textwrap.dedent(match["text"]).strip("\n"),
                context=dict(re.findall(r"(\w+)=([^,\s]+)", match["context"] or "")),
            )
            for match in _EXAMPLE.finditer(self.manual)
            if match["kind"] == kind
        ]


def number_of(code: str) -> int:
    """What codes are sorted by: DS915 comes before DS1001."""
    return int(code.removeprefix("DS"))


class Registry(Generic[Subject]):
    """The rules for one kind of subject, in the order of their codes."""

    def __init__(self) -> None:
        self._rules: dict[str, Rule[Subject]] = {}

    def rule(
        self, code: str, name: str, severity: Severity
    ) -> Callable[[Callable[[Subject], Iterator[Problem]]], Callable[[Subject], Iterator[Problem]]]:
        """Register the decorated function as a rule; it stays the plain function that it was.

        Raises:
            ValueError: the code or the name is taken, or the name is not the function's.
        """

        def register(check: Callable[[Subject], Iterator[Problem]]) -> Callable[[Subject], Iterator[Problem]]:
            if not _CODE.fullmatch(code):
                raise ValueError(f"`{code}` is not a code: write DS and three or four digits")
            if name.replace("-", "_") != check.__name__ or "_" in name:
                raise ValueError(f"rule `{name}` must be the function `{name.replace('-', '_')}`")
            for other in self._rules.values():
                if code == other.code or name == other.name:
                    raise ValueError(f"rule {code} `{name}` is taken by {other.code} `{other.name}`")
            self._rules[code] = Rule(code, name, severity, check)
            return check

        return register

    def __iter__(self) -> Iterator[Rule[Subject]]:
        return iter(sorted(self._rules.values(), key=lambda rule: number_of(rule.code)))

    def __contains__(self, code: object) -> bool:
        return code in self._rules

    def __getitem__(self, code: str) -> Rule[Subject]:
        return self._rules[code]

    def findings(self, subject: Subject, where: Callable[[str], Where]) -> list[Finding]:
        """What all rules have to say about a subject; `where` turns a problem's pointer into a place."""
        return [
            Finding(
                rule.code,
                problem.severity or rule.severity,
                # Messages quote keys and values, which may hold anything.
                printable(problem.message),
                where(problem.pointer),
                None if problem.fix is None else printable(problem.fix),
                problem.edit,
            )
            for rule in self
            for problem in rule.check(subject)
        ]
