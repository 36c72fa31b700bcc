"""DS6xx: settings of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from ds_toolkit.config.guard_settings import SECTION, settings_problems
from ds_toolkit.config.rules.registry import rule
from ds_toolkit.config.subject import Config, json_pointer
from ds_toolkit.findings import Severity
from ds_toolkit.rules import Problem


@rule("DS601", "bad-guard-settings", Severity.ERROR)
def bad_guard_settings(config: Config) -> Iterator[Problem]:
    """The `ds_toolkit` section holds a setting that CheckpointGuard does not have, or refuses its value.

    Bad:
        {"train_batch_size": 8, "ds_toolkit": {"save_evry": 50}}
    Bad:
        {"train_batch_size": 8, "ds_toolkit": {"save_every": "50"}}
    Good:
        {"train_batch_size": 8, "ds_toolkit": {"save_every": 50, "keep_last": 2}}
    """
    if SECTION not in config.data:
        return
    for key, message, fix in settings_problems(config.data[SECTION]):
        yield Problem(json_pointer(SECTION, key) if key else json_pointer(SECTION), message, fix)
