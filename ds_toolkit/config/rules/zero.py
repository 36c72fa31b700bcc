"""DS2xx: what ZeRO partitions."""

from __future__ import annotations

from collections.abc import Iterator

from ds_toolkit.config.consumers import Consumer
from ds_toolkit.config.members import Member
from ds_toolkit.config.rules.registry import rule
from ds_toolkit.config.subject import Config, is_true, json_pointer, whole_number
from ds_toolkit.findings import Severity
from ds_toolkit.rules import Problem

_ZERO = "zero_optimization"
_GATHER = "stage3_gather_16bit_weights_on_model_save"
# Stages at which DeepSpeed reads a key; what is not listed is read at all of them, or has a rule of its own.
_STAGES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(
        (
            "sub_group_size",
            "zero_hpz_partition_size",
            "zero_quantized_weights",
            "zero_quantized_nontrainable_weights",
            "zero_quantized_gradients",
            "memory_efficient_linear",
            "pipeline_loading_checkpoint",
            "override_module_apply",
            "log_trace_cache_warnings",
            "enable_sanity_checks",
            "save_muon_momentum_buffer_in_memory",
            "leaf_module",
        ),
        (3,),
    ),
    **dict.fromkeys(("round_robin_gradients", "elastic_checkpoint"), (1, 2)),
}


@rule("DS201", "no-such-stage", Severity.ERROR)
def no_such_stage(config: Config) -> Iterator[Problem]:
    """The ZeRO stage is none of 0, 1, 2 and 3.

    DeepSpeed drops `"auto"` in silence and trains at stage 0; other values stop it at the start. Accelerate,
    and the Trainer, which uses it, put a stage in its place: 2 unless they are told otherwise.

    Bad:
        {"train_batch_size": 8, "zero_optimization": {"stage": "auto"}}
    Bad:
        {"train_batch_size": 8, "zero_optimization": {"stage": 4}}
    Good:
        {"train_batch_size": 8, "zero_optimization": {"stage": 2}}
    """
    if config.zero_stage is None:
        stage = config.zero["stage"]
        if stage == "auto" and config.consumer.resolves((_ZERO, "stage")):
            return
        message = f"`{stage}` is not a ZeRO stage"
        if stage == "auto":
            message += ": DeepSpeed drops it and trains at stage 0"
        yield Problem(json_pointer(_ZERO, "stage"), message, "write 0, 1, 2 or 3")


@rule("DS202", "key-of-another-stage", Severity.WARNING)
def key_of_another_stage(config: Config) -> Iterator[Problem]:
    """A key of `zero_optimization` is read at other stages only and has no effect here.

    Bad:
        {"train_batch_size": 8, "zero_optimization": {"stage": 1, "stage3_max_live_parameters": 1000000000}}
    Bad:
        {"train_batch_size": 8, "zero_optimization": {"stage": 3, "round_robin_gradients": true}}
    Good:
        {"train_batch_size": 8, "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 1000000000}}
    """
    stage = config.zero_stage
    for member in config.members:
        if stage is None or member.path[0] != _ZERO or len(member.path) != 2 or member.known is None:
            continue
        stages = (3,) if member.known.key.startswith("stage3_") else _STAGES.get(member.key)
        # A switch that is off, or as it is by default, asks for nothing.
        default = isinstance(member.value, bool) and member.value == member.known.field.default
        asks = not default and member.value not in (False, None, "auto") and not _is_off(member)
        if stages is not None and stage not in stages and asks:
            there = " and ".join(map(str, stages))
            message = f"`{member.key}` is read at stage {there} only, and this is stage {stage}"
            yield Problem(json_pointer(*member.path), message, "remove it")


def _is_off(member: Member) -> bool:
    return member.key == "zero_hpz_partition_size" and member.value in (0, 1)


@rule("DS203", "odd-allgather-bucket", Severity.ERROR)
def odd_allgather_bucket(config: Config) -> Iterator[Problem]:
    """`allgather_bucket_size` must be even at stages 1 and 2, so that pieces start aligned.

    Bad:
        {"train_batch_size": 8, "zero_optimization": {"stage": 2, "allgather_bucket_size": 200000001}}
    Good:
        {"train_batch_size": 8, "zero_optimization": {"stage": 2, "allgather_bucket_size": 200000000}}
    """
    size = whole_number(config.zero.get("allgather_bucket_size"))
    if size is not None and size % 2 and config.zero_stage in (1, 2):
        pointer = json_pointer(_ZERO, "allgather_bucket_size")
        yield Problem(pointer, f"`allgather_bucket_size` {size} is odd", f"write {size + 1}")


