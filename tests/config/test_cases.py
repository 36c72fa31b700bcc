"""Small configurations that people write, what DeepSpeed makes of them, and what the linter owes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_toolkit.config.consumers import Consumer
from ds_toolkit.config.linter import lint
from ds_toolkit.config.reader import read_config_text

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "cases.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_each_case_gets_what_it_deserves(case: dict[str, Any]) -> None:
    document = read_config_text(json.dumps(case["config"], indent=2))
    findings = lint(document, world_size=case["world_size"], consumer=Consumer(case["consumer"]))
    if case["pointer"] is None:
        assert findings == []
        return
    found = [finding for finding in findings if finding.where.pointer == case["pointer"]]
    assert [finding.severity.value for finding in found] == [case["severity"]]
    assert found[0].fix
    assert found[0].where.line is not None
    # No case is about anything else, but for the optimizer that offloading without one leaves to the script.
    assert {finding.code for finding in findings if finding not in found} <= {"DS119"}
