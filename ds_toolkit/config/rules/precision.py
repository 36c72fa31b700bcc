"""DS3xx: number formats."""

from __future__ import annotations

from collections.abc import Iterator

from ds_toolkit.config.rules.registry import rule
from ds_toolkit.config.subject import Config, json_pointer
from ds_toolkit.findings import Severity
from ds_toolkit.rules import Problem


@rule("DS301", "two-precisions", Severity.ERROR)
def two_precisions(config: Config) -> Iterator[Problem]:
    """Both fp16 and bf16 are switched on, and DeepSpeed stops at the start.

    Bad:
        {"train_batch_size": 8, "fp16": {"enabled": true}, "bf16": {"enabled": true}}
    Good:
        {"train_batch_size": 8, "fp16": {"enabled": false}, "bf16": {"enabled": true}}
    """
    # DeepSpeed reads the old name only where the new one does not stand.
    brain = "bf16" if "bf16" in config.data else "bfloat16"
    if config.is_enabled("fp16") and config.is_enabled(brain):
        message = f"`fp16` and `{brain}` are both enabled"
        yield Problem(json_pointer("fp16"), message, "keep bf16 on Ampere and later GPUs, fp16 on older ones")
