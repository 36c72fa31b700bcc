"""What holds for every rule of an environment file and of a hostfile, whatever it is about."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ds_toolkit.env import hostfile_rules, rules, variable_rules
from ds_toolkit.env.envfile import parse_env_text
from ds_toolkit.env.hostfile import parse_hostfile_text
from ds_toolkit.env.launchers import Launcher
from ds_toolkit.env.variables import REPLACED, VARIABLES, Replacement
from ds_toolkit.findings import Finding
from ds_toolkit.rules import Example

FAMILIES = {rules: "DS70", variable_rules: "DS72", hostfile_rules: "DS75"}
VERSION = r"(NCCL|torch|DeepSpeed) [0-9]+(\.[0-9]+){1,2}"
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


def test_both_names_of_a_variable_are_one_finding_that_says_which_counts() -> None:
    def found(text: str) -> list[tuple[str, str, str]]:
        findings = rules.lint_env(parse_env_text(text, "env"))
        return [(finding.code, finding.severity.value, str(finding.where)) for finding in findings]

    old, new = "TORCH_NCCL_TRACE_BUFFER_SIZE=500\n", "TORCH_FR_BUFFER_SIZE=2000\n"
    assert found(old + new) == [("DS729", "warning", "env:1:1")]
    assert found(new + old) == [("DS729", "warning", "env:2:1")]
    # torch 2.7 knows the one, torch 2.8 wants the other: to set both to the same is right.
    assert found(old + new.replace("2000", "500")) == [("DS729", "info", "env:1:1")]
    assert found(old) == [("DS722", "warning", "env:1:1")]
    (finding,) = rules.lint_env(parse_env_text(old, "env"))
    assert finding.fix == "write TORCH_FR_BUFFER_SIZE, which torch 2.8 and newer read"


@pytest.mark.parametrize(("old", "new"), REPLACED.items(), ids=REPLACED)
def test_every_old_name_has_a_new_one_and_a_winner(old: str, new: Replacement) -> None:
    (finding,) = rules.lint_env(parse_env_text(f"{old}=1\n"))
    assert finding.code == "DS722"
    assert new.name in str(finding.fix)
    both = rules.lint_env(parse_env_text(f"{old}=1\n{new.name}=64\n"))
    (finding,) = [finding for finding in both if finding.code in ("DS722", "DS729")]
    assert finding.code == "DS729"
    assert finding.message == f"`{old}` and its new name `{new.name}` are both set: {new.together}"
    assert old not in VARIABLES
    assert new.since is None or re.fullmatch(VERSION, new.since)


def test_versions_are_written_alike_and_name_the_program_that_reads_it() -> None:
    for name, variable in VARIABLES.items():
        assert variable.since is None or re.fullmatch(VERSION, variable.since), name
        if variable.since is not None:
            assert variable.since.partition(" ")[0].upper() == name.partition("_")[0], name
        assert variable.meaning.endswith("."), name
        # A variable of its own is not a misspelling of another.
        assert rules.lint_env(parse_env_text(f"{name}=\n")) == []
