"""How a model is split and compiled: tensor, expert and pipeline parallelism, DeepCompile, generation."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from ds_toolkit.config.schema.section import AnyObject, RawSection, Section, Unwritable


class TensorParallelGroup(Section):
    """Ranks that share one layer."""

    tp_size: int = Field(1, description="Set by the engine from autotp_size.")
    tp_grain_size: int = Field(1, description="Without effect in training.")
    mpu: Any = Field(None, description="A Python object; cannot be given in a file.")
    tp_group: Any = Field(None, description="A Python object; cannot be given in a file.")


class TensorParallel(Section):
    """Automatic tensor parallelism."""

    dtype: Unwritable = Field(None, description="A torch.dtype; cannot be given in a file.")
    autotp_size: int = Field(0, description="Ranks that share each layer; 0 is off.")
    tp_overlap_comm: bool = Field(False, description="Whether all-reduces overlap computing.")
    vocab_parallel_lm_head: bool | None = Field(None, description="Whether the output layer is split too.")
    vocab_parallel_ce_backend: Literal["torch", "liger"] = Field(
        "torch", description="Who computes the loss over a split vocabulary."
    )
    tensor_parallel: TensorParallelGroup = Field(
        default_factory=TensorParallelGroup, alias="tp", description="Set by the engine."
    )
    injection_policy_tuple: tuple[Any, ...] | None = Field(
        None, description="Layers whose output is reduced."
    )
    partition_config: AnyObject | None = Field(
        None, description="Patterns of weight names and how each is split."
    )
    preset_model: str | None = Field(None, description="Model family whose split is known.")
    keep_module_on_host: bool = Field(False, description="Whether weights stay in host memory while split.")
    replace_with_kernel_inject: bool = Field(
        False, alias="kernel_inject", description="Whether layers are replaced by fused kernels."
    )


class ExpertParallel(RawSection):
    """Automatic expert parallelism."""

    enabled: bool = Field(False, description="Whether experts are spread over ranks.")
    autoep_size: int = Field(1, ge=1, description="Ranks that share the experts of a layer.")
    expert_tensor_parallel_size: int = Field(1, description="Only 1 is supported.")
    validate_folding_routing: bool = Field(False, description="Whether routing is checked over ranks.")
    async_split_plan: bool = Field(False, description="Whether token counts are exchanged asynchronously.")
    preset_model: str | None = Field(None, description="Model family whose layers are known.")
    moe_layer_pattern: str | None = Field(None, description="Pattern of the names of expert layers.")
    expert_pattern: str | None = Field(None, description="Name of the experts inside such a layer.")
    router_pattern: str | None = Field(None, description="Name of the router inside such a layer.")
    use_grouped_mm: bool = Field(True, description="Whether experts run as one grouped product.")
    disable_triton_grouped_mm: bool = Field(False, description="Whether the Triton kernel is left out.")
    route_norm: bool | None = Field(None, description="Whether the router's scores are normalized.")
    route_scale: float = Field(1.0, description="Factor of the router's scores.")
    score_apply: Literal["auto", "pre", "post"] = Field(
        "auto", description="Whether scores are applied before or after the experts."
    )
    combine_impl: Literal["auto", "weighted_sum", "fused_weighted_sum", "legacy_bmm"] = Field(
        "auto", description="How experts' outputs are combined."
    )
    row_weighting_impl: Literal["auto", "eager", "fused"] = Field(
        "auto", description="How routed rows are weighted."
    )
    gate_up_impl: Literal["separate", "fused"] = Field(
        "separate", description="Whether gate and up projections run as one product."
    )
    comm_backend: Literal["comm", "deepep"] = Field("comm", description="Who carries tokens between ranks.")
    comm_num_sm: int = Field(12, ge=1, description="Multiprocessors that DeepEP may use.")
    comm_qp_margin: int = Field(4, ge=0, description="Queue pairs that DeepEP keeps in reserve.")
    comm_max_tokens_per_rank: int = Field(0, ge=0, description="Tokens that a rank may route; DeepEP only.")
    num_expert_groups: int | None = Field(None, ge=1, description="Groups that routing is limited to.")
    num_limited_groups: int | None = Field(None, ge=1, description="Groups that a token may use.")
    score_func: Literal["auto", "softmax", "sigmoid"] = Field("auto", description="Function of the scores.")
    top_k: int | Literal["auto"] = Field("auto", description="Experts of a token.")
    load_balance_coeff: None = Field(None, description="Not supported; null only.")
    routed_scaling_factor: float | Literal["auto"] = Field("auto", description="Factor of routed outputs.")
    expert_w1: str | None = Field(None, description="Name of the gate projection's weight.")
    expert_w2: str | None = Field(None, description="Name of the down projection's weight.")
    expert_w3: str | None = Field(None, description="Name of the up projection's weight; null if fused.")
    num_experts_attr: str | None = Field(None, description="Attribute of the model's config: experts.")
    top_k_attr: str | None = Field(None, description="Attribute of the model's config: experts of a token.")
    has_shared_experts: bool | None = Field(None, description="Whether some experts see every token.")
    shared_experts_pattern: str | None = Field(None, description="Name of the shared experts.")
    shared_experts_gate_pattern: str | None = Field(None, description="Name of their gate.")
    expert_activation: str | None = Field(None, description="Activation of the experts.")


class Pipeline(RawSection):
    """Settings of a PipelineModule; ignored for other models."""

    stages: int | Literal["auto"] = Field("auto", description="Stages of the pipeline.")
    partition: str = Field("best", description="How layers are spread over stages.")
    seed_layers: bool = Field(False, description="Whether each layer is initialized with a seed of its own.")
    activation_checkpoint_interval: int = Field(
        0, ge=0, description="Layers between two activation checkpoints; 0 for none."
    )
    pipe_partitioned: bool = Field(True, description="Whether activations between stages are partitioned.")
    grad_partitioned: bool = Field(True, description="Whether their gradients are.")
    use_reentrant: bool = Field(True, description="Whether activation checkpointing is the reentrant one.")


class Compile(Section):
    """DeepCompile and its passes; without effect until engine.compile is called."""

    deepcompile: bool = Field(False, description="Whether DeepCompile's passes run.")
    autoep_non_moe: bool = Field(
        False, description="Whether layers without experts are compiled under AutoEP."
    )
    free_activation: bool = Field(False, description="Whether activations are freed early.")
    free_activation_threshold: int = Field(10 * 2**20, description="Bytes above which they are.")
    offload_activation: bool = Field(False, description="Whether activations go to host memory.")
    offload_activation_pin_memory: bool = Field(True, description="Whether that memory is page-locked.")
    offload_opt_states: bool = Field(False, description="Whether optimizer states go to host memory.")
    double_buffer: bool = Field(True, description="Whether reduction uses two buffers.")
    symmetric_memory: bool = Field(False, description="Whether symmetric memory is used.")
    debug_log: bool = Field(False, description="Whether the passes are logged.")
    offload_parameters: bool = Field(False, description="Whether weights go to host memory.")
    sync_before_reduce: bool = Field(
        False, description="Whether the device is waited for before a reduction."
    )
    sync_after_reduce: bool = Field(False, description="Whether the device is waited for after a reduction.")
    sync_before_allgather: bool = Field(False, description="Whether it is waited for before gathering.")
    sync_after_allgather: bool = Field(False, description="Whether it is waited for after gathering.")
    keep_int_input_tensors: bool = Field(True, description="Whether integer inputs are kept for backward.")
    keep_all_input_tensors: bool = Field(False, description="Whether all inputs are.")
    passes: list[Literal["z1", "z3", "autosp", "autotp"]] | None = Field(
        None, description="The passes to run; by default those of the ZeRO stage."
    )


class HybridEngine(Section):
    """Training and generation in one engine, for reinforcement learning."""

    enabled: bool = Field(False, description="Whether the engine can generate.")
    max_out_tokens: int = Field(512, gt=0, description="Tokens of prompt and answer together.")
    inference_tp_size: int = Field(1, description="Ranks that share each layer while generating.")
    release_inference_cache: bool = Field(False, description="Whether its memory is freed before training.")
    pin_parameters: bool = Field(True, description="Whether weights stay gathered while generating.")
    tp_gather_partition_size: int = Field(8, description="Layers gathered at once.")
    enable_cuda_graph: bool = Field(False, description="Whether generation runs as a CUDA graph.")


class WeightQuantization(Section):
    """Quantization of weights for inference."""

    enabled: bool = Field(True, description="Whether weights are quantized.")
    num_bits: int = Field(8, description="Bits of a weight.")
    q_type: Literal["asymmetric", "symmetric"] = Field("symmetric", description="Range of the quantization.")
    q_groups: int = Field(1, description="Groups of a tensor that share a scale.")
    quantized_initialization: AnyObject = Field(
        default_factory=dict, description="How weights are quantized as they are made."
    )
    post_init_quant: AnyObject = Field(
        default_factory=dict, description="How weights are quantized afterwards, by module."
    )
