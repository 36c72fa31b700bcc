"""DS2xx: what ZeRO partitions."""

from __future__ import annotations

from collections.abc import Iterator

from ds_toolkit.config.rules.registry import rule
from ds_toolkit.config.subject import Config, json_pointer
from ds_toolkit.findings import Severity
from ds_toolkit.rules import Problem


@rule("DS201", "no-such-stage", Severity.ERROR)
def no_such_stage(config: Config) -> Iterator[Problem]:
    """The ZeRO stage is none of 0, 1, 2 and 3.

    DeepSpeed drops `"auto"` in silence and trains at stage 0; other values stop it at the start.

    Bad:
        {"train_batch_size": 8, "zero_optimization": {"stage": "auto"}}
    Good:
        {"train_batch_size": 8, "zero_optimization": {"stage": 2}}
    """
    if config.zero_stage is None:
        stage = config.section("zero_optimization")["stage"]
        message = f"`{stage}` is not a ZeRO stage"
        if stage == "auto":
            message += ": DeepSpeed drops it and trains at stage 0"
        yield Problem(json_pointer("zero_optimization", "stage"), message, "write 0, 1, 2 or 3")
