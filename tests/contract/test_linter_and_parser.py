"""Wherever DeepSpeed's parser raises, the linter has an error; over thousands of edited configurations."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import corpus
import pytest
from config_edits import PATHS, RANKS, SCALAR_VALUES, edited
from hypothesis import HealthCheck, given, settings

from ds_toolkit.config.linter import lint
from ds_toolkit.config.reader import read_config_text
from ds_toolkit.config.subject import Config
from ds_toolkit.findings import has_errors

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "config" / "data" / "cases.json").read_text()
)


# The same examples each time: a failure here is about DeepSpeed, and should not come and go.
@settings(max_examples=2000, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(edited())
def test_the_linter_has_an_error_whenever_the_parser_raises(parse: Any, config: dict[str, Any]) -> None:
    try:
        parse(copy.deepcopy(config), RANKS)
    except Exception as error:
        # The stub counts data-parallel ranks, the linter all of them.
        findings = lint(config, world_size=RANKS * Config(config).model_parallel_size)
        assert has_errors(findings), repr(error)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_cases_are_what_they_say(case: dict[str, Any], parse: Any) -> None:
    document = read_config_text(json.dumps(case["config"]))
    if case["consumer"] == "native":
        assert corpus.compare(document, parse) == []
    says_refused = any(word in case["deepspeed"] for word in ("Error", "error"))
    try:
        parse(copy.deepcopy(case["config"]), case["world_size"])
        refused = False
    except Exception:
        refused = True
    if case["consumer"] == "native" and "of the engine" not in case["deepspeed"]:
        assert refused is says_refused


def test_the_comparison_notices_a_linter_that_is_silent(parse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    document = read_config_text('{"train_batch_size": 1, "mine": 1, "bf16": true, "checkpoint": {"tag": 1}}')
    assert corpus.compare(document, parse) == []
    monkeypatch.setattr(corpus, "lint", lambda *args, **kwargs: [])
    complaints = corpus.compare(document, parse)
    assert [complaint for complaint in complaints if "the parser raises" in complaint]
    assert [complaint.split()[5] for complaint in complaints if "never asks" in complaint] == [
        "/mine,",
        "/checkpoint/tag,",
    ]


@pytest.mark.parametrize("section", sorted({path[0] for path in PATHS}))
def test_no_single_value_is_refused_by_the_parser_alone(section: str, parse: Any) -> None:
    missed = []
    for path in PATHS:
        for value in SCALAR_VALUES if path[0] == section else ():
            config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, section: {}}
            place = config
            for key in path[:-1]:
                place = place.setdefault(key, {})
            place[path[-1]] = value
            try:
                parse(copy.deepcopy(config), 1)
            except Exception as error:
                if not has_errors(lint(config, world_size=Config(config).model_parallel_size)):
                    missed.append((".".join(path), value, repr(error)))
    assert missed == []
