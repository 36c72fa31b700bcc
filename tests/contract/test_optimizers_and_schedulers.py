"""What the manuals of DS13x to DS15x say of DeepSpeed's engine: their examples are trained with."""

from __future__ import annotations

import functools
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import hjson
import jobs
import pytest

from ds_toolkit.config.linter import lint
from ds_toolkit.config.rules import RULES
from ds_toolkit.config.schema import optimization, torch_values
from ds_toolkit.config.schema.torch_classes import TORCH_SCHEDULERS

WORKER = Path(__file__).with_name("engine_cases_worker.py")
# Bad examples of these stop the engine, at its start or at the first step.
STOPPED = ("DS130", "DS131", "DS132", "DS133", "DS134", "DS135", "DS141", "DS142", "DS144")


def is_compiled(config: dict[str, Any]) -> bool:
    """Whether DeepSpeed would first have to compile the optimizer of a good example."""
    optimizer = config.get("optimizer", {})
    return optimizer.get("type", "SGD") in ("AdamW", "Lamb") and "torch_adam" not in optimizer["params"]


EXAMPLES = [
    (code, kind, config)
    for code in STOPPED
    for kind in ("bad", "good")
    for example in getattr(RULES[code], kind)
    for config in [hjson.loads(example.text, object_pairs_hook=dict)]
    if kind == "bad" or not is_compiled(config)
]


def config_of(code: str, kind: str, number: int = 0, **params: Any) -> dict[str, Any]:
    """A configuration from a manual, with other params for the scheduler, and torch's own optimizer."""
    config: dict[str, Any] = hjson.loads(getattr(RULES[code], kind)[number].text, object_pairs_hook=dict)
    config["scheduler"]["params"].update(params)
    if "optimizer" in config:
        config["optimizer"]["params"]["torch_adam"] = True
    return config


CURVES = {
    "swapped": (config_of("DS151", "bad", warmup_num_steps=3), 4, False),
    "upside down": (config_of("DS151", "bad", 1, cycle_first_step_size=3), 4, False),
    "default peak": (config_of("DS152", "bad", warmup_num_steps=2), 5, False),
    "own peak": (config_of("DS152", "good", warmup_num_steps=2), 5, False),
    "rate alone": (config_of("DS153", "bad", cycle_first_step_size=1), 6, False),
    "interval alone": (config_of("DS153", "bad", 1, cycle_first_step_size=1), 6, False),
    "both": (config_of("DS153", "good", cycle_first_step_size=1), 6, False),
    "cycled betas": (config_of("DS154", "bad"), 2, False),
    "kept betas": (config_of("DS154", "good"), 2, False),
    "no metric": (config_of("DS143", "bad"), 13, False),
    "metric": (config_of("DS143", "bad"), 13, True),
    "too long a cycle": (config_of("DS144", "good", total_steps=2), 3, False),
}


