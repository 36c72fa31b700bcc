"""Rules about optimizers and schedulers where their examples leave a case out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ds_toolkit.config.consumers import Consumer
from ds_toolkit.config.linter import lint
from ds_toolkit.config.reader import read_config_text
from ds_toolkit.findings import Severity

OFFLOADED = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}


def config(
    optimizer: dict[str, Any] | None = None, scheduler: dict[str, Any] | None = None
) -> dict[str, Any]:
    sections = {"optimizer": optimizer, "scheduler": scheduler}
    return {"train_batch_size": 8, **{key: value for key, value in sections.items() if value}}


def made(kind: str, **params: Any) -> dict[str, Any]:
    return {"type": kind, "params": params}


@pytest.mark.parametrize(
    ("optimizer", "rest", "message"),
    [
        (
            made("AdamW", lr=0.1, foreach=True),
            {},
            "FusedAdam, used unless `torch_adam` is true or the optimizer is offloaded, takes no `foreach`",
        ),
        (
            made("Adam", lr=0.1, set_grad_none=True),
            OFFLOADED,
            "DeepSpeedCPUAdam, used because the optimizer is offloaded, takes no `set_grad_none`",
        ),
        (
            made("Adagrad", lr=0.1, lr_decay=0.1),
            OFFLOADED,
            "DeepSpeedCPUAdagrad, used because the optimizer is offloaded, takes no `lr_decay`",
        ),
        (made("Adagrad", lr=0.1, amsgrad=True), {}, "torch's Adagrad takes no `amsgrad`"),
        (made("Lion", lr=0.1, fp32_optimizer_states=True), {}, "FusedLion takes no `fp32_optimizer_states`"),
        (
            made("Lion", lr=0.1, set_grad_none=True),
            OFFLOADED,
            "DeepSpeedCPULion, used because the optimizer is offloaded, takes no `set_grad_none`",
        ),
    ],
)
def test_the_picked_implementation_is_named(
    optimizer: dict[str, Any], rest: dict[str, Any], message: str
) -> None:
    (finding,) = lint({**config(optimizer), **rest})
    assert (finding.code, finding.message) == ("DS130", message)


@pytest.mark.parametrize(
    ("optimizer", "rest"),
    [
        (made("AdamW", lr=0.1, fp32_optimizer_states=True, adam_w_mode=False), {}),
        (made("AdamW", lr=0.1, torch_adam=True, foreach=True, maximize=False), OFFLOADED),
        (made("Adagrad", lr=0.1, lr_decay=0.1), {}),
        (made("Adagrad", lr=0.1, amsgrad=True), OFFLOADED),
        (made("Lion", lr=0.1, fp32_optimizer_states=False), OFFLOADED),
        (made("SGD", lr=0.1, foreach=True), {}),
    ],
)
def test_what_the_picked_implementation_takes_is_right(
    optimizer: dict[str, Any], rest: dict[str, Any]
) -> None:
    assert lint({**config(optimizer), **rest}) == []


def test_a_zero_beta_is_right_where_json_is_read_as_it_is() -> None:
    optimizer = made("AdamW", lr=0.1, torch_adam=True, betas=[0, 0.9])
    assert [finding.code for finding in lint(config(optimizer))] == ["DS133"]
    assert lint(config(made("AdamW", lr=0.1, torch_adam=True, betas=[0.0, 0.9]))) == []
    for written, codes in (("[0, 0.9]", ["DS133"]), ("[0.0, 0.9]", [])):
        data = config(optimizer) | {"zero_optimization": {"stage": 1}}
        document = read_config_text(json.dumps(data).replace("[0, 0.9]", written))
        assert [finding.code for finding in lint(document)] == ["DS133"]
        for consumer in (Consumer.HF, Consumer.ACCELERATE):
            assert [finding.code for finding in lint(document, consumer=consumer)] == codes


@pytest.mark.parametrize("written", ["1e3", "1E+3", "1000.0"])
def test_warmup_steps_that_json_makes_a_fraction_of_are_wrong_where_it_is_read_as_it_is(written: str) -> None:
    scheduler = made("WarmupLR", warmup_num_steps=json.loads(written))
    data = config(made("AdamW", lr=0.1), scheduler) | {"zero_optimization": {"stage": 1}}
    document = read_config_text(json.dumps(data).replace("1000.0", written))
    assert lint(document) == []
    for consumer in (Consumer.HF, Consumer.ACCELERATE):
        (finding,) = lint(document, consumer=consumer)
        assert (finding.code, finding.fix) == ("DS126", "write 1000")


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "code", "severity"),
    [
        (made("SparseAdam", lr=0.1), None, "DS132", Severity.WARNING),
        (made("SGD", lr=0.1, nesterov=True, momentum=0.9, dampening=0.1), None, "DS134", Severity.ERROR),
        (None, made("OneCycleLR", max_lr=0.1, total_steps=9, epochs=2), "DS144", Severity.WARNING),
        (None, made("ChainedScheduler"), "DS142", Severity.ERROR),
        (None, made("LRScheduler"), "DS142", Severity.ERROR),
        (
            None,
            made("OneCycle", cycle_min_lr=1, cycle_max_lr=2, decay_mom_rate=0.1),
            "DS153",
            Severity.WARNING,
        ),
        (None, made("CyclicLR", base_lr=0.2, max_lr=0.1), "DS151", Severity.WARNING),
        (
            made("AdamW", lr=0.1),
            made("WarmupLR", warmup_max_lr=0.2, warmup_num_steps=5),
            "DS152",
            Severity.INFO,
        ),
    ],
)
def test_what_the_examples_leave_out(
    optimizer: dict[str, Any] | None, scheduler: dict[str, Any] | None, code: str, severity: Severity
) -> None:
    (finding,) = lint(config(optimizer, scheduler))
    assert (finding.code, finding.severity) == (code, severity)
    assert finding.fix


@pytest.mark.parametrize(
    "scheduler",
    [
        made("WarmupLR", warmup_num_steps=5),
        made("WarmupLR", warmup_num_steps=5, warmup_max_lr="auto"),
        made("WarmupDecayLR", total_num_steps=2000, warmup_max_lr=[0.1, 0.2]),
        made("WarmupCosineLR", total_num_steps=2000),
    ],
)
def test_a_peak_that_is_the_optimizers_or_not_one_number_is_right(scheduler: dict[str, Any]) -> None:
    found = lint(config(made("AdamW", lr=0.1), scheduler), consumer=Consumer.HF)
    assert "DS152" not in {finding.code for finding in found}


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
@pytest.mark.parametrize("kind", [[], {}, None, 3, True])
def test_odd_types_of_a_type_do_not_crash_a_rule(section: str, kind: Any) -> None:
    params = {"betas": kind, "amsgrad": kind, "nesterov": kind, "warmup_max_lr": kind, "decay_lr_rate": kind}
    lint({"train_batch_size": 8, section: {"type": kind, "params": params}})
    for name in ("AdamW", "SGD", "OneCycle", "WarmupDecayLR", "OneCycleLR"):
        lint({"train_batch_size": 8, section: {"type": name, "params": params}})