@rule("DS204", "legacy-stage-one", Severity.ERROR)
def legacy_stage_one(config: Config) -> Iterator[Problem]:
    """`legacy_stage1` asks for code that is gone, and the engine refuses it.

    Bad:
        {"train_batch_size": 8, "zero_optimization": {"stage": 1, "legacy_stage1": true}}
    Good:
        {"train_batch_size": 8, "zero_optimization": {"stage": 1}}
    """
    if is_true(config.zero.get("legacy_stage1")):
        yield Problem(json_pointer(_ZERO, "legacy_stage1"), "the old stage 1 is gone", "remove it")


@rule("DS205", "no-gradient-norm", Severity.ERROR)
def no_gradient_norm(config: Config) -> Iterator[Problem]:
    """`compute_grad_norm: false` goes with stages 1 and 2 alone, without clipping, offloading or ZenFlow.

    Clipping is on unless it is set to 0.

    Bad:
        {"train_batch_size": 8, "gradient_clipping": 0,
         "zero_optimization": {"stage": 3, "compute_grad_norm": false}}
    Bad:
        {"train_batch_size": 8, "zero_optimization": {"stage": 2, "compute_grad_norm": false}}
    Good:
        {"train_batch_size": 8, "gradient_clipping": 0,
         "zero_optimization": {"stage": 2, "compute_grad_norm": false}}
    """
    value = config.zero.get("compute_grad_norm", True)
    if value in ("auto", None) or is_true(value):
        return
    pointer = json_pointer(_ZERO, "compute_grad_norm")
    if config.zero_stage not in (1, 2):
        yield Problem(pointer, f"stage {config.zero_stage} needs the norm of the gradients", "remove it")
    elif config.data.get("gradient_clipping", 1.0) != 0:
        message = "clipping needs the norm of the gradients, and is on by default"
        yield Problem(pointer, message, 'write "gradient_clipping": 0, or remove this')
    elif config.offload_device("offload_optimizer") != "none" or config.zero.get("zenflow"):
        yield Problem(pointer, "offloading needs the norm of the gradients", "remove it")


@rule("DS206", "partition-does-not-divide", Severity.ERROR)
def partition_does_not_divide(config: Config) -> Iterator[Problem]:
    """`zero_hpz_partition_size` does not divide the ranks.

    It is best the number of GPUs of a node: gathering in backward then stays inside it. 0 and 1 switch it
    off.

    Bad (world_size=12):
        {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}
    Good (world_size=16):
        {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}
    """
    size = whole_number(config.zero.get("zero_hpz_partition_size", 1))
    pointer = json_pointer(_ZERO, "zero_hpz_partition_size")
    if size is not None and size > 1 and config.zero_stage == 3:
        ranks = config.data_parallel_size
        # DeepSpeed makes one group of all ranks where there are fewer.
        if ranks is not None and ranks % min(size, ranks):
            divisors = ", ".join(str(part) for part in range(2, ranks + 1) if ranks % part == 0)
            fix = f"write one of {divisors}" if divisors else "remove it"
            yield Problem(pointer, f"`zero_hpz_partition_size` {size} does not divide {ranks} ranks", fix)


@rule("DS207", "pipeline-above-stage-one", Severity.ERROR)
def pipeline_above_stage_one(config: Config) -> Iterator[Problem]:
    """A pipeline goes with stages 0 and 1: it sums gradients over micro batches that stage 2 would partition.

    DeepSpeed notices after the whole engine has been made. For a model that is no PipelineModule the section
    `pipeline` has no effect at all.

    Bad:
        {"train_batch_size": 8, "pipeline": {"stages": 2}, "zero_optimization": {"stage": 2}}
    Good:
        {"train_batch_size": 8, "pipeline": {"stages": 2}, "zero_optimization": {"stage": 1}}
    """
    if config.section("pipeline") and (config.zero_stage or 0) > 1:
        message = f"a pipeline cannot use stage {config.zero_stage}"
        yield Problem("/pipeline", message, "use stage 1, or remove `pipeline`")