@functools.cache
def outcomes() -> list[dict[str, Any]]:
    """What real engines say to all cases; one process for all."""
    cases = [{"config": config, "steps": 2, "metrics": False} for _, _, config in EXAMPLES]
    cases += [
        {"config": config, "steps": steps, "metrics": given} for config, steps, given in CURVES.values()
    ]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    finished = subprocess.run(
        [sys.executable, WORKER],
        input=json.dumps(cases),
        env={**os.environ, **alone, "MASTER_PORT": str(jobs.free_port()), "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    answer: list[dict[str, Any]] = json.loads(finished.stdout)
    assert len(answer) == len(cases)
    return answer


@pytest.mark.parametrize(
    "number", range(len(EXAMPLES)), ids=[f"{code}-{kind}-{at}" for at, (code, kind, _) in enumerate(EXAMPLES)]
)
def test_the_engine_stops_at_the_bad_examples_and_not_at_the_good_ones(number: int) -> None:
    _, kind, _ = EXAMPLES[number]
    stopped = outcomes()[number]["stopped"]
    assert (stopped is not None) is (kind == "bad"), stopped


def test_the_engine_stops_for_the_reason_that_the_manuals_give() -> None:
    reasons: dict[str, list[str]] = {}
    for (code, kind, _), answer in zip(EXAMPLES, outcomes(), strict=False):
        if kind == "bad":
            reasons.setdefault(code, []).append(answer["stopped"])
    for code, says in {
        "DS130": "unexpected keyword argument",
        "DS132": "'closure'",
        "DS133": "betas must be either both floats or both Tensors",
        "DS134": "Nesterov momentum requires a momentum",
        "DS135": "Hybrid Optimizer Only Supports DeepSpeedCPUAdam",
        "DS141": "is not an Optimizer",
        "DS144": "You must define either total_steps OR (epochs AND steps_per_epoch)",
    }.items():
        assert all(says in reason for reason in reasons[code]), reasons[code]
    assert "does not support the AMSGrad variant" in reasons["DS131"][0]


def curve(name: str) -> dict[str, Any]:
    return outcomes()[len(EXAMPLES) + list(CURVES).index(name)]


def test_swapped_bounds_fall_where_they_should_rise() -> None:
    for name in ("swapped", "upside down"):
        assert curve(name)["stopped"] is None
        assert curve(name)["rates"][0] > curve(name)["rates"][2]


def test_the_decaying_warmup_has_a_peak_of_its_own() -> None:
    assert max(curve("default peak")["rates"]) == 0.001
    assert max(curve("own peak")["rates"]) == 1e-4


def test_a_cycle_decays_with_rate_and_interval_only() -> None:
    for name in ("rate alone", "interval alone"):
        assert set(curve(name)["rates"][2:]) == {1e-5}
    rates = curve("both")["rates"]
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[-1] < 1e-5


def test_a_cycle_replaces_the_betas() -> None:
    assert curve("cycled betas")["betas"][-1][1] == 0.99
    assert curve("kept betas")["betas"][-1] == [0.9, 0.95]


def test_without_a_metric_a_plateau_is_seen_every_eleven_steps() -> None:
    rates = curve("no metric")["rates"]
    assert rates[0] == 0.1
    assert rates[-1] == pytest.approx(0.01)
    assert set(curve("metric")["rates"]) == {0.1}


def test_a_cycle_of_torchs_cannot_be_outrun() -> None:
    assert "The specified number of total steps is 2" in curve("too long a cycle")["stopped"]
    assert len(curve("too long a cycle")["rates"]) == 2


def test_implementations_take_what_we_say(deepspeed: ModuleType) -> None:
    import torch
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

    classes = {
        "adam": {"fused": FusedAdam, "cpu": DeepSpeedCPUAdam, "torch": torch.optim.Adam},
        "adamw": {"fused": FusedAdam, "cpu": DeepSpeedCPUAdam, "torch": torch.optim.AdamW},
        "adagrad": {"torch": torch.optim.Adagrad, "cpu": DeepSpeedCPUAdagrad},
        "lion": {"fused": FusedLion, "cpu": DeepSpeedCPULion},
    }
    # What the engine takes out before, or says itself.
    by_engine = {"self", "params", "model_params", "adam_w_mode", "adamw_mode"}
    for name, implementations in classes.items():
        assert optimization.IMPLEMENTATIONS[name].keys() == implementations.keys()
        for key, made in implementations.items():
            takes = set(inspect.signature(made.__init__).parameters) - by_engine
            if name in ("adam", "adamw"):
                takes -= {"fp32_optimizer_states"}
            if name in ("adam", "adamw") and key == "torch":
                takes -= {"decoupled_weight_decay"}
            assert optimization.IMPLEMENTATIONS[name][key] == takes, (name, key)


def test_the_cpus_adam_refuses_amsgrad_too(deepspeed: ModuleType) -> None:
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    config = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "amsgrad": True}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    (finding,) = lint(config)
    assert finding.message == "DeepSpeedCPUAdam has no AMSGrad variant"
    with pytest.raises(RuntimeError, match="does not support the AMSGrad variant"):
        DeepSpeedCPUAdam([torch.nn.Parameter(torch.ones(2))], amsgrad=True)


def test_every_scheduler_of_torch_is_known() -> None:
    import torch

    scheduler = torch.optim.lr_scheduler
    in_torch = {
        name
        for name, made in vars(scheduler).items()
        if isinstance(made, type) and issubclass(made, scheduler.LRScheduler) and name[0] != "_"
    }
    assert in_torch == TORCH_SCHEDULERS.keys() | torch_values.NEEDS_OBJECTS.keys()
    for name, values in torch_values.TORCH_SCHEDULER_VALUES.items():
        assert values.keys() == TORCH_SCHEDULERS[name]
    without = TORCH_SCHEDULERS.keys() - torch_values.TORCH_SCHEDULER_VALUES.keys()
    assert without == TORCH_SCHEDULERS.keys() & torch_values.NEEDS_OBJECTS.keys()


# Arguments that a scheduler cannot do without, and with which each of them works.
NEEDED: dict[str, dict[str, Any]] = {
    "CosineAnnealingLR": {"T_max": 10},
    "CosineAnnealingWarmRestarts": {"T_0": 5},
    "CyclicLR": {"base_lr": 0.1, "max_lr": 0.2},
    "ExponentialLR": {"gamma": 0.9},
    "MultiStepLR": {"milestones": [1, 2]},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 9},
    "StepLR": {"step_size": 2},
}
# What the linter refuses and torch takes: training with it makes no sense.
SENSELESS: set[tuple[str, str, str]] = {
    ("StepLR", "step_size", "1.5"),
    ("StepLR", "step_size", "-2"),
    ("StepLR", "step_size", "True"),
    ("StepLR", "gamma", "-1"),
    ("MultiStepLR", "gamma", "-1"),
    ("MultiStepLR", "milestones", "['1', '2']"),
    ("ExponentialLR", "gamma", "-1"),
    ("ConstantLR", "total_iters", "0"),
    ("ConstantLR", "total_iters", "'3'"),
    ("LinearLR", "total_iters", "0"),
    ("LinearLR", "total_iters", "2.5"),
    ("PolynomialLR", "total_iters", "0"),
    ("CosineAnnealingLR", "T_max", "-5"),
    ("CosineAnnealingLR", "T_max", "1.5"),
    ("CosineAnnealingLR", "eta_min", "-1"),
    ("CyclicLR", "scale_mode", "'x'"),
    ("CyclicLR", "base_momentum", "1.5"),
    ("OneCycleLR", "div_factor", "-1"),
    ("ReduceLROnPlateau", "factor", "-1"),
}
VALUES: list[tuple[str, str, Any]] = [
    *(("StepLR", "step_size", value) for value in (2, 0, "10", 1.5, -2, True, None)),
    *((kind, "gamma", value) for kind in ("StepLR", "MultiStepLR") for value in (0.5, "0.5", -1, 2)),
    *(("ExponentialLR", "gamma", value) for value in (0.9, "0.9", None, -1)),
    *(("MultiStepLR", "milestones", value) for value in ([1, 2], [1.0], [], 2, ["1", "2"])),
    *(("ConstantLR", "factor", value) for value in (0.5, 1, 2, -1, 0)),
    *(("ConstantLR", "total_iters", value) for value in (3, 0, "3")),
    *(("LinearLR", "start_factor", value) for value in (0.5, 1, 0, 2)),
    *(("LinearLR", "end_factor", value) for value in (0, 1, 2, -1)),
    *(("LinearLR", "total_iters", value) for value in (3, 0, 2.5)),
    *(("PolynomialLR", "total_iters", value) for value in (5, 0, "5")),
    *(("PolynomialLR", "power", value) for value in (2, 0.5, "1", -1)),
    *(("CosineAnnealingLR", "T_max", value) for value in (10, 0, "10", -5, 1.5)),
    *(("CosineAnnealingLR", "eta_min", value) for value in (0, 0.01, "0", -1)),
    *(("CosineAnnealingWarmRestarts", "T_0", value) for value in (5, 0, 1.5, "5")),
    *(("CosineAnnealingWarmRestarts", "T_mult", value) for value in (1, 2, 0, 1.5)),
    *(("CyclicLR", "base_lr", value) for value in (0.1, [0.1], "0.1")),
    *(("CyclicLR", "mode", value) for value in ("triangular2", "saw")),
    *(("CyclicLR", "step_size_up", value) for value in (10, "10", 0, "x")),
    *(("CyclicLR", "step_size_down", value) for value in (10, None, 0, "x")),
    *(("CyclicLR", "scale_fn", value) for value in (None, "x")),
    *(("CyclicLR", "scale_mode", value) for value in ("cycle", "iterations", "x")),
    *(("CyclicLR", "base_momentum", value) for value in (0.8, 1.5)),
    *(("OneCycleLR", "max_lr", value) for value in (0.1, [0.1], "0.1")),
    *(("OneCycleLR", "total_steps", value) for value in (9, 0, 9.5, "9")),
    *(("OneCycleLR", "pct_start", value) for value in (0.3, 0.0, 1.0, 0, 1, 30)),
    *(("OneCycleLR", "anneal_strategy", value) for value in ("cos", "linear", "cosine")),
    *(("OneCycleLR", "div_factor", value) for value in (25, 0, -1)),
    *(("OneCycleLR", "final_div_factor", value) for value in (10, 0)),
    *(("ReduceLROnPlateau", "factor", value) for value in (0.1, 1, "0.1", -1)),
    *(("ReduceLROnPlateau", "mode", value) for value in ("min", "max", "loss")),
    *(("ReduceLROnPlateau", "threshold_mode", value) for value in ("rel", "x")),
    *(("ReduceLROnPlateau", "patience", value) for value in (0, 3, "3")),
    *((kind, "last_epoch", value) for kind in ("StepLR", "LinearLR") for value in (-1, 5)),
]


@pytest.mark.parametrize(("kind", "key", "value"), VALUES)
def test_torchs_schedulers_take_what_the_linter_takes(kind: str, key: str, value: Any) -> None:
    import torch

    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    try:
        scheduler = getattr(torch.optim.lr_scheduler, kind)(optimizer, **{**NEEDED.get(kind, {}), key: value})
        for _ in range(8):
            optimizer.step()
            scheduler.step(*([1.0] if kind == "ReduceLROnPlateau" else []))
        works = True
    except Exception:
        works = False
    takes = torch_values.TORCH_SCHEDULER_VALUES[kind][key].takes(value)
    if (kind, key, repr(value)) in SENSELESS:
        assert works
        assert not takes
    else:
        assert takes is works
