from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from ds_toolkit.config.linter import lint
from ds_toolkit.config.schema.export import DIALECT, json_schema

SCHEMA = json_schema()
VALIDATOR = Draft202012Validator(SCHEMA)


def test_the_schema_is_a_schema_of_its_draft() -> None:
    assert SCHEMA["$schema"] == DIALECT
    Draft202012Validator.check_schema(SCHEMA)


def test_every_key_has_a_description_and_every_simple_one_a_default() -> None:
    for definition in (SCHEMA, *SCHEMA["$defs"].values()):
        assert definition["description"]
        for key, member in definition["properties"].items():
            # A reference with nothing to add leaves the description to what it refers to.
            assert member.get("description") or "$ref" in member, key
            if "$ref" not in str(member) and key not in ("$schema", "ds_toolkit"):
                assert "default" in member, key


@pytest.mark.parametrize(
    "config",
    [
        {"train_batch_size": 8, "$schema": "ds_config.schema.json", "_note": 1, "x-owner": {}},
        {"train_batch_size": "auto", "bf16": {"enabled": "auto"}},
        {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_max_live_parameters": 5}},
        {"zero_optimization": {"stage": 3, "max_live_parameters": 5, "offload_param": {"device": "cpu"}}},
        {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "checkpoint": {"tag_validation": "Warn"}},
        {"ds_toolkit": {"save_every": 50, "keep_last": 2}},
        {"zero_optimization": True, "checkpoint": {"tag_validation": "wArN"}, "log_level": "INFO"},
        {"log_level": "Info", "steps_per_print": -1},
        {"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 1}}},
    ],
)
def test_good_configurations_are_valid(config: dict[str, Any]) -> None:
    assert [error.message for error in VALIDATOR.iter_errors(config)] == []


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"zero_optimisation": {}}, "$"),
        ({"zero_optimization": {"stage": 4}}, "$.zero_optimization.stage"),
        ({"zero_optimization": {"overlap_com": True}}, "$.zero_optimization"),
        ({"zero_optimization": {"reduce_bucket_size": "5e8"}}, "$.zero_optimization.reduce_bucket_size"),
        ({"fp16": {"enabled": 3}}, "$.fp16.enabled"),
        ({"gradient_accumulation_steps": "8"}, "$.gradient_accumulation_steps"),
        ({"ds_toolkit": {"save_evry": 1}}, "$.ds_toolkit"),
        ({"log_level": "loud"}, "$.log_level"),
        ({"steps_per_print": 0}, "$.steps_per_print"),
        ({"checkpoint": {"tag_validation": "warning"}}, "$.checkpoint.tag_validation"),
        ({"tensor_parallel": {"dtype": "bf16"}}, "$.tensor_parallel.dtype"),
        ({"fp16": {"_note": "ours"}}, "$.fp16"),
    ],
)
def test_bad_configurations_are_not(config: dict[str, Any], path: str) -> None:
    assert {error.json_path for error in VALIDATOR.iter_errors(config)} >= {path}
    assert lint({"train_batch_size": 8, **config})
