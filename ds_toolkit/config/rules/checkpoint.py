"""DS61x: how DeepSpeed saves and loads checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from ds_toolkit.config.rules.registry import rule
from ds_toolkit.config.subject import Config, json_pointer
from ds_toolkit.findings import Severity
from ds_toolkit.rules import Problem

_CHECKPOINT = "checkpoint"


@rule("DS611", "writer-that-cannot-be-read", Severity.ERROR)
def writer_that_cannot_be_read(config: Config) -> Iterator[Problem]:
    """DeepSpeed's own writer saves checkpoints that the same configuration cannot load again.

    With torch 2.6 and later reading them ends with an error about `weights_only`; below stage 3 the writer
    fails at the start unless `data_parallel` is set, and under torchrun for want of a variable.

    Bad:
        {"train_batch_size": 8, "checkpoint": {"writer": {"type": "FAST"}}}
    Good:
        {"train_batch_size": 8, "checkpoint": {"tag_validation": "FAIL"}}
    """
    if config.section(_CHECKPOINT, "writer"):
        message = "checkpoints of this writer cannot be loaded again"
        yield Problem(json_pointer(_CHECKPOINT, "writer"), message, "remove it")


@rule("DS612", "node-local-checkpoints", Severity.WARNING)
def node_local_checkpoints(config: Config) -> Iterator[Problem]:
    """With `use_node_local_storage` each node writes to its own disk, and no folder holds the whole.

    A node that is replaced takes its part with it, and other tools find shards missing. On a file system that
    all nodes share it is not needed.

    Bad:
        {"train_batch_size": 8, "checkpoint": {"use_node_local_storage": true}}
    Good:
        {"train_batch_size": 8, "checkpoint": {"use_node_local_storage": false}}
    """
    if config.section(_CHECKPOINT).get("use_node_local_storage") is True:
        pointer = json_pointer(_CHECKPOINT, "use_node_local_storage")
        message = "no single folder will hold the whole checkpoint"
        yield Problem(pointer, message, "save to storage that all nodes share, and remove it")


@rule("DS613", "tags-not-compared", Severity.WARNING)
def tags_not_compared(config: Config) -> Iterator[Problem]:
    """`tag_validation: Ignore` lets ranks save under different tags: a checkpoint in pieces, and no warning.

    Bad:
        {"train_batch_size": 8, "checkpoint": {"tag_validation": "Ignore"}}
    Good:
        {"train_batch_size": 8, "checkpoint": {"tag_validation": "Fail"}}
    """
    if str(config.section(_CHECKPOINT).get("tag_validation")).upper() == "IGNORE":
        message = "ranks may save under different tags without a warning"
        yield Problem(json_pointer(_CHECKPOINT, "tag_validation"), message, "write Warn or Fail")


@rule("DS614", "universal-loading-left-on", Severity.WARNING)
def universal_loading_left_on(config: Config) -> Iterator[Problem]:
    """`load_universal` is for one resume: while it is on, ordinary checkpoints cannot be loaded.

    The next resume, from a checkpoint that this run has saved, would fail.

    Bad:
        {"train_batch_size": 8, "checkpoint": {"load_universal": true}}
    Good:
        {"train_batch_size": 8, "checkpoint": {"load_universal": false}}
    """
    if config.section(_CHECKPOINT).get("load_universal") is True:
        message = "only universal checkpoints can be loaded while this is on"
        yield Problem(json_pointer(_CHECKPOINT, "load_universal"), message, "remove it after the resume")


@rule("DS615", "checkpoints-not-archives", Severity.WARNING)
def checkpoints_not_archives(config: Config) -> Iterator[Problem]:
    """`checkpoint_serialization: false` writes files that `zero_to_fp32.py` cannot read.

    Bad:
        {"train_batch_size": 8, "checkpoint": {"checkpoint_serialization": false}}
    Good:
        {"train_batch_size": 8, "checkpoint": {"checkpoint_serialization": true}}
    """
    if config.section(_CHECKPOINT).get("checkpoint_serialization") is False:
        message = "zero_to_fp32.py cannot read such checkpoints"
        yield Problem(json_pointer(_CHECKPOINT, "checkpoint_serialization"), message, "remove it")


@rule("DS616", "datastates-by-accident", Severity.ERROR)
def datastates_by_accident(config: Config) -> Iterator[Problem]:
    """Any value of `datastates_ckpt` but `false` switches the DataStates engine on, `null` and `{}` included.

    Bad:
        {"train_batch_size": 8, "datastates_ckpt": null}
    Bad:
        {"train_batch_size": 8, "datastates_ckpt": {"enabled": false}}
    Good:
        {"train_batch_size": 8, "datastates_ckpt": false}
    """
    if "datastates_ckpt" not in config.data:
        return
    value = config.data["datastates_ckpt"]
    off = isinstance(value, dict) and value.get("enabled") is False
    if (not value and value is not False) or off:
        yield Problem(
            "/datastates_ckpt", "this switches the DataStates engine on", "write false, or remove it"
        )
