"""What the installed DeepSpeed's parser makes of the configurations that the toolkit writes."""

from __future__ import annotations

from typing import Any

import pytest

from ds_toolkit.advise.answers import Answers
from ds_toolkit.advise.presets import advise_config
from ds_toolkit.env.fabric import Gpu, Host
from ds_toolkit.plan.job import Precision

GB = 10**9
GPU_HOST = Host((Gpu("A100", 80 * GB),) * 2, 1000 * GB, 64, (), ())
CPU_HOST = Host((), 1000 * GB, 2, (), ())


def test_deepspeed_trains_at_stage_zero_where_it_is_told_auto(parse: Any) -> None:
    assert parse({"train_batch_size": 1, "zero_optimization": {"stage": "auto"}}).zero_optimization_stage == 0
    for stage in (4, None, 2.5):
        with pytest.raises(ValueError, match="stage"):
            parse({"train_batch_size": 1, "zero_optimization": {"stage": stage}})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("host", [CPU_HOST, GPU_HOST], ids=["cpu", "gpu"])
def test_generated_configs_are_accepted_and_mean_what_was_asked(
    stage: int, precision: Precision, host: Host, parse: Any
) -> None:
    advice = advise_config(
        Answers(10**7, stage=stage, precision=precision, global_batch_size=16, micro_batch_size=2), host
    )
    config = parse(advice.config, advice.job.cluster.world_size)
    assert config.zero_optimization_stage == stage
    assert (config.train_batch_size, config.gradient_accumulation_steps) == (16, 4)
    assert config.bfloat16_config.enabled is (precision is Precision.BF16)
    assert config.float16_config.enabled is (precision is Precision.FP16)
    assert config.gradient_clipping == 1.0
    assert config.optimizer_name == "adamw"


@pytest.mark.parametrize(("gpu_memory_gb", "offloaded"), [(16, (True, False)), (6, (True, True))])
def test_generated_offloading_is_understood(
    gpu_memory_gb: int, offloaded: tuple[bool, bool], parse: Any
) -> None:
    answers = Answers(7 * GB, gpus_per_node=8, gpu_memory_bytes=gpu_memory_gb * GB, stage=3)
    zero = parse(advise_config(answers, GPU_HOST).config, 8).zero_config
    assert (zero.offload_optimizer is not None, zero.offload_param is not None) == offloaded


def test_defaults_that_the_advice_speaks_of_are_deepspeeds(parse: Any) -> None:
    from ds_toolkit.plan.zero import DEFAULT_BUCKET_SIZE, DEFAULT_PREFETCH_BUCKET_SIZE

    config = parse({"train_batch_size": 1})
    assert config.gradient_clipping == 1.0
    assert config.steps_per_print is None
    zero = config.zero_config
    assert zero.reduce_bucket_size == zero.allgather_bucket_size == DEFAULT_BUCKET_SIZE
    assert zero.prefetch_bucket_size == DEFAULT_PREFETCH_BUCKET_SIZE
    assert zero.param_persistence_threshold == 100_000
    assert zero.gather_16bit_weights_on_model_save is False
