"""What is trained on and searched for: data efficiency and autotuning."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ds_toolkit.config.schema.section import ABSENT, AnyObject, RawSection


class CurriculumLearning(RawSection):
    """Easier samples first, by metrics that were computed before."""

    enabled: bool = Field(False, description="Whether samples are ordered.")
    data_cluster_path: str | None = Field(None, description="Folder for the clusters of samples.")
    curriculum_metrics: AnyObject | None = Field(
        None, description="For each metric its files, difficulties and schedule."
    )


class DynamicBatching(RawSection):
    """Batches of equally many tokens rather than samples."""

    enabled: bool = Field(False, description="Whether batches are packed by tokens.")
    metrics_path: str | None = Field(None, description="Folder of the lengths of samples.")
    lr_scaling_method: Literal["linear", "sqrt", "none"] = Field(
        "linear", description="How the learning rate follows the size of a batch."
    )
    min_batch_size: int = Field(1, description="Samples that a batch holds at least.")
    max_batch_size: int = Field(ABSENT, description="Samples that a batch holds at most.")
    sequence_picking_order: Literal["dataloader", "random", "seqlen"] = Field(
        "dataloader", description="Order in which samples are packed."
    )
    max_tokens: int = Field(ABSENT, description="Tokens of a batch; needed.")
    verbose: bool = Field(False, description="Whether batches are printed.")


class DataSampling(RawSection):
    """Which samples come when."""

    enabled: bool = Field(False, description="Whether DeepSpeed samples the data.")
    num_epochs: int = Field(1000, description="Epochs at most.")
    num_workers: int = Field(0, description="Processes that load data.")
    pin_memory: bool = Field(False, description="Whether batches are put into page-locked memory.")
    curriculum_learning: CurriculumLearning = Field(
        default_factory=CurriculumLearning, description="Easier samples first."
    )
    dynamic_batching: DynamicBatching = Field(
        default_factory=DynamicBatching, description="Batches of equally many tokens."
    )


class RandomLtd(RawSection):
    """Random layer-wise token dropping."""

    enabled: bool = Field(False, description="Whether layers in the middle skip some tokens.")
    total_layer_num: int | None = Field(None, description="Layers of the model.")
    random_ltd_layer_num: int | None = Field(None, description="Layers that drop tokens.")
    random_ltd_layer_id: list[int] | None = Field(None, description="Their numbers.")
    model_mask_name: str | None = Field(None, description="Argument of a layer that holds the mask.")
    model_type: Literal["encoder", "decoder"] | None = Field(None, description="encoder or decoder.")
    hidden_state_order: str | None = Field(
        None, description="Order of the dimensions, such as batch_seq_dim."
    )
    random_ltd_schedule: AnyObject | None = Field(None, description="How many tokens are kept at which step.")
    layer_token_lr_schedule: AnyObject | None = Field(
        None, description="How the learning rate follows the tokens."
    )
    micro_batch_size: int | None = Field(None, description="Set by the engine.")
    global_batch_size: int | None = Field(None, description="Set by the engine.")


class DataRouting(RawSection):
    """Which tokens go through which layers."""

    enabled: bool = Field(False, description="Whether tokens are routed.")
    random_ltd: RandomLtd = Field(default_factory=RandomLtd, description="Random layer-wise token dropping.")


class DataEfficiency(RawSection):
    """Curriculum learning, dynamic batching and random layer-wise token dropping."""

    enabled: bool = Field(False, description="Whether any of it is used.")
    seed: int = Field(1234, description="Seed of the sampling.")
    data_sampling: DataSampling = Field(default_factory=DataSampling, description="Which samples come when.")
    data_routing: DataRouting = Field(
        default_factory=DataRouting, description="Which tokens go through which layers."
    )


class ModelInfo(RawSection):
    """What the search would otherwise measure."""

    profile: bool = Field(False, description="Whether it is measured.")
    num_params: int | None = Field(None, description="Parameters of the model.")
    hidden_size: int | None = Field(None, description="Width of the model.")
    num_layers: int | None = Field(None, description="Layers of the model.")


class Autotuning(RawSection):
    """Search for the fastest configuration."""

    enabled: bool = Field(False, description="Whether the launcher searches.")
    fast: bool = Field(True, description="Whether only micro batch sizes are searched.")
    results_dir: str = Field("autotuning_results", min_length=1, description="Folder for results.")
    exps_dir: str = Field("autotuning_exps", min_length=1, description="Folder for experiments.")
    overwrite: bool = Field(True, description="Whether earlier results are replaced.")
    start_profile_step: int = Field(3, description="First step that is timed.")
    end_profile_step: int = Field(5, description="Last step that is timed.")
    metric: str = Field("throughput", description="What is sought: throughput, latency or flops.")
    metric_path: str | None = Field(None, description="File for the metric.")
    tuner_type: str = Field("gridsearch", description="gridsearch, random or model_based.")
    tuner_early_stopping: int = Field(5, description="Trials without progress that end the search.")
    tuner_num_trials: int = Field(50, description="Trials at most.")
    arg_mappings: AnyObject | None = Field(None, description="Arguments of the script by configuration key.")
    model_info: ModelInfo | None = Field(None, description="What the search would otherwise measure.")
    model_info_path: str | None = Field(None, description="File for what was measured.")
    mp_size: int = Field(1, description="Model-parallel ranks.")
    max_train_batch_size: int | None = Field(None, description="Samples of a step at most.")
    min_train_batch_size: int = Field(1, description="Samples of a step at least.")
    max_train_micro_batch_size_per_gpu: int = Field(1024, description="Samples of a forward pass at most.")
    min_train_micro_batch_size_per_gpu: int = Field(1, description="Samples of a forward pass at least.")
    num_tuning_micro_batch_sizes: int = Field(3, description="Micro batch sizes to try.")
