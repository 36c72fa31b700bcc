"""DS3xx: number formats."""

from __future__ import annotations

from collections.abc import Iterator

from ds_toolkit.config.rules.keys import LOSS_SCALING
from ds_toolkit.config.rules.registry import rule
from ds_toolkit.config.subject import Config, is_true, json_pointer, whole_number
from ds_toolkit.findings import Severity
from ds_toolkit.rules import Problem

_SPELLINGS = {
    "fp32": ("fp32", "float32", "float", "torch.float32"),
    "fp16": ("fp16", "float16", "half", "torch.float16"),
    "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
}
_MASTERS = (("fp16", "fp16_master_weights_and_grads"), ("bf16", "bf16_master_weights_and_grads"))


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


@rule("DS302", "loss-scaling-under-bf16", Severity.ERROR)
def loss_scaling_under_bf16(config: Config) -> Iterator[Problem]:
    """A key of loss scaling stands in `bf16`, which needs none and refuses it: its range is that of fp32.

    Bad:
        {"train_batch_size": 8, "bf16": {"enabled": true, "loss_scale": 0}}
    Good:
        {"train_batch_size": 8, "bf16": {"enabled": true}}
    """
    for section in ("bf16", "bfloat16"):
        for key in config.section(section):
            if key in LOSS_SCALING:
                message = f"`{section}` has no `{key}`: bfloat16 needs no loss scaling"
                yield Problem(json_pointer(section, key), message, "remove it")


@rule("DS303", "half-masters-without-offload", Severity.ERROR)
def half_masters_without_offload(config: Config) -> Iterator[Problem]:
    """16-bit master weights need ZeRO and an optimizer that is offloaded to the CPU.

    Without ZeRO DeepSpeed stops at the start, without offloading when the engine is made.

    Bad:
        {"train_batch_size": 8, "fp16": {"enabled": true, "fp16_master_weights_and_grads": true}}
    Bad:
        {"train_batch_size": 8, "bf16": {"enabled": true, "bf16_master_weights_and_grads": true},
         "zero_optimization": {"stage": 2}}
    Good:
        {"train_batch_size": 8, "fp16": {"enabled": true, "fp16_master_weights_and_grads": true},
         "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
         "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
    """
    for section, key in _MASTERS:
        name = section if section in config.data or section == "fp16" else "bfloat16"
        if not is_true(config.section(name).get(key)):
            continue
        pointer = json_pointer(name, key)
        if config.zero_stage == 0:
            yield Problem(pointer, f"`{key}` needs ZeRO", "use stage 1, 2 or 3 with `offload_optimizer`")
        elif config.zero_stage is not None and config.offload_device("offload_optimizer") == "none":
            fix = 'add "offload_optimizer": {"device": "cpu"} to `zero_optimization`, or remove it'
            yield Problem(pointer, f"`{key}` needs an optimizer that is offloaded to the CPU", fix)


@rule("DS304", "half-states-without-half-masters", Severity.ERROR)
def half_states_without_half_masters(config: Config) -> Iterator[Problem]:
    """`bf16_optimizer_states` goes with `bf16_master_weights_and_grads` and ZeRO only.

    Bad:
        {"train_batch_size": 8, "bf16": {"enabled": true, "bf16_optimizer_states": true},
         "zero_optimization": {"stage": 1}}
    Good:
        {"train_batch_size": 8, "bf16": {"enabled": true, "bf16_master_weights_and_grads": true,
         "bf16_optimizer_states": true}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
         "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
    """
    section = "bf16" if "bf16" in config.data else "bfloat16"
    values = config.section(section)
    if is_true(values.get("bf16_optimizer_states")):
        masters = is_true(values.get("bf16_master_weights_and_grads"))
        if not masters or config.zero_stage == 0:
            pointer = json_pointer(section, "bf16_optimizer_states")
            message = "`bf16_optimizer_states` needs `bf16_master_weights_and_grads` and ZeRO"
            yield Problem(pointer, message, "add them, or remove it")


@rule("DS305", "loss-scale-cannot-adapt", Severity.ERROR)
def loss_scale_cannot_adapt(config: Config) -> Iterator[Problem]:
    """The loss scale is to adapt, but its window or its floor is zero or less; DeepSpeed refuses that.

    Bad:
        {"train_batch_size": 8, "fp16": {"enabled": true, "loss_scale_window": 0}}
    Bad:
        {"train_batch_size": 8, "fp16": {"enabled": true, "min_loss_scale": 0}}
    Good:
        {"train_batch_size": 8, "fp16": {"enabled": true, "loss_scale_window": 1000, "min_loss_scale": 1}}
    """
    fp16 = config.section("fp16")
    if not config.is_enabled("fp16") or fp16.get("loss_scale", 0) not in (0, "0", "auto"):
        return
    for key in ("loss_scale_window", "min_loss_scale"):
        value = fp16.get(key, 1)
        number = whole_number(value)
        if isinstance(value, str) and value.lstrip("-").isdigit():
            number = int(value)
        if number is not None and number <= 0:
            yield Problem(json_pointer("fp16", key), f"`{key}` is {number}", "write 1 or more")


