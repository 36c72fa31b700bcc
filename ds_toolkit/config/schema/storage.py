"""What goes to disks: checkpoints, activations that are recomputed, asynchronous reads and writes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from ds_toolkit.config.schema.section import RawSection, any_case


def _upper(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


# DeepSpeed compares these in upper case.
TagValidation = Annotated[
    Literal["IGNORE", "WARN", "FAIL"], BeforeValidator(_upper), any_case("IGNORE", "WARN", "FAIL")
]
WriterType = Annotated[
    Literal["MOCK", "PYTHON", "FAST"], BeforeValidator(_upper), any_case("MOCK", "PYTHON", "FAST")
]
WriterUnit = Annotated[
    Literal["REPLICA", "SOCKET", "MACHINE"],
    BeforeValidator(_upper),
    any_case("REPLICA", "SOCKET", "MACHINE"),
]


class ParallelWrite(RawSection):
    """How the stages of a pipeline share the writing."""

    pipeline_stage: bool = Field(False, description="Whether data-parallel ranks share a stage's layers.")


class CheckpointWriter(RawSection):
    """DeepSpeed's own writer of checkpoint files."""

    type: WriterType | None = Field("FAST", description="FAST, PYTHON or MOCK.")
    decoupled: bool = Field(False, description="Whether another process writes.")
    io_buffer_size: int = Field(64 * 2**20, ge=0, description="Bytes of the buffer.")
    io_buffer_double: bool = Field(True, description="Whether there are two buffers.")
    show_statistics: bool = Field(False, description="Whether speeds are printed.")
    data_parallel: WriterUnit | None = Field(None, description="Ranks that share one file's writing.")
    io_multiplier: int = Field(1, description="Factor of the bytes that are written, for benchmarks.")


class Checkpoint(RawSection):
    """How engine.save_checkpoint and engine.load_checkpoint behave."""

    tag_validation: TagValidation = Field("WARN", description="What happens if ranks name different tags.")
    load_universal: bool = Field(False, description="Whether load_checkpoint reads universal checkpoints.")
    use_node_local_storage: bool = Field(
        False, description="Whether every node writes what it needs to a disk of its own."
    )
    parallel_write: ParallelWrite = Field(
        default_factory=ParallelWrite, description="How the stages of a pipeline share the writing."
    )
    checkpoint_serialization: bool = Field(
        True, description="Whether files are torch's zip archives; zero_to_fp32 reads no others."
    )
    writer: CheckpointWriter | None = Field(None, description="DeepSpeed's own writer.")


class ActivationCheckpointing(RawSection):
    """How activations that the model recomputes are stored; the model decides which those are."""

    partition_activations: bool = Field(False, description="Whether model-parallel ranks share them.")
    contiguous_memory_optimization: bool = Field(False, description="Whether they lie in one buffer.")
    cpu_checkpointing: bool = Field(False, description="Whether they go to host memory.")
    number_checkpoints: int | None = Field(None, description="How many there are; sizes the buffer.")
    synchronize_checkpoint_boundary: bool = Field(False, description="Whether the device is waited for.")
    profile: bool = Field(False, description="Whether forward and backward of each are timed.")


class Aio(RawSection):
    """Block size, queue depth and threads of asynchronous reads and writes on NVMe."""

    block_size: int = Field(2**20, ge=1, description="Bytes of one request.")
    queue_depth: int = Field(8, ge=1, description="Requests on their way at once.")
    intra_op_parallelism: int = Field(1, ge=1, description="Threads that share one tensor.")
    single_submit: bool = Field(False, description="Whether requests are handed over one by one.")
    overlap_events: bool = Field(True, description="Whether handing over and waiting overlap.")
    use_gds: bool = Field(False, description="Whether GPUs read and write directly (GPUDirect Storage).")
