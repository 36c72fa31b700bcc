"""`zero_optimization`: what is partitioned over the ranks, and what is kept in host memory or on NVMe."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

from pydantic import Field

from ds_toolkit.config.schema.section import Elements, NotText, Section

Device = Literal["none", "cpu", "nvme"]
Stage = Annotated[int, Field(ge=0, le=3)]
HIGHEST_STAGE = 3


class OffloadParam(Section):
    """Weights in host memory or on NVMe; stage 3 only."""

    device: Device = Field("none", description="Where weights are kept: none (the GPU), cpu or nvme.")
    nvme_path: str | None = Field(None, description="Folder on the NVMe drive; needed with device nvme.")
    buffer_count: int = Field(5, ge=0, description="Buffers between NVMe and the host.")
    buffer_size: Elements = Field(100_000_000, ge=0, description="Elements of one buffer.")
    max_in_cpu: Elements = Field(1_000_000_000, ge=0, description="Elements that host memory may hold.")
    pin_memory: bool = Field(True, description="Whether host memory is page-locked: faster, not swappable.")


class OffloadOptimizer(Section):
    """Optimizer states, and the step itself, in host memory (stages 1 to 3) or on NVMe (stage 3)."""

    device: Device = Field("none", description="Where states are kept: none (the GPU), cpu or nvme.")
    nvme_path: str | None = Field(None, description="Folder on the NVMe drive; needed with device nvme.")
    buffer_count: int = Field(4, ge=0, description="Buffers between NVMe and the host.")
    pin_memory: bool = Field(True, description="Whether host memory is page-locked: faster, not swappable.")
    pipeline_read: bool = Field(False, description="Whether the next states are read while these are used.")
    pipeline_write: bool = Field(
        False, description="Whether the last states are written while the next are used."
    )
    fast_init: bool = Field(False, description="Whether states on NVMe are made the fast way.")
    ratio: float = Field(1.0, ge=0.0, le=1.0, description="Share of the states that is offloaded; stage 3.")
    super_offload: bool = Field(
        False, description="SuperOffload: the host updates while the GPU goes on; stage 3."
    )
    cpuadam_cores_perc: float = Field(
        0.8, ge=0.0, le=1.0, description="Share of the cores that the host's Adam may use."
    )


class ZenFlow(Section):
    """Asynchronous offloaded steps for the less important gradients."""

    topk_ratio: float = Field(
        0.1, gt=0.0, lt=1.0, description="Share of the gradients that stays on the GPU."
    )
    select_strategy: Literal["auto", "step", "epoch"] = Field(
        "auto", description="When gradients are ranked anew: auto, step or epoch."
    )
    select_interval: Literal["auto"] | Annotated[int, NotText] = Field(
        "auto", description="Steps or epochs between two rankings."
    )
    update_interval: Literal["auto"] | Annotated[int, NotText, Field(ge=1)] = Field(
        "auto", description="Steps between two updates of the offloaded rest."
    )
    overlap_step: bool = Field(False, description="Whether the host's step overlaps the GPU's.")
    offload: bool = Field(False, description="Whether the selected gradients are offloaded too.")
    auto_ratio: float = Field(
        0.99, ge=0.0, le=1.0, description="Share of gradient norm that ends an automatic interval."
    )
    full_warm_up_rounds: int = Field(0, description="Steps at the start that update everything.")
    pt_reserved_cores_perc: float = Field(
        0.5, ge=0.0, le=1.0, description="Share of the cores kept for torch itself."
    )
    steps_per_epoch: int | None = Field(None, description="Filled in by the engine.")


class LeafModule(Section):
    """Modules whose weights stage 3 gathers all at once, such as experts."""

    classes: list[str] | str = Field(
        default_factory=lambda: [
            "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
            "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
            "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
        ],
        description="Class names, with or without their module.",
    )
    names: list[str] | str = Field(default_factory=list, description="Names as named_modules gives them.")
    name_suffixes: list[str] | str = Field(default_factory=list, description="Ends of such names.")


class ZeroOptimization(Section):
    """ZeRO: what is partitioned over the data-parallel ranks, and what is offloaded."""

    stage: Stage = Field(
        0, description="What is partitioned: 0 nothing, 1 optimizer states, 2 gradients too, 3 weights too."
    )
    contiguous_gradients: bool = Field(
        True, description="Whether gradients are copied to one buffer as they are made."
    )
    reduce_scatter: bool = Field(True, description="Whether gradients are reduced to their owner only.")
    reduce_bucket_size: Elements = Field(
        500_000_000,
        gt=0,
        description="Elements of gradients reduced at once; the buffer is made at the start.",
    )
    use_multi_rank_bucket_allreduce: bool = Field(
        True, description="Whether one reduction serves several ranks."
    )
    allgather_partitions: bool = Field(
        True, description="Whether updated weights come by all-gather instead of broadcasts."
    )
    allgather_bucket_size: Elements = Field(
        500_000_000, ge=0, description="Elements gathered at once after a step; an even number."
    )
    overlap_comm: bool | None = Field(
        None, description="Whether gradients are reduced while backward goes on; unless set, at stage 3 only."
    )
    compute_grad_norm: bool = Field(
        True, description="Whether the norm of the gradients is computed; false at stages 1 and 2 only."
    )
    load_from_fp32_weights: bool = Field(
        True, description="Whether fp32 master weights are read from a checkpoint rather than made anew."
    )
    elastic_checkpoint: bool = Field(
        False, description="Another layout of optimizer states in checkpoints of stages 1 and 2."
    )
    offload_param: OffloadParam | None = Field(
        None, description="Weights in host memory or on NVMe; stage 3."
    )
    offload_optimizer: OffloadOptimizer | None = Field(
        None, description="Optimizer states, and the step itself, in host memory or on NVMe."
    )
    zenflow: ZenFlow | None = Field(
        None, description="Asynchronous offloaded steps for the less important gradients."
    )
    sub_group_size: Elements = Field(
        1_000_000_000, ge=0, description="Elements that the optimizer updates at once; stage 3."
    )
    cpu_offload_param: bool | None = Field(
        None, description="Old name of offload_param.", deprecated="write offload_param"
    )
    cpu_offload_use_pin_memory: bool | None = Field(
        None,
        description="Without effect; pin_memory stands inside the offload sections.",
        deprecated="write pin_memory inside the offload section",
    )
    cpu_offload: bool | None = Field(
        None, description="Old name of offload_optimizer.", deprecated="write offload_optimizer"
    )
    prefetch_bucket_size: Elements = Field(
        50_000_000,
        ge=0,
        alias="stage3_prefetch_bucket_size",
        description="Elements of weights gathered ahead of their use.",
    )
    param_persistence_threshold: Elements = Field(
        100_000,
        ge=0,
        alias="stage3_param_persistence_threshold",
        description="Parameters of fewer elements stay whole on every rank.",
    )
    model_persistence_threshold: Elements = Field(
        sys.maxsize,
        ge=0,
        alias="stage3_model_persistence_threshold",
        description="Elements of small parameters that may stay whole, together.",
    )
    max_live_parameters: Elements = Field(
        1_000_000_000,
        ge=0,
        alias="stage3_max_live_parameters",
        description="Elements of gathered weights that a rank may hold at once.",
    )
    max_reuse_distance: Elements = Field(
        1_000_000_000,
        ge=0,
        alias="stage3_max_reuse_distance",
        description="Weights used again within so many elements are kept gathered.",
    )
    gather_16bit_weights_on_model_save: bool = Field(
        False,
        alias="stage3_gather_16bit_weights_on_model_save",
        description="Whether save_16bit_model may gather the weights; else it writes nothing.",
    )
    module_granularity_threshold: int = Field(
        0,
        alias="stage3_module_granularity_threshold",
        description="Modules finer than this are gathered as one.",
    )
    use_all_reduce_for_fetch_params: bool = Field(
        False,
        alias="stage3_use_all_reduce_for_fetch_params",
        description="Whether weights are gathered by all-reduce.",
    )
    allgather_sequential: bool = Field(
        False,
        alias="stage3_allgather_sequential",
        description="Whether parameters are gathered one after another.",
    )
    stage3_gather_fp16_weights_on_model_save: bool = Field(
        False,
        description="Old name of stage3_gather_16bit_weights_on_model_save.",
        deprecated="write stage3_gather_16bit_weights_on_model_save",
    )
    ignore_unused_parameters: bool = Field(
        True, description="Whether parameters without a gradient are tolerated."
    )
    legacy_stage1: bool = Field(False, description="Refused when true.")
    round_robin_gradients: bool = Field(
        False, description="Whether copies of gradients to the host are spread over ranks; stages 1 and 2."
    )
    parameter_alignment: bool = Field(False, description="Whether each parameter starts at 16 aligned bytes.")
    zero_hpz_partition_size: int = Field(
        1, ge=0, description="Ranks that share a second copy of the weights (ZeRO++), 1 for none; stage 3."
    )
    zero_quantized_weights: bool = Field(
        False, description="Whether weights travel as int8 (ZeRO++); stage 3."
    )
    zero_quantized_nontrainable_weights: bool = Field(
        False, description="Whether frozen weights are kept quantized; stage 3."
    )
    zero_quantized_gradients: bool = Field(
        False, description="Whether gradients travel as int4 (ZeRO++); stage 3."
    )
    memory_efficient_linear: bool = Field(
        True, description="Whether stage 3 replaces torch's linear layer by one that keeps less."
    )
    pipeline_loading_checkpoint: bool = Field(
        False, description="Whether states are loaded one by one to save memory; stage 3."
    )
    override_module_apply: bool = Field(
        True, description="Whether stage 3 gathers weights around nn.Module.apply."
    )
    log_trace_cache_warnings: bool = Field(
        False, description="Whether stage 3 reports that modules ran in another order."
    )
    enable_sanity_checks: bool = Field(False, description="Whether stage 3 checks itself as it goes.")
    save_muon_momentum_buffer_in_memory: bool = Field(
        False, description="Whether Muon's momentum stays in memory when states are on NVMe; stage 3."
    )
    leaf_module: LeafModule | None = Field(
        default_factory=LeafModule, description="Modules whose weights stage 3 gathers all at once."
    )
