"""DS4xx: what is kept in host memory or on NVMe."""

from __future__ import annotations

from collections.abc import Iterator

from ds_toolkit.config.rules.registry import rule
from ds_toolkit.config.subject import Config, is_true, json_pointer, whole_number
from ds_toolkit.findings import Severity
from ds_toolkit.rules import Problem

_ZERO = "zero_optimization"
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
        device = config.section(_ZERO, key).get("device", "none")
        if device in ("cpu", "nvme") and stage < lowest:
            message = f"`{key}` has no effect at stage {stage}"
            fix = f"use stage {lowest}{'' if lowest == 3 else ' or higher'}, or remove it"
            yield Problem(json_pointer(_ZERO, key), message, fix)


@rule("DS402", "nvme-without-path", Severity.ERROR)
def nvme_without_path(config: Config) -> Iterator[Problem]:
    """Something is offloaded to NVMe and no folder is named; DeepSpeed fails later, over a NoneType.

    Bad:
        {"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}
    Good:
        {"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme",
         "nvme_path": "/local_nvme"}}}
    """
    for key in _LOWEST_STAGE:
        section = config.section(_ZERO, key)
        if section.get("device") == "nvme" and config.zero_stage == 3 and not section.get("nvme_path"):
            yield Problem(
                json_pointer(_ZERO, key),
                f"`{key}` has no `nvme_path`",
                'add "nvme_path": a folder on a local NVMe disk',
            )


@rule("DS403", "nvme-below-stage-three", Severity.WARNING)
def nvme_below_stage_three(config: Config) -> Iterator[Problem]:
    """At stages 1 and 2 optimizer states for NVMe stay in host memory, without a word.

    Bad:
        {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
         "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}}
    Good:
        {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
         "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}}
    """
    device = config.section(_ZERO, "offload_optimizer").get("device")
    if device == "nvme" and config.zero_stage in (1, 2):
        message = f"stage {config.zero_stage} keeps the states in host memory instead of NVMe"
        yield Problem(json_pointer(_ZERO, "offload_optimizer", "device"), message, "use stage 3, or cpu")


@rule("DS404", "partial-offload-below-stage-three", Severity.ERROR)
def partial_offload_below_stage_three(config: Config) -> Iterator[Problem]:
    """`offload_optimizer.ratio` below 1 is for stage 3; DeepSpeed refuses it at the others.

    Bad:
        {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
         "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}
    Good:
        {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
         "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}
    """
    ratio = _number(config.section(_ZERO, "offload_optimizer").get("ratio"))
    if ratio is not None and 0 <= ratio < 1 and config.zero_stage in (0, 1, 2):
        pointer = json_pointer(_ZERO, "offload_optimizer", "ratio")
        yield Problem(
            pointer, f"stage {config.zero_stage} cannot offload a part", "use stage 3, or remove it"
        )


@rule("DS405", "path-without-nvme", Severity.WARNING)
def path_without_nvme(config: Config) -> Iterator[Problem]:
    """A folder on NVMe is named, but the device is not `nvme`: nothing goes there.

    Bad:
        {"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu",
         "nvme_path": "/local_nvme"}}}
    Good:
        {"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme",
         "nvme_path": "/local_nvme"}}}
    """
    for key in _LOWEST_STAGE:
        section = config.section(_ZERO, key)
        if section.get("nvme_path") not in (None, "auto") and section.get("device") not in ("nvme", "auto"):
            pointer = json_pointer(_ZERO, key, "nvme_path")
            yield Problem(pointer, "`nvme_path` has no effect: the device is not nvme", "remove it")


@rule("DS406", "super-offload-below-stage-three", Severity.WARNING)
def super_offload_below_stage_three(config: Config) -> Iterator[Problem]:
    """SuperOffload works at stage 3; elsewhere the switch has no effect.

    Bad:
        {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
         "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "super_offload": true}}}
    Good:
        {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
         "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": true}}}
    """
    if is_true(config.section(_ZERO, "offload_optimizer").get("super_offload")) and config.zero_stage in (
        1,
        2,
    ):
        pointer = json_pointer(_ZERO, "offload_optimizer", "super_offload")
        yield Problem(pointer, f"`super_offload` has no effect at stage {config.zero_stage}", "use stage 3")


@rule("DS407", "zenflow-without-offload", Severity.ERROR)
def zenflow_without_offload(config: Config) -> Iterator[Problem]:
    """ZenFlow steps on the CPU, and needs an optimizer that is offloaded there.

    Bad:
        {"train_batch_size": 8, "zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}
    Good:
        {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
         "zero_optimization": {"stage": 2, "zenflow": {}, "offload_optimizer": {"device": "cpu"}}}
    """
    zenflow = config.zero.get("zenflow")
    if zenflow not in (None, "auto") and config.offload_device("offload_optimizer") != "cpu":
        fix = 'add "offload_optimizer": {"device": "cpu"}'
        yield Problem(json_pointer(_ZERO, "zenflow"), "ZenFlow needs an optimizer offloaded to the CPU", fix)


@rule("DS408", "zenflow-sets-accumulation", Severity.WARNING)
def zenflow_sets_accumulation(config: Config) -> Iterator[Problem]:
    """ZenFlow's `update_interval` takes the place of the accumulation; the batch is not recomputed.

    Bad:
        {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8,
         "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "zero_optimization": {"stage": 2,
         "zenflow": {"update_interval": 4}, "offload_optimizer": {"device": "cpu"}}}
    Good:
        {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4,
         "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "zero_optimization": {"stage": 2,
         "zenflow": {"update_interval": 4}, "offload_optimizer": {"device": "cpu"}}}
    """
    interval = whole_number(config.section(_ZERO, "zenflow").get("update_interval"))
    accumulation = config.integer("gradient_accumulation_steps") or 1
    if interval is not None and interval != accumulation:
        message = f"ZenFlow makes the accumulation {interval} instead of {accumulation}"
        fix = f'write "gradient_accumulation_steps": {interval}'
        yield Problem(json_pointer(_ZERO, "zenflow", "update_interval"), message, fix)


@rule("DS409", "aio-without-nvme", Severity.WARNING)
def aio_without_nvme(config: Config) -> Iterator[Problem]:
    """`aio` tunes reads and writes on NVMe, and nothing goes there.

    Bad:
        {"train_batch_size": 8, "aio": {"block_size": 1048576}, "zero_optimization": {"stage": 3}}
    Good:
        {"train_batch_size": 8, "aio": {"block_size": 1048576}, "zero_optimization": {"stage": 3,
         "offload_param": {"device": "nvme", "nvme_path": "/local_nvme"}}}
    """
    devices = [config.section(_ZERO, key).get("device") for key in _LOWEST_STAGE]
    used = "nvme" in devices or "auto" in devices or "writer" in config.section("checkpoint")
    if config.section("aio") and not used:
        yield Problem("/aio", "`aio` has no effect: nothing is offloaded to NVMe", "remove it")


def _number(value: object) -> float | None:
    try:
        return float(value) if isinstance(value, int | float | str) else None
    except ValueError:
        return None
