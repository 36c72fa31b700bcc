"""`optimizer`, `scheduler`, and which parameters each of their types takes."""

from __future__ import annotations

from pydantic import Field

from ds_toolkit.config.schema.section import AnyObject, RawSection


class Optimizer(RawSection):
    """Type and params of the optimizer that DeepSpeed makes."""

    type: str | None = Field(None, description="Adam, AdamW, Lamb, Lion, Muon, or a class of torch.optim.")
    params: AnyObject | None = Field(None, description="Arguments of the optimizer, lr among them.")
    legacy_fusion: bool = Field(False, description="Whether fp16 uses the older fused update.")


class Scheduler(RawSection):
    """Type and params of the learning-rate scheduler that DeepSpeed makes."""

    type: str | None = Field(None, description="WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, ...")
    params: AnyObject | None = Field(None, description="Arguments of the scheduler; needed.")


_FUSED_ADAM = frozenset({"lr", "bias_correction", "betas", "eps", "weight_decay", "amsgrad", "set_grad_none"})
_CPU_ADAM = frozenset({"lr", "bias_correction", "betas", "eps", "weight_decay", "amsgrad"})
_TORCH_ADAM = frozenset(
    {
        "lr",
        "betas",
        "eps",
        "weight_decay",
        "amsgrad",
        "foreach",
        "maximize",
        "capturable",
        "differentiable",
        "fused",
    }
)
# The engine takes these out, whatever it makes.
ADAM_SWITCHES = frozenset({"torch_adam", "adam_w_mode", "fp32_optimizer_states"})
_LION = frozenset({"lr", "betas", "weight_decay"})
_ADAGRAD = frozenset(
    {
        "lr",
        "lr_decay",
        "weight_decay",
        "initial_accumulator_value",
        "eps",
        "foreach",
        "maximize",
        "differentiable",
        "fused",
    }
)
_CPU_ADAGRAD = frozenset({"lr", "eps", "weight_decay", "amsgrad", "fp32_optimizer_states"})

# What the implementations take that DeepSpeed picks from, by the name in lower case: `fused` unless the
# optimizer's states are offloaded (`cpu`), or `torch_adam` asks for torch's.
IMPLEMENTATIONS: dict[str, dict[str, frozenset[str]]] = {
    "adam": {"fused": _FUSED_ADAM, "cpu": _CPU_ADAM, "torch": _TORCH_ADAM},
    "adamw": {"fused": _FUSED_ADAM, "cpu": _CPU_ADAM, "torch": _TORCH_ADAM},
    "adagrad": {"torch": _ADAGRAD, "cpu": _CPU_ADAGRAD},
    "lion": {"fused": _LION | {"set_grad_none"}, "cpu": _LION | {"fp32_optimizer_states"}},
}
# By the name in lower case, which DeepSpeed compares; every implementation it may pick is counted.
OPTIMIZER_PARAMS: dict[str, frozenset[str]] = {
    "adam": _FUSED_ADAM | _CPU_ADAM | _TORCH_ADAM | ADAM_SWITCHES,
    "adamw": _FUSED_ADAM | _CPU_ADAM | _TORCH_ADAM | ADAM_SWITCHES,
    "adagrad": _ADAGRAD | _CPU_ADAGRAD,
    "lamb": frozenset(
        {
            "lr",
            "bias_correction",
            "betas",
            "eps",
            "eps_inside_sqrt",
            "weight_decay",
            "max_coeff",
            "min_coeff",
            "amsgrad",
        }
    ),
    "lion": _LION | {"set_grad_none", "fp32_optimizer_states"},
    "muon": ADAM_SWITCHES
    | {"lr", "momentum", "weight_decay", "ns_method", "betas", "eps", "muon_lr", "adam_lr"},
}
# These come from the package mup, whose arguments are not DeepSpeed's business.
MUP_OPTIMIZERS = frozenset({"muadam", "muadamw", "musgd"})
REMOVED_OPTIMIZERS = frozenset({"onebitadam", "zerooneadam", "onebitlamb"})
# With ZeRO, others are refused unless zero_allow_untested_optimizer is true.
ZERO_OPTIMIZERS = frozenset({"adam", "adamw", "adagrad", "lion", "muon"})

_WARMUP = frozenset({"warmup_num_steps", "warmup_type", "last_batch_iteration"})
SCHEDULER_PARAMS: dict[str, frozenset[str]] = {
    "LRRangeTest": frozenset(
        {
            "lr_range_test_min_lr",
            "lr_range_test_step_size",
            "lr_range_test_step_rate",
            "lr_range_test_staircase",
            "last_batch_iteration",
        }
    ),
    "OneCycle": frozenset(
        {
            "cycle_min_lr",
            "cycle_max_lr",
            "decay_lr_rate",
            "cycle_first_step_size",
            "cycle_second_step_size",
            "cycle_first_stair_count",
            "cycle_second_stair_count",
            "decay_step_size",
            "cycle_momentum",
            "cycle_min_mom",
            "cycle_max_mom",
            "decay_mom_rate",
            "last_batch_iteration",
        }
    ),
    "WarmupLR": _WARMUP | {"warmup_min_lr", "warmup_max_lr"},
    "WarmupDecayLR": _WARMUP | {"warmup_min_lr", "warmup_max_lr", "total_num_steps"},
    "WarmupCosineLR": _WARMUP | {"warmup_min_ratio", "cos_min_ratio", "total_num_steps"},
}
NEEDED_SCHEDULER_PARAMS: dict[str, tuple[str, ...]] = {
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
}
