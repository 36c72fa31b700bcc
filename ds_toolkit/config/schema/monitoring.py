"""What a run reports about itself: metrics, collectives, operations, times."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from ds_toolkit.config.schema.section import RawSection, Section


class TensorBoard(Section):
    """Metrics to TensorBoard."""

    enabled: bool = Field(False, description="Whether metrics are written; needs the package tensorboard.")
    output_path: str = Field("", description="Folder for event files; ~/tensorboard by default.")
    job_name: str = Field("DeepSpeedJobName", description="Folder of this run inside it.")


class Wandb(Section):
    """Metrics to Weights & Biases."""

    enabled: bool = Field(False, description="Whether metrics are sent; needs the package wandb.")
    group: str | None = Field(None, description="Group of runs.")
    team: str | None = Field(None, description="Team that owns the project.")
    project: str = Field("deepspeed", description="Project of the run.")


class CsvMonitor(Section):
    """Metrics to CSV files."""

    enabled: bool = Field(False, description="Whether metrics are written.")
    output_path: str = Field("", description="Folder for the files.")
    job_name: str = Field("DeepSpeedJobName", description="Folder of this run inside it.")


class Comet(Section):
    """Metrics to Comet."""

    enabled: bool = Field(False, description="Whether metrics are sent; needs the package comet_ml.")
    samples_log_interval: int = Field(100, description="Samples between two reports.")
    project: str | None = Field(None, description="Project of the experiment.")
    workspace: str | None = Field(None, description="Workspace of the project.")
    api_key: str | None = Field(None, description="Key of the account; better set COMET_API_KEY.")
    experiment_name: str | None = Field(None, description="Name of the experiment.")
    experiment_key: str | None = Field(None, description="Key of an experiment to go on with.")
    online: bool | None = Field(None, description="Whether data is sent at once rather than kept.")
    mode: str | None = Field(None, description="get, create or get_or_create.")


class CommsLogger(Section):
    """Log of collectives with their sizes and times."""

    enabled: bool = Field(False, description="Whether collectives are timed.")
    prof_all: bool = Field(True, description="Whether all collectives are, rather than those in prof_ops.")
    prof_ops: list[Any] = Field(default_factory=list, description="Names of the collectives to time.")
    verbose: bool = Field(False, description="Whether each collective is printed as it ends.")
    debug: bool = Field(False, description="Whether the calling function is named too.")


class FlopsProfiler(RawSection):
    """Profile of operations and time of one step."""

    enabled: bool = Field(False, description="Whether one step is profiled; switches the breakdown on too.")
    recompute_fwd_factor: float = Field(
        0.0, ge=0, description="Share of forward that is computed again in backward."
    )
    profile_step: int = Field(1, description="The step that is profiled.")
    module_depth: int = Field(-1, description="Depth of the modules that are listed; -1 for all.")
    top_modules: int = Field(1, description="How many modules are listed at each depth.")
    detailed: bool = Field(True, description="Whether the profile of each module is printed.")
    output_file: str | None = Field(None, description="File for the profile; standard output without one.")


class ThroughputTimer(Section):
    """Settings of the throughput timer."""

    enabled: bool = Field(True, description="Whether throughput is measured.")
    synchronized: bool = Field(True, description="Whether the device is waited for; exact, a little slower.")


class Timers(RawSection):
    """Settings of timers."""

    throughput: ThroughputTimer = Field(
        default_factory=ThroughputTimer, description="Settings of the throughput timer."
    )
