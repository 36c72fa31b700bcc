from __future__ import annotations

from collections.abc import Iterator

import pytest

from ds_toolkit.findings import Severity, Where
from ds_toolkit.rules import Problem, Registry


def too_long(subject: str) -> Iterator[Problem]:
    """A word is longer than three letters.

    Bad:
        four
        lines
    Bad (limit=2, mode=strict):
        abc

    Good:
        abc

    More prose.
    """
    if len(subject) > 3:
        yield Problem("/0", f"`{subject}` is long", "shorten it")


def test_a_rule_reports_with_its_code_and_severity() -> None:
    registry: Registry[str] = Registry()
    assert registry.rule("DS900", "too-long", Severity.WARNING)(too_long) is too_long
    (finding,) = registry.findings("lengthy", lambda pointer: Where("words", pointer))
    assert (finding.code, finding.severity) == ("DS900", Severity.WARNING)
    assert (finding.message, finding.fix) == ("`lengthy` is long", "shorten it")
    assert str(finding.where) == "words /0"
    assert registry.findings("abc", Where) == []


def test_examples_are_read_from_the_docstring() -> None:
    registry: Registry[str] = Registry()
    registry.rule("DS900", "too-long", Severity.ERROR)(too_long)
    rule = registry["DS900"]
    assert rule.manual.startswith("A word is longer")
    assert [(example.text, example.context) for example in rule.bad] == [
        ("four\nlines", {}),
        ("abc", {"limit": "2", "mode": "strict"}),
    ]
    assert [example.text for example in rule.good] == ["abc"]


def test_rules_come_in_the_order_of_their_codes() -> None:
    registry: Registry[str] = Registry()

    def second(subject: str) -> Iterator[Problem]:
        yield Problem("", "")

    registry.rule("DS902", "second", Severity.ERROR)(second)
    registry.rule("DS901", "too-long", Severity.ERROR)(too_long)
    assert [rule.code for rule in registry] == ["DS901", "DS902"]


def test_codes_of_four_digits_come_after_those_of_three() -> None:
    registry: Registry[str] = Registry()

    def second(subject: str) -> Iterator[Problem]:
        yield Problem("", "")

    registry.rule("DS1001", "second", Severity.ERROR)(second)
    registry.rule("DS915", "too-long", Severity.ERROR)(too_long)
    assert [rule.code for rule in registry] == ["DS915", "DS1001"]


@pytest.mark.parametrize(
    ("code", "name", "function_name"),
    [
        ("DS900", "other", "other"),
        ("DS901", "too-long", "too_long"),
        ("DS901", "other", "another"),
        ("DS901", "an_other", "an_other"),
        ("X1", "other", "other"),
    ],
    ids=["code taken", "name taken", "name is not the function's", "underscore", "not a code"],
)
def test_a_rule_that_would_be_ambiguous_is_refused(code: str, name: str, function_name: str) -> None:
    registry: Registry[str] = Registry()
    registry.rule("DS900", "too-long", Severity.ERROR)(too_long)

    def check(subject: str) -> Iterator[Problem]:
        yield Problem("", "")

    check.__name__ = function_name
    with pytest.raises(ValueError, match=r"rule|code"):
        registry.rule(code, name, Severity.ERROR)(check)
    assert len(list(registry)) == 1
