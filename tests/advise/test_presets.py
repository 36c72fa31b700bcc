from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ds_toolkit.advise.answers import Answers, complete
from ds_toolkit.advise.presets import advise_config, learning_rate
from ds_toolkit.config.linter import lint
from ds_toolkit.env.fabric import Gpu, Host
from ds_toolkit.errors import ToolkitError
from ds_toolkit.plan.job import Precision

GB = 10**9
CPU_HOST = Host((), 16 * GB, 4, (), ("eth0", "lo"))
GPU_HOST = Host((Gpu("A100", 80 * GB),) * 8, 1000 * GB, 64, ("mlx5_0",), ("eth0", "lo"))
TINY = Answers(10**6, gpus_per_node=2, micro_batch_size=8, sequence_length=128, stage=3)


def test_a_cpu_config_builds_nothing_and_offloads_nothing() -> None:
    advice = advise_config(TINY, CPU_HOST)
    assert advice.config == {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "steps_per_print": 10,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": 0.001,
                "betas": [0.9, 0.95],
                "eps": 1e-8,
                "weight_decay": 0.1,
                "torch_adam": True,
            },
        },
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": False,
            "reduce_bucket_size": 1_000_000,
            "stage3_prefetch_bucket_size": 12 * 192**2,
            "stage3_param_persistence_threshold": 1920,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "ds_toolkit": {"save_every": "10min", "keep_last": 3},
    }
    assert advice.chosen.stage == 3
    assert any("torch's own AdamW" in reason for reason in advice.reasons)
    assert any("1920" in reason for reason in advice.reasons)


@pytest.mark.parametrize("stage", [0, 1, 2, 3, None])
@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("host", [CPU_HOST, GPU_HOST], ids=["cpu", "gpu"])
def test_every_config_is_strict_json_clean_and_has_its_reasons(
    stage: int | None, precision: Precision, host: Host
) -> None:
    answers = Answers(10**7, stage=stage, precision=precision, global_batch_size=64, sequence_length=64)
    advice = advise_config(answers, host)

    def refuse(word: str) -> None:
        raise AssertionError(word)

    assert json.loads(advice.text, parse_constant=refuse) == advice.config
    assert advice.text.endswith("}\n")
    assert lint(advice.config, world_size=advice.job.cluster.world_size) == []
    assert advice.chosen in advice.rungs
    assert advice.chosen.stage == (1 if stage is None else stage)
    assert {"bf16", "fp16"} & advice.config.keys() == ({precision.value} - {"fp32"})
    assert all(reason and "\n" not in reason for reason in advice.reasons)


@pytest.mark.parametrize(
    ("gpu_memory_gb", "sections"),
    [(80, set()), (24, {"offload_optimizer"}), (14, {"offload_optimizer", "offload_param"})],
)
def test_memory_decides_what_is_offloaded(gpu_memory_gb: int, sections: set[str]) -> None:
    advice = advise_config(Answers(7 * GB, gpu_memory_bytes=gpu_memory_gb * GB), GPU_HOST)
    zero = advice.config["zero_optimization"]
    assert isinstance(zero, dict)
    assert {key for key in zero if key.startswith("offload")} == sections
    assert "bf16" in advice.config
    assert "torch_adam" not in advice.text


def test_large_models_keep_deepspeeds_sizes() -> None:
    advice = advise_config(Answers(7 * GB, stage=3), GPU_HOST)
    zero = advice.config["zero_optimization"]
    assert isinstance(zero, dict)
    assert zero["reduce_bucket_size"] == 500_000_000
    assert zero["stage3_param_persistence_threshold"] == 100_000
    assert not any("bucket" in reason or "stay whole" in reason for reason in advice.reasons)


def test_what_is_not_said_is_found_here_and_told() -> None:
    job, reasons = complete(Answers(10**9), GPU_HOST)
    assert (job.cluster.ranks_per_node, job.cluster.device_memory_bytes) == (8, 80 * GB)
    assert (job.precision, job.micro_batch_size, job.sequence_length) == (Precision.BF16, 1, 2048)
    assert any("8 x A100" in reason for reason in reasons)
    job, reasons = complete(Answers(10**6), CPU_HOST)
    assert (job.cluster.ranks_per_node, job.precision) == (4, Precision.FP32)
    assert any("no GPU here" in reason for reason in reasons)


def test_what_is_said_beats_what_is_found() -> None:
    answers = Answers(10**9, 2, 4, 24 * GB, 100 * GB, Precision.FP16, 64, 4, 512)
    job, _ = complete(answers, GPU_HOST)
    assert (job.cluster.world_size, job.cluster.device_memory_bytes) == (8, 24 * GB)
    assert (job.cluster.host_memory_bytes, job.precision) == (100 * GB, Precision.FP16)
    assert (job.accumulation_steps, job.global_batch_size) == (2, 64)


def test_a_global_batch_that_does_not_divide_is_refused_with_the_nearest_ones() -> None:
    with pytest.raises(ToolkitError) as caught:
        complete(replace(TINY, global_batch_size=40), CPU_HOST)
    assert "--global-batch-size 32 or 48" in str(caught.value.fix)


def test_planning_for_gpus_elsewhere_needs_their_number() -> None:
    with pytest.raises(ToolkitError, match="number of GPUs"):
        complete(Answers(10**6, gpu_memory_bytes=80 * GB), CPU_HOST)


def test_what_does_not_fit_is_refused_with_the_lack_and_the_way_out() -> None:
    with pytest.raises(ToolkitError, match="does not fit") as caught:
        advise_config(Answers(175 * GB, gpus_per_node=2), GPU_HOST)
    assert "a host too much" in str(caught.value.why)
    assert "more GPUs" in str(caught.value.fix)
    with pytest.raises(ToolkitError, match="does not fit") as caught:
        advise_config(Answers(7 * GB, stage=0), GPU_HOST)
    assert "a larger --stage" in str(caught.value.fix)


@pytest.mark.parametrize(
    ("num_parameters", "rate"), [(10**6, 1e-3), (125 * 10**6, 6.4e-4), (7 * GB, 7.7e-5), (10**12, 6e-5)]
)
def test_the_learning_rate_falls_with_size_within_bounds(num_parameters: int, rate: float) -> None:
    assert learning_rate(num_parameters) == rate
