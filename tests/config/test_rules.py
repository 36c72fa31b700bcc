"""What holds for every rule of a configuration, whatever it is about."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_toolkit.config import rules
from ds_toolkit.config.consumers import Consumer
from ds_toolkit.config.linter import lint
from ds_toolkit.config.reader import read_config_text
from ds_toolkit.config.rules import RULES
from ds_toolkit.config.subject import Config
from ds_toolkit.findings import Finding
from ds_toolkit.rules import Example, Rule

FAMILIES = {
    **dict.fromkeys(("keys", "sections", "spelling", "values"), "0"),
    **dict.fromkeys(("batch", "optimizer", "params", "scheduler"), "1"),
    **dict.fromkeys(("curves", "implementations", "torch_schedulers"), "1"),
    "zero": "2",
    "precision": "3",
    "offload": "4",
    "communication": "5",
    **dict.fromkeys(("checkpoint", "toolkit"), "6"),
    "consumers": "8",
}
BAD = [pytest.param(rule, example, id=rule.code) for rule in RULES for example in rule.bad]
GOOD = [pytest.param(rule, example, id=rule.code) for rule in RULES for example in rule.good]


def findings_of(example: Example) -> list[Finding]:
    if example.context.get("text") != "hjson":
        json.loads(example.text)
    world_size = example.context.get("world_size")
    return lint(
        read_config_text(example.text),
        world_size=int(world_size) if world_size else None,
        consumer=Consumer(example.context.get("consumer", "native")),
    )


@pytest.mark.parametrize(("rule", "example"), BAD)
def test_a_bad_example_fires_its_own_rule_and_no_other(rule: Rule[Config], example: Example) -> None:
    findings = findings_of(example)
    assert {finding.code for finding in findings} == {rule.code}
    assert all(finding.severity is rule.severity for finding in findings)
    assert all(finding.message and finding.where.line for finding in findings)


@pytest.mark.parametrize(("rule", "example"), GOOD)
def test_a_good_example_is_clean_under_all_rules(rule: Rule[Config], example: Example) -> None:
    assert findings_of(example) == []


@pytest.mark.parametrize("rule", list(RULES), ids=lambda rule: rule.code)
def test_a_rule_has_a_manual_with_examples_and_the_code_of_its_family(rule: Rule[Config]) -> None:
    assert rule.bad
    assert rule.good
    assert len(rule.manual.splitlines()[0]) > 20
    family = rule.check.__module__.rpartition(".")[2]
    assert rule.code[2] == FAMILIES[family]


def test_every_family_is_registered() -> None:
    modules = {path.stem for path in Path(rules.__file__).parent.glob("*.py")} - {"__init__", "registry"}
    assert modules == {rule.check.__module__.rpartition(".")[2] for rule in RULES}
