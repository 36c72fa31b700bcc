"""DS0xx: keys that DeepSpeed does not know, or knows no longer."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator

from ds_toolkit.config.guard_settings import SECTION
from ds_toolkit.config.rules.registry import rule
from ds_toolkit.config.schema import (
    REMOVED_TOP_LEVEL_KEYS,
    REMOVED_ZERO_KEYS,
    TOP_LEVEL_KEYS,
    ZERO_KEYS,
    ZERO_SHORT_NAMES,
)
from ds_toolkit.config.subject import Config, json_pointer
from ds_toolkit.findings import Severity
from ds_toolkit.rules import Problem

# difflib's ratio: 0.8 is one wrong letter in five, which no two real keys' confusion reaches by accident.
_SMALL_EDIT = 0.8


@rule("DS001", "misspelt-key", Severity.ERROR)
def misspelt_key(config: Config) -> Iterator[Problem]:
    """A top-level key is a small edit away from one that DeepSpeed reads, so it is taken for a slip.

    DeepSpeed ignores unknown keys at the top level in silence: the run starts with the default instead.
    With `zero_optimisation` it trains without ZeRO.

    Bad:
        {"train_batch_size": 8, "zero_optimisation": {"stage": 3}}
    Good:
        {"train_batch_size": 8, "zero_optimization": {"stage": 3}}
    """
    for key in _unknown_keys(config):
        near = _nearest(key, TOP_LEVEL_KEYS)
        if near and key not in ZERO_KEYS:
            message = f"DeepSpeed does not know `{key}` and ignores it"
            yield Problem(json_pointer(key), message, f"did you mean `{near}`?")


@rule("DS002", "unknown-key", Severity.WARNING)
def unknown_key(config: Config) -> Iterator[Problem]:
    """A top-level key is none that DeepSpeed reads, and not like one: it has no effect.

    Keys of one's own are left alone when they begin with `_` or `x-`; so are `$schema` and `ds_toolkit`.

    Bad:
        {"train_batch_size": 8, "experiment": "second try"}
    Good:
        {"train_batch_size": 8, "x-experiment": "second try", "_note": "ours", "$schema": "x.json"}
    """
    for key in _unknown_keys(config):
        if not _nearest(key, TOP_LEVEL_KEYS) and key not in ZERO_KEYS:
            message = f"DeepSpeed does not know `{key}` and ignores it"
            yield Problem(json_pointer(key), message, f"remove it, or call it `x-{key}`")


@rule("DS003", "removed-key", Severity.ERROR)
def removed_key(config: Config) -> Iterator[Problem]:
    """A feature is gone from DeepSpeed, and its key is refused at the start, even when it says `false`.

    Bad:
        {"train_batch_size": 8, "amp": {"enabled": false}}
    Bad:
        {"train_batch_size": 8, "zero_optimization": {"stage": 3, "mics_shard_size": 8}}
    Good:
        {"train_batch_size": 8, "bf16": {"enabled": true}}
    """
    for path, removed in (((), REMOVED_TOP_LEVEL_KEYS), (("zero_optimization",), REMOVED_ZERO_KEYS)):
        for key in config.section(*path):
            if key in removed:
                yield Problem(json_pointer(*path, key), f"DeepSpeed no longer has `{key}`", removed[key])


@rule("DS004", "unknown-section-key", Severity.ERROR)
def unknown_section_key(config: Config) -> Iterator[Problem]:
    """A key inside `zero_optimization` is none that DeepSpeed knows; it refuses to start.

    Bad:
        {"train_batch_size": 8, "zero_optimization": {"stage": 2, "overlap_com": true}}
    Good:
        {"train_batch_size": 8, "zero_optimization": {"stage": 2, "overlap_comm": true}}
    """
    known = {*ZERO_KEYS, *ZERO_SHORT_NAMES}
    for key in config.section("zero_optimization"):
        if key in known or key in REMOVED_ZERO_KEYS:
            continue
        near = _nearest(key, known)
        if near:
            fix = f"did you mean `{near}`?"
        else:
            fix = f"`{key}` belongs at the top level" if key in TOP_LEVEL_KEYS else "remove it"
        message = f"DeepSpeed refuses `{key}` in `zero_optimization`"
        yield Problem(json_pointer("zero_optimization", key), message, fix)


@rule("DS005", "misplaced-key", Severity.ERROR)
def misplaced_key(config: Config) -> Iterator[Problem]:
    """A key of `zero_optimization` stands at the top level, where DeepSpeed ignores it in silence.

    Bad:
        {"train_batch_size": 8, "offload_optimizer": {"device": "cpu"}, "zero_optimization": {"stage": 2}}
    Good:
        {"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    """
    for key in _unknown_keys(config):
        if key in ZERO_KEYS:
            message = f"DeepSpeed ignores `{key}` at the top level"
            yield Problem(json_pointer(key), message, "move it into `zero_optimization`")


def _unknown_keys(config: Config) -> Iterator[str]:
    for key in config.data:
        private = key in ("$schema", SECTION) or key.startswith(("_", "x-"))
        if not private and key not in TOP_LEVEL_KEYS and key not in REMOVED_TOP_LEVEL_KEYS:
            yield key


def _nearest(key: str, known: Iterable[str]) -> str | None:
    # Case, blanks and dashes are slips whatever the length of the key.
    plain = key.strip().lower().replace("-", "_").replace(" ", "_")
    return next(iter(difflib.get_close_matches(plain, list(known), n=1, cutoff=_SMALL_EDIT)), None)