@rule("DS306", "settings-of-a-scale-that-adapts", Severity.WARNING)
def settings_of_a_scale_that_adapts(config: Config) -> Iterator[Problem]:
    """The loss scale is fixed, and the settings of one that adapts have no effect.

    Bad:
        {"train_batch_size": 8, "fp16": {"enabled": true, "loss_scale": 128, "initial_scale_power": 12}}
    Good:
        {"train_batch_size": 8, "fp16": {"enabled": true, "loss_scale": 128}}
    """
    fp16 = config.section("fp16")
    scale = fp16.get("loss_scale", 0)
    if not isinstance(scale, int | float) or isinstance(scale, bool) or scale <= 0:
        return
    for key in fp16:
        if key in LOSS_SCALING and key != "loss_scale":
            message = f"`{key}` has no effect: the loss scale is {scale} throughout"
            yield Problem(json_pointer("fp16", key), message, "remove it, or write loss_scale 0")


@rule("DS307", "parameters-of-another-type", Severity.ERROR)
def parameters_of_another_type(config: Config) -> Iterator[Problem]:
    """`data_types.param_dtype` is not the precision that is enabled, and the engine refuses that.

    Bad:
        {"train_batch_size": 8, "bf16": {"enabled": true}, "data_types": {"param_dtype": "fp16"}}
    Good:
        {"train_batch_size": 8, "bf16": {"enabled": true}, "data_types": {"param_dtype": "bf16"}}
    """
    asked, enabled = _data_type(config, "param_dtype"), config.precision
    unresolved = "auto" in (config.section("fp16").get("enabled"), config.section("bf16").get("enabled"))
    if asked is not None and asked != enabled and not unresolved:
        message = f"parameters cannot be {asked} where {enabled} is enabled"
        yield Problem(json_pointer("data_types", "param_dtype"), message, "remove it")


@rule("DS308", "accumulation-in-another-type", Severity.ERROR)
def accumulation_in_another_type(config: Config) -> Iterator[Problem]:
    """Without ZeRO gradients are accumulated in the precision of the model; another one is refused.

    Bad:
        {"train_batch_size": 8, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}}
    Good:
        {"train_batch_size": 8, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"},
         "zero_optimization": {"stage": 2}}
    """
    asked, enabled = _data_type(config, "grad_accum_dtype"), config.precision
    if asked is not None and asked != enabled and config.zero_stage == 0:
        message = f"gradients of {enabled} cannot be accumulated in {asked} without ZeRO"
        yield Problem(json_pointer("data_types", "grad_accum_dtype"), message, "use ZeRO, or remove it")


@rule("DS309", "another-optimizer-at-stage-one", Severity.WARNING)
def another_optimizer_at_stage_one(config: Config) -> Iterator[Problem]:
    """bf16 with fp32 accumulation at stage 1 makes DeepSpeed use BF16_Optimizer instead of ZeRO's.

    Its checkpoints look different and `zero_to_fp32.py` does not read them; buckets, overlapping and
    round-robin settings have no effect. Stage 2 accumulates in fp32 with ZeRO's own optimizer.

    Bad:
        {"train_batch_size": 8, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"},
         "zero_optimization": {"stage": 1}}
    Good:
        {"train_batch_size": 8, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"},
         "zero_optimization": {"stage": 2}}
    """
    fp32 = _data_type(config, "grad_accum_dtype") == "fp32"
    on_gpu = config.offload_device("offload_optimizer") == "none"
    if fp32 and config.precision == "bf16" and config.zero_stage == 1 and on_gpu:
        message = "stage 1 with fp32 accumulation writes checkpoints that zero_to_fp32.py cannot read"
        yield Problem(json_pointer("data_types", "grad_accum_dtype"), message, "use stage 2")


@rule("DS310", "autocast-without-type", Severity.WARNING)
def autocast_without_type(config: Config) -> Iterator[Problem]:
    """`torch_autocast` is enabled without `dtype`, and torch's default holds: float16 on a GPU.

    Bad:
        {"train_batch_size": 8, "torch_autocast": {"enabled": true}}
    Good:
        {"train_batch_size": 8, "torch_autocast": {"enabled": true, "dtype": "bfloat16"}}
    """
    autocast = config.section("torch_autocast")
    if autocast.get("enabled") is True and autocast.get("dtype") is None:
        yield Problem(
            "/torch_autocast", "the data type of autocast is left to torch", 'add "dtype": "bfloat16"'
        )


def _data_type(config: Config, key: str) -> str | None:
    value = config.section("data_types").get(key)
    return next((name for name, spellings in _SPELLINGS.items() if value in spellings), None)
