"""Params that the linter refuses stop DeepSpeed's schedulers and torch's optimizers, and others do not."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from ds_toolkit.config.schema import param_values

OPTIMIZERS: list[tuple[str, str, Any, bool]] = [
    *(("AdamW", "lr", value, value in (0, 1e-4)) for value in (0, 1e-4, "1e-4", None, -1)),
    *(("AdamW", "weight_decay", value, value == 0) for value in (0, "0.1", -0.1, None)),
    *(("AdamW", "eps", value, value == 1e-8) for value in (1e-8, -1, "1e-8")),
    *(("AdamW", "betas", value, value == [0.0, 0.9]) for value in ([0.0, 0.9], 0.9, [0.9] * 3, [1.0, 0.9])),
    *(("SGD", "momentum", value, value == 1.5) for value in (1.5, -1, "0.9")),
    *(("RMSprop", "alpha", value, value == 1.5) for value in (1.5, -1, "0.9")),
    *(("Adadelta", "rho", value, value in (0, 1)) for value in (0, 1, 1.5, -1, "0.9")),
    *(("ASGD", key, value, value == 0.5) for key in ("alpha", "lambd") for value in (0.5, "0.5")),
    *(("NAdam", "momentum_decay", value, value == 0.1) for value in (0.1, -1, "0.1")),
    *(("Adafactor", "d", value, value == 1) for value in (1, 0.5, "1")),
    *(("Adafactor", "beta2_decay", value, value in (0, -0.8)) for value in (0, -0.8, 0.5, "0")),
    *(
        ("Rprop", "step_sizes", value, value == [0.0, 50])
        for value in ([0.0, 50], [1], [1, 2, 3], 1, [1, "2"])
    ),
]
SCHEDULERS: list[tuple[str, str, Any, bool]] = [
    *(("WarmupLR", "warmup_max_lr", value, value in (None, 0.1)) for value in (None, 0.1, "1e-4")),
    *(("WarmupDecayLR", "total_num_steps", value, value == 10) for value in (10, "1000", None)),
    *(("OneCycle", "cycle_first_step_size", value, value in (5, "5")) for value in (5, "5", 0, -1, None)),
    *(("OneCycle", "cycle_second_step_size", value, value in (None, 5)) for value in (None, 5, -1)),
    *(("LRRangeTest", "lr_range_test_step_size", value, value == 5) for value in (5, 0, 1.5, "5")),
]


def runs(make_and_step: Any) -> bool:
    try:
        make_and_step()
    except Exception:
        return False
    return True


@pytest.mark.parametrize(("kind", "key", "value", "right"), OPTIMIZERS)
def test_torch_takes_what_the_linter_takes(kind: str, key: str, value: Any, right: bool) -> None:
    import torch

    def make_and_step() -> None:
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = getattr(torch.optim, kind)([weight], **{"lr": 0.1, key: value})
        weight.grad = torch.ones(2)
        optimizer.step()

    known = param_values.OTHER_MEANINGS.get((kind, key), param_values.OPTIMIZER_VALUES[key])
    assert known is not None
    assert runs(make_and_step) is right
    assert known.takes(value) is right


@pytest.mark.parametrize(("kind", "key", "value", "right"), SCHEDULERS)
def test_deepspeed_takes_what_the_linter_takes(
    kind: str, key: str, value: Any, right: bool, deepspeed: ModuleType
) -> None:
    import torch
    from deepspeed.runtime import lr_schedules

    needed = {
        "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2},
        "WarmupDecayLR": {"total_num_steps": 10},
    }

    def make_and_step() -> None:
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        scheduler = getattr(lr_schedules, kind)(optimizer, **{**needed.get(kind, {}), key: value})
        for _ in range(3):
            scheduler.step()

    assert runs(make_and_step) is right
    assert param_values.SCHEDULER_VALUES[key].takes(value) is right
