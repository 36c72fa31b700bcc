"""Every rule against its manual, and against excerpts of scripts as people write them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from ds_toolkit.doctor.scripts.checking import check_script
from ds_toolkit.doctor.scripts.known_config import KnownConfig
from ds_toolkit.doctor.scripts.rules import RULES
from ds_toolkit.doctor.scripts.script import Script
from ds_toolkit.rules import Example, Rule

DATA = Path(__file__).parent / "data"
# `# --- bad: a name [stage=3]`
_HEAD = re.compile(
    r"^# --- (?P<kind>bad|good): (?P<name>[^\[\n]+?)(?: \[stage=(?P<stage>\d)\])?$", re.MULTILINE
)
_MARK = re.compile(r"#\s*<- (DS\d+)")

MANUAL = [
    pytest.param(rule, example, kind, id=f"{rule.code}-{kind}-{number}")
    for rule in RULES
    for kind, examples in (("bad", rule.bad), ("good", rule.good))
    for number, example in enumerate(examples)
]


@dataclass(frozen=True)
class Excerpt:
    """A piece of a script; lines that must be found end with `# <- CODE`, and no other line may be."""

    code: str
    kind: str
    name: str
    text: str
    stage: int | None


def excerpts() -> list[Excerpt]:
    found = []
    for path in sorted(DATA.glob("DS*.txt")):
        pieces = _HEAD.split(path.read_text())[1:]
        for kind, name, stage, text in zip(*(iter(pieces),) * 4, strict=True):
            found.append(Excerpt(path.stem, kind, name, text, int(stage) if stage else None))
    return found


EXCERPTS = excerpts()


@pytest.mark.parametrize(("rule", "example", "kind"), MANUAL)
def test_the_examples_of_the_manual(rule: Rule[Script], example: Example, kind: str) -> None:
    stage = example.context.get("stage")
    config = KnownConfig(int(stage)) if stage is not None else None
    found = check_script(example.text.encode(), "train.py", config=config)
    assert {finding.code for finding in found} == ({rule.code} if kind == "bad" else set())


@pytest.mark.parametrize("excerpt", EXCERPTS, ids=lambda each: f"{each.code}-{each.kind}-{each.name}")
def test_an_excerpt_has_the_findings_that_are_marked_in_it(excerpt: Excerpt) -> None:
    marked = [
        (number, code)
        for number, line in enumerate(excerpt.text.split("\n"), start=1)
        for code in _MARK.findall(line)
    ]
    config = KnownConfig(excerpt.stage) if excerpt.stage is not None else None
    found = check_script(excerpt.text.encode(), "train.py", config=config)
    assert [(finding.where.line, finding.code) for finding in found] == marked
    assert bool(marked) == (excerpt.kind == "bad")
    if excerpt.kind == "bad":
        assert {code for _, code in marked} == {excerpt.code}
    assert all(finding.fix and finding.where.column for finding in found)


@pytest.mark.parametrize("code", [rule.code for rule in RULES])
def test_every_rule_has_its_excerpts(code: str) -> None:
    kinds = [excerpt.kind for excerpt in EXCERPTS if excerpt.code == code]
    assert kinds.count("bad") >= 3
    assert kinds.count("good") >= 2
    assert RULES[code].bad
    assert RULES[code].good
