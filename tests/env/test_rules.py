"""What holds for every rule of an environment file and of a hostfile, whatever it is about."""

from __future__ import annotations

from typing import Any

import pytest

from ds_toolkit.env import hostfile_rules, rules, variable_rules
from ds_toolkit.env.envfile import parse_env_text
from ds_toolkit.env.hostfile import parse_hostfile_text
from ds_toolkit.env.launchers import Launcher
from ds_toolkit.findings import Finding
from ds_toolkit.rules import Example

FAMILIES = {rules: "DS70", variable_rules: "DS72", hostfile_rules: "DS75"}
RULES = [*rules.RULES, *hostfile_rules.RULES]


def findings_of(rule: Any, example: Example) -> list[Finding]:
    if rule.code.startswith("DS75"):
        return hostfile_rules.lint_hostfile(parse_hostfile_text(example.text, "hostfile"))
    launcher, infiniband = (example.context.get(key) for key in ("launcher", "infiniband"))
    return rules.lint_env(
        parse_env_text(example.text, "env"),
        launcher=Launcher(launcher) if launcher else None,
        infiniband=None if infiniband is None else infiniband == "yes",
    )


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_examples_hold(rule: Any) -> None:
    assert rule.bad
    assert rule.good
    for example in rule.bad:
        findings = findings_of(rule, example)
        assert {finding.code for finding in findings} == {rule.code}, example
        assert all(finding.where.line and finding.where.column for finding in findings)
    for example in rule.good:
        assert findings_of(rule, example) == [], example


def test_codes_are_those_of_the_family() -> None:
    for rule in RULES:
        family = next(code for module, code in FAMILIES.items() if module.__name__ == rule.check.__module__)
        assert rule.code.startswith(family)
    assert len(RULES) == len({rule.code for rule in RULES}) == len({rule.name for rule in RULES})


def test_a_finding_about_a_value_points_at_it() -> None:
    (finding,) = rules.lint_env(parse_env_text("A=1\nNCCL_DEBUG =  INFO\n", "env"))
    assert str(finding.where) == "env:2:15"


def test_a_tilde_arrives_as_it_is_where_the_launcher_quotes_it_for_a_shell() -> None:
    env_file = parse_env_text("HF_HOME=~/cache\n", "env")
    for launcher in (Launcher.PDSH, None):
        (finding,) = rules.lint_env(env_file, launcher=launcher)
        assert finding.message == "`~/cache` reaches the ranks with the `~` as it is"
    (finding,) = rules.lint_env(env_file, launcher=Launcher.SLURM)
    assert finding.message == "`~/cache` reaches the ranks changed"


@pytest.mark.parametrize(("value", "fires"), [("^lo,docker0", False), ("^docker", False), ("eth0,lo", True)])
def test_a_list_that_leaves_interfaces_out_names_none(value: str, fires: bool) -> None:
    env_file = parse_env_text(f"NCCL_SOCKET_IFNAME={value}\n", "env")
    codes = {finding.code for finding in rules.lint_env(env_file, launcher=Launcher.PDSH)}
    assert codes == ({"DS727"} if fires else set())
