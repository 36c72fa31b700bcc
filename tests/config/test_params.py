from __future__ import annotations

import json
from typing import Any

import pytest

from ds_toolkit.config.consumers import Consumer
from ds_toolkit.config.fixes import apply_fixes
from ds_toolkit.config.linter import lint
from ds_toolkit.config.reader import read_config_text


def config(section: str, kind: str, params: dict[str, Any]) -> dict[str, Any]:
    needed = {
        "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2},
        "WarmupDecayLR": {"total_num_steps": 1000, "warmup_num_steps": 10},
        "AdamW": {"lr": 1e-4},
        "SGD": {"lr": 0.1},
        "Adafactor": {"lr": 0.1},
    }
    return {"train_batch_size": 8, section: {"type": kind, "params": {**needed.get(kind, {}), **params}}}


WRONG: list[tuple[str, str, dict[str, Any]]] = [
    *(("optimizer", "AdamW", {"lr": value}) for value in ("1e-4", None, -1, True, [1e-4], "x")),
    *(("optimizer", "AdamW", {"weight_decay": value}) for value in ("0.1", -0.1, None)),
    *(("optimizer", "AdamW", {"eps": value}) for value in (-1, "1e-8")),
    *(
        ("optimizer", "AdamW", {"betas": value})
        for value in (0.9, [0.9], [0.9] * 3, [1.0, 0.9], [0.9, "0.9"], None)
    ),
    ("optimizer", "SGD", {"momentum": "0.9"}),
    ("optimizer", "SGD", {"momentum": -0.5}),
    ("optimizer", "AdamW", {"torch_adam": "false"}),
    *(("scheduler", "WarmupLR", {"warmup_max_lr": value}) for value in ("1e-4", -1, False)),
    ("scheduler", "WarmupLR", {"warmup_min_lr": None}),
    *(("scheduler", "WarmupDecayLR", {"total_num_steps": value}) for value in ("1000", None)),
    *(("scheduler", "OneCycle", {"cycle_first_step_size": value}) for value in (0, -1, None, "x")),
    ("scheduler", "OneCycle", {"cycle_second_step_size": -1}),
    *(("scheduler", "LRRangeTest", {"lr_range_test_step_size": value}) for value in (0, 10.0, "10")),
]
RIGHT: list[tuple[str, str, dict[str, Any]]] = [
    ("optimizer", "AdamW", {"lr": 0, "weight_decay": 0, "eps": 1, "betas": [0, 0.5]}),
    ("optimizer", "AdamW", {"amsgrad": False, "fused": None, "torch_adam": 1}),
    ("optimizer", "SGD", {"momentum": 1.5, "nesterov": True}),
    ("optimizer", "Adafactor", {"eps": [None, 0.001]}),
    ("scheduler", "WarmupLR", {"warmup_max_lr": None}),
    ("scheduler", "WarmupLR", {"warmup_min_lr": [0.1, 0.2], "warmup_max_lr": [0.3, 1]}),
    ("scheduler", "OneCycle", {"cycle_first_step_size": "2000", "cycle_second_step_size": 0.5}),
    ("scheduler", "OneCycle", {"cycle_second_step_size": None, "cycle_second_stair_count": None}),
    ("scheduler", "StepLR", {"step_size": 10}),
]


@pytest.mark.parametrize(("section", "kind", "params"), WRONG)
def test_values_that_no_optimizer_or_scheduler_takes_are_errors(
    section: str, kind: str, params: dict[str, Any]
) -> None:
    (finding,) = lint(config(section, kind, params))
    assert finding.code == {"optimizer": "DS110", "scheduler": "DS129"}[section]
    assert finding.severity.value == "error"
    assert finding.where.pointer == f"/{section}/params/{next(iter(params))}"


@pytest.mark.parametrize(("section", "kind", "params"), RIGHT)
def test_values_that_they_take_are_none(section: str, kind: str, params: dict[str, Any]) -> None:
    assert lint(config(section, kind, params)) == []


def test_auto_is_left_to_who_resolves_it() -> None:
    made = config("optimizer", "AdamW", {"lr": "auto", "betas": "auto"})
    asked = made | {"train_batch_size": "auto", "zero_optimization": {"stage": 1}}
    assert lint(asked, consumer=Consumer.HF) == []
    assert {finding.code for finding in lint(made)} == {"DS019"}


@pytest.mark.parametrize(
    ("section", "kind", "key", "text", "number"),
    [
        ("optimizer", "AdamW", "lr", "1e-4", 0.0001),
        ("scheduler", "WarmupDecayLR", "total_num_steps", "1e3", 1000),
        ("scheduler", "WarmupDecayLR", "warmup_num_steps", "100", 100),
        ("optimizer", "AdamW", "lr", "-1", "-1"),
        ("optimizer", "AdamW", "lr", "1_0", "1_0"),
    ],
)
def test_quoted_numbers_lose_their_quotes_where_they_are_in_range(
    section: str, kind: str, key: str, text: str, number: object
) -> None:
    document = read_config_text(json.dumps(config(section, kind, {key: text})))
    fixed, _ = apply_fixes(document, lint(document))
    params: Any = fixed.data[section]
    assert params["params"][key] == number
    assert type(params["params"][key]) is type(number)


@pytest.mark.parametrize(
    ("section", "kind", "params", "code"),
    [
        ("optimizer", "SGD", {"momentm": 0.9}, "DS113"),
        ("scheduler", "StepLR", {"step_size": 1, "gama": 0.9}, "DS123"),
        ("scheduler", "StepLR", {}, "DS124"),
        ("scheduler", "CosineAnnealingLR", {"eta_min": 0}, "DS124"),
    ],
)
def test_arguments_of_torch_classes_are_known(
    section: str, kind: str, params: dict[str, Any], code: str
) -> None:
    assert [finding.code for finding in lint(config(section, kind, params))] == [code]
