"""The whole ds_config: every key that DeepSpeed reads at the top level."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ds_toolkit.config.schema.data import Autotuning, DataEfficiency
from ds_toolkit.config.schema.monitoring import (
    Comet,
    CommsLogger,
    CsvMonitor,
    FlopsProfiler,
    TensorBoard,
    Timers,
    Wandb,
)
from ds_toolkit.config.schema.optimization import Optimizer, Scheduler
from ds_toolkit.config.schema.parallelism import (
    Compile,
    ExpertParallel,
    HybridEngine,
    Pipeline,
    TensorParallel,
    WeightQuantization,
)
from ds_toolkit.config.schema.precision import Bf16, CommunicationType, DataTypes, Fp16, TorchAutocast
from ds_toolkit.config.schema.section import ABSENT, Elements, RawSection, any_case
from ds_toolkit.config.schema.storage import ActivationCheckpointing, Aio, Checkpoint
from ds_toolkit.config.schema.zero import ZeroOptimization


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


_LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
_LogLevel = Annotated[
    Literal["debug", "info", "warning", "error", "critical"], BeforeValidator(_lower), any_case(*_LOG_LEVELS)
]
# The remainder of a division by it is compared with 0, so that -10 is as good as 10.
_NotZero = Annotated[int, Field(ge=1)] | Annotated[int, Field(le=-1)]


class DsConfig(RawSection):
    """A DeepSpeed configuration. At the top level DeepSpeed ignores every key that is not here."""

    train_batch_size: int | None = Field(
        None,
        ge=1,
        description="Samples of one optimizer step over all ranks: micro batch x accumulation x ranks.",
    )
    train_micro_batch_size_per_gpu: int | None = Field(
        None, ge=1, description="Samples of one forward pass on one rank."
    )
    gradient_accumulation_steps: int | None = Field(
        None, ge=1, description="Micro batches whose gradients are summed before a step."
    )
    managed_gradient_accumulation: bool = Field(
        True, description="Whether the engine finds accumulation boundaries by itself."
    )
    optimizer: Optimizer = Field(default_factory=Optimizer, description="The optimizer that DeepSpeed makes.")
    scheduler: Scheduler = Field(
        default_factory=Scheduler, description="The learning-rate scheduler that DeepSpeed makes."
    )
    fp16: Fp16 = Field(default_factory=Fp16, description="Training in float16 with loss scaling.")
    bf16: Bf16 | None = Field(default_factory=Bf16, description="Training in bfloat16.")
    bfloat16: Bf16 = Field(
        ABSENT, description="Old name of bf16; ignored where bf16 stands too.", deprecated="write bf16"
    )
    torch_autocast: TorchAutocast = Field(
        default_factory=TorchAutocast, description="Mixed precision by torch.autocast."
    )
    data_types: DataTypes = Field(
        default_factory=DataTypes, description="Data types of gradient accumulation, parameters and buffers."
    )
    zero_optimization: ZeroOptimization = Field(
        default_factory=ZeroOptimization, description="What is partitioned over ranks, and what is offloaded."
    )
    zero_allow_untested_optimizer: bool = Field(
        False, description="Whether ZeRO accepts an optimizer that it does not know."
    )
    zero_force_ds_cpu_optimizer: bool = Field(
        True, description="Whether an offloaded optimizer must be a CPU one of DeepSpeed's."
    )
    gradient_clipping: float = Field(
        1.0, ge=0, description="Largest norm of the gradients; 1.0 unless set, 0 switches clipping off."
    )
    prescale_gradients: bool = Field(
        False, description="Whether gradients are divided before they are reduced."
    )
    gradient_predivide_factor: float = Field(
        1.0, gt=0, description="Divisor of gradients before they are reduced."
    )
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], BeforeValidator(_lower)] = Field(
        "mean", description="How gradients of ranks are combined: mean or sum."
    )
    communication_data_type: Annotated[CommunicationType, BeforeValidator(_lower)] | None = Field(
        None, description="Data type in which gradients are reduced; by default the model's."
    )
    seq_parallel_communication_data_type: Annotated[CommunicationType, BeforeValidator(_lower)] | None = (
        Field("fp32", description="Data type of reductions between sequence-parallel ranks.")
    )
    disable_allgather: bool = Field(False, description="Parsed and without effect.")
    allgather_size: Elements = Field(
        500_000_000,
        ge=0,
        description="Elements gathered at once; read with a boolean zero_optimization only.",
    )
    sequence_parallel_size: int = Field(1, ge=1, description="Ranks that share one sequence.")
    data_parallel_size: int | None = Field(
        None, ge=1, description="Data-parallel ranks of a mesh; counts beside sequence_parallel_size only."
    )
    use_data_before_expert_parallelism: bool = Field(
        False, description="Order of data and expert parallelism in the ranks' topology."
    )
    tensor_parallel: TensorParallel = Field(
        default_factory=TensorParallel, description="Automatic tensor parallelism."
    )
    expert_parallel: ExpertParallel | None = Field(
        default_factory=ExpertParallel, description="Automatic expert parallelism."
    )
    pipeline: Pipeline = Field(
        default_factory=Pipeline, description="Settings of a PipelineModule; ignored for other models."
    )
    compile: Compile = Field(default_factory=Compile, description="DeepCompile and its passes.")
    hybrid_engine: HybridEngine = Field(
        default_factory=HybridEngine, description="Training and generation in one engine."
    )
    weight_quantization: WeightQuantization = Field(
        default_factory=WeightQuantization, description="Quantization of weights for inference."
    )
    activation_checkpointing: ActivationCheckpointing = Field(
        default_factory=ActivationCheckpointing, description="How activations to recompute are stored."
    )
    checkpoint: Checkpoint = Field(
        default_factory=Checkpoint, description="How checkpoints are saved and loaded."
    )
    datastates_ckpt: Any = Field(
        False, description="The DataStates checkpoint engine; any value but false switches it on."
    )
    aio: Aio | None = Field(default_factory=Aio, description="Asynchronous reads and writes on NVMe.")
    steps_per_print: _NotZero | None = Field(
        None, description="Steps between two lines of progress; none are printed unless set."
    )
    log_level: _LogLevel | None = Field(None, description="Level of DeepSpeed's logger.")
    dump_state: bool = Field(False, description="Whether the engine's state is printed at the start.")
    wall_clock_breakdown: bool = Field(
        False, description="Whether the time of each phase of a step is printed."
    )
    memory_breakdown: bool = Field(
        False, description="Whether memory use is printed at each phase of a step."
    )
    disable_python_gc: bool = Field(
        False, description="Whether Python's garbage collector is off during training."
    )
    dataloader_drop_last: bool = Field(
        False, description="Whether DeepSpeed's data loader drops the last, incomplete batch."
    )
    vocabulary_size: int | None = Field(None, description="Only checked for a size that suits tensor cores.")
    tensorboard: TensorBoard = Field(default_factory=TensorBoard, description="Metrics to TensorBoard.")
    wandb: Wandb = Field(default_factory=Wandb, description="Metrics to Weights & Biases.")
    csv_monitor: CsvMonitor = Field(default_factory=CsvMonitor, description="Metrics to CSV files.")
    comet: Comet = Field(default_factory=Comet, description="Metrics to Comet.")
    comms_logger: CommsLogger = Field(
        default_factory=CommsLogger, description="Log of collectives with their sizes and times."
    )
    flops_profiler: FlopsProfiler = Field(
        default_factory=FlopsProfiler, description="Profile of operations and time of one step."
    )
    timers: Timers = Field(default_factory=Timers, description="Settings of the throughput timer.")
    data_efficiency: DataEfficiency = Field(
        default_factory=DataEfficiency, description="Curriculum learning, dynamic batching, token dropping."
    )
    autotuning: Autotuning = Field(
        default_factory=Autotuning, description="Search for the fastest configuration."
    )
