"""DS4xx: what is kept in host memory or on NVMe."""

from __future__ import annotations

from collections.abc import Iterator

from ds_toolkit.config.rules.registry import rule
from ds_toolkit.config.subject import Config, json_pointer
from ds_toolkit.findings import Severity
from ds_toolkit.rules import Problem

# The lowest stage at which DeepSpeed acts on the section.
_LOWEST_STAGE = {"offload_optimizer": 1, "offload_param": 3}


@rule("DS401", "offload-below-its-stage", Severity.WARNING)
def offload_below_its_stage(config: Config) -> Iterator[Problem]:
    """Weights can be offloaded at ZeRO stage 3 only, optimizer states from stage 1 on.

    Below that stage DeepSpeed accepts the section and leaves everything on the GPU.

    Bad:
        {"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}
    Bad:
        {"train_batch_size": 8, "zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}
    Good:
        {"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    """
    stage = config.zero_stage
    if stage is None:
        return
    for key, lowest in _LOWEST_STAGE.items():
        device = config.section("zero_optimization", key).get("device", "none")
        # "auto" is dropped by DeepSpeed, which leaves the default.
        if device not in ("none", "auto", None) and stage < lowest:
            message = f"`{key}` has no effect at stage {stage}"
            fix = f"use stage {lowest}{'' if lowest == 3 else ' or higher'}, or remove it"
            yield Problem(json_pointer("zero_optimization", key), message, fix)
