"""Number formats: `fp16`, `bf16`, `torch_autocast` and `data_types`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ds_toolkit.config.schema.section import ABSENT, NotBoolean, RawSection, Section

CommunicationType = Literal["fp16", "bf16", "fp32"]
# Every spelling that DeepSpeed takes for a data type.
DataType = Literal[
    "fp32",
    "float32",
    "float",
    "torch.float32",
    "fp16",
    "float16",
    "half",
    "torch.float16",
    "bf16",
    "bfloat16",
    "torch.bfloat16",
    "int8",
    "torch.int8",
]


class Fp16(Section):
    """Training in float16 with loss scaling and fp32 master weights."""

    enabled: bool = Field(False, description="Whether weights, activations and gradients are float16.")
    auto_cast: bool = Field(False, description="Whether inputs are cast to float16.")
    loss_scale: Annotated[float, NotBoolean] = Field(
        0, ge=0, allow_inf_nan=False, description="Fixed factor of the loss; 0 lets it adapt."
    )
    initial_scale_power: int = Field(16, description="The adaptive scale starts at 2 to this power.")
    loss_scale_window: Annotated[int, NotBoolean] = Field(
        1000, description="Steps without overflow after which the scale doubles."
    )
    hysteresis: int = Field(2, description="Overflows that are forgiven before the scale is halved.")
    consecutive_hysteresis: bool = Field(
        False, description="Whether a step without overflow forgives earlier ones."
    )
    min_loss_scale: Annotated[int, NotBoolean] = Field(1, description="The scale never falls below this.")
    fp16_master_weights_and_grads: bool = Field(
        False, description="Whether master weights and gradients are float16 too; needs CPU offload."
    )


class Bf16(Section):
    """Training in bfloat16 with fp32 master weights."""

    enabled: bool = Field(False, description="Whether weights, activations and gradients are bfloat16.")
    immediate_grad_update: bool = Field(
        False, description="Whether gradients are accumulated as soon as they are made."
    )
    check_grad_overflow: bool = Field(
        True, description="Whether a step with infinite or undefined gradients is skipped."
    )
    bf16_master_weights_and_grads: bool = Field(
        False, description="Whether master weights and gradients are bfloat16 too; needs CPU offload."
    )
    bf16_optimizer_states: bool = Field(
        False, description="Whether optimizer states are bfloat16; needs bf16_master_weights_and_grads."
    )


class TorchAutocast(RawSection):
    """Mixed precision by torch.autocast."""

    enabled: bool = Field(False, description="Whether forward runs under torch.autocast.")
    dtype: DataType = Field(ABSENT, description="Data type that operations are cast to.")
    lower_precision_safe_modules: list[str] = Field(
        ABSENT, description="Class names of modules whose weights are reduced in the lower precision."
    )


class DataTypes(RawSection):
    """Data types of gradient accumulation, parameters and buffers."""

    grad_accum_dtype: DataType | None = Field(None, description="Data type that gradients are summed in.")
    param_dtype: DataType | None = Field(None, description="Must be the precision that is enabled.")
    buffer_dtype: DataType | None = Field(None, description="Data type that module buffers are cast to.")
    keep_in_fp32_modules: Literal["auto"] | list[str] = Field(
        "auto", description="Patterns of module names whose buffers stay fp32, or auto."
    )