@rule("DS208", "experts-at-stage-three", Severity.ERROR)
def experts_at_stage_three(config: Config) -> Iterator[Problem]:
    """Expert parallelism at stage 3 goes without hpZ, quantized gradients and sequence parallelism.

    DeepSpeed's own MoE layers, whose topology `use_data_before_expert_parallelism` describes, refuse stage 3
    altogether.

    Bad:
        {"train_batch_size": 8, "expert_parallel": {"enabled": true, "autoep_size": 4},
         "zero_optimization": {"stage": 3, "zero_quantized_gradients": true}}
    Bad:
        {"train_batch_size": 8, "use_data_before_expert_parallelism": true, "zero_optimization": {"stage": 3}}
    Good:
        {"train_batch_size": 8, "expert_parallel": {"enabled": true, "autoep_size": 4},
         "zero_optimization": {"stage": 3}}
    """
    if config.zero_stage != 3:
        return
    if config.data.get("use_data_before_expert_parallelism") is True:
        pointer = json_pointer("use_data_before_expert_parallelism")
        yield Problem(pointer, "DeepSpeed's MoE layers refuse stage 3", "use stage 2 or less")
    if config.section("expert_parallel").get("enabled"):
        for key in ("zero_quantized_gradients", "zero_quantized_weights"):
            if is_true(config.zero.get(key)):
                yield Problem(json_pointer(_ZERO, key), f"expert parallelism refuses `{key}`", "remove it")
        if (whole_number(config.zero.get("zero_hpz_partition_size")) or 1) > 1:
            pointer = json_pointer(_ZERO, "zero_hpz_partition_size")
            yield Problem(pointer, "expert parallelism refuses hpZ", "remove it")
        if (whole_number(config.data.get("sequence_parallel_size")) or 1) > 1:
            pointer = json_pointer("sequence_parallel_size")
            yield Problem(
                pointer, "expert parallelism at stage 3 refuses sequence parallelism", "use stage 2"
            )


@rule("DS209", "elastic-checkpoint", Severity.WARNING)
def elastic_checkpoint(config: Config) -> Iterator[Problem]:
    """`elastic_checkpoint` changes the layout of optimizer states, and does not make checkpoints elastic.

    DeepSpeed still refuses to load them with another number of ranks. Universal checkpoints can be.

    Bad:
        {"train_batch_size": 8, "zero_optimization": {"stage": 2, "elastic_checkpoint": true}}
    Good:
        {"train_batch_size": 8, "zero_optimization": {"stage": 2}}
    """
    if is_true(config.zero.get("elastic_checkpoint")) and config.zero_stage in (1, 2):
        message = "`elastic_checkpoint` does not let another number of ranks load the checkpoint"
        yield Problem(json_pointer(_ZERO, "elastic_checkpoint"), message, "remove it")


@rule("DS210", "weights-not-gathered", Severity.WARNING)
def weights_not_gathered(config: Config) -> Iterator[Problem]:
    """At stage 3 the 16-bit weights cannot be saved as one model unless they may be gathered.

    `save_16bit_model` then writes nothing and returns False; `save_pretrained` of the Trainer falls back on a
    ZeRO checkpoint. The switch is off by default; this is said where it is switched off, or where a consumer
    would save the model.

    Bad:
        {"train_batch_size": 8,
         "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": false}}
    Bad (consumer=hf):
        {"train_batch_size": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3}}
    Good (consumer=hf):
        {"train_batch_size": "auto", "bf16": {"enabled": "auto"},
         "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": true}}
    """
    names = (_GATHER, _GATHER.removeprefix("stage3_"), "stage3_gather_fp16_weights_on_model_save")
    said = next((name for name in names if name in config.zero), None)
    if config.zero_stage != 3 or (said is None and config.consumer is Consumer.NATIVE):
        return
    # Accelerate asks about it; for the Trainer alone "auto" comes to false.
    open_ = said is not None and config.zero[said] == "auto" and config.consumer is not Consumer.HF
    if said is None or not (is_true(config.zero[said]) or open_):
        message = "nothing saves the whole model at stage 3: its 16-bit weights are not gathered"
        yield Problem(json_pointer(_ZERO, said or _GATHER), message, f'write "{_GATHER}": true')


@rule("DS211", "unused-parameters-refused", Severity.WARNING)
def unused_parameters_refused(config: Config) -> Iterator[Problem]:
    """`ignore_unused_parameters: false` stops the training when a parameter gets no gradient.

    It is for debugging; at stages 1 and 2 it is checked, elsewhere it has no effect.

    Bad:
        {"train_batch_size": 8, "zero_optimization": {"stage": 2, "ignore_unused_parameters": false}}
    Good:
        {"train_batch_size": 8, "zero_optimization": {"stage": 2, "ignore_unused_parameters": true}}
    """
    value = config.zero.get("ignore_unused_parameters", True)
    if value not in ("auto", None) and not is_true(value):
        message = "a parameter without a gradient would stop the training"
        yield Problem(json_pointer(_ZERO, "ignore_unused_parameters"), message, "remove it")
