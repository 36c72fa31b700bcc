from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ds_toolkit.advise.answers import Answers, complete
from ds_toolkit.advise.presets import PRESETS, advise_config
from ds_toolkit.advise.reasons import NothingFitsError
from ds_toolkit.advise.tuning import learning_rate
from ds_toolkit.config.consumers import Consumer
from ds_toolkit.config.guard_settings import GuardSettings
from ds_toolkit.config.linter import lint
from ds_toolkit.env.fabric import Gpu, Host
from ds_toolkit.errors import ToolkitError
from ds_toolkit.findings import Finding, Severity, Where
from ds_toolkit.plan.job import Precision
from ds_toolkit.plan.network import parse_network

GB = 10**9
CPU_HOST = Host((), 16 * GB, 4, (), ("eth0", "lo"))
GPU_HOST = Host((Gpu("A100", 80 * GB),) * 8, 1000 * GB, 64, ("mlx5_0",), ("eth0", "lo"))
TINY = Answers(10**6, gpus_per_node=2, micro_batch_size=8, sequence_length=128, stage=3)


def test_a_cpu_config_builds_nothing_and_offloads_nothing() -> None:
    advice = advise_config(TINY, CPU_HOST)
    assert advice.config == {
        "$schema": "ds_config.schema.json",
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
    [(80, set()), (16, {"offload_optimizer"}), (6, {"offload_optimizer", "offload_param"})],
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
    assert any("host memory 1.0 TB as found here; --host-memory" in reason for reason in reasons)
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
    fix = str(caught.value.fix)
    assert "host memory 1.0 TB as found here; --host-memory" in fix
    fewest = int(fix.partition("--num-nodes ")[2].partition(",")[0])
    assert f"{2 * fewest} GPUs with 2 GPUs a host as now, is the fewest" in fix
    assert advise_config(Answers(175 * GB, gpus_per_node=2, num_nodes=fewest), GPU_HOST).chosen.fits
    with pytest.raises(ToolkitError, match="does not fit") as caught:
        advise_config(
            Answers(175 * GB, gpus_per_node=2, num_nodes=fewest - 1, host_memory_bytes=1000 * GB), GPU_HOST
        )
    assert f"--num-nodes {fewest}," in str(caught.value.fix)
    assert "as found here" not in str(caught.value.fix)
    with pytest.raises(ToolkitError, match="does not fit") as caught:
        advise_config(Answers(7 * GB, stage=0), GPU_HOST)
    assert "a larger --stage" in str(caught.value.fix)
    assert "hosts alone do not help" in str(caught.value.fix)
    assert isinstance(caught.value, NothingFitsError)
    assert len(caught.value.rungs) > 4


def test_activations_are_recomputed_before_anything_is_offloaded() -> None:
    advice = advise_config(Answers(7 * GB, gpu_memory_bytes=24 * GB), GPU_HOST)
    assert advice.job.recompute_activations
    assert "offload" not in advice.text
    assert any("gradient_checkpointing_enable" in reason for reason in advice.reasons)


def test_a_smaller_micro_batch_takes_more_accumulation() -> None:
    answers = Answers(7 * GB, micro_batch_size=16, gpu_memory_bytes=80 * GB, stage=3)
    config = advise_config(answers, GPU_HOST).config
    micro, accumulation = config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
    assert isinstance(micro, int)
    assert isinstance(accumulation, int)
    assert micro < 16
    assert micro * accumulation == 16


def test_nvme_is_offloaded_to_when_the_host_is_full() -> None:
    host = replace(GPU_HOST, memory_bytes=150 * GB)
    advice = advise_config(Answers(7 * GB, gpu_memory_bytes=6 * GB, nvme_path="/local"), host)
    zero = advice.config["zero_optimization"]
    assert isinstance(zero, dict)
    assert zero["offload_optimizer"] == {"device": "nvme", "nvme_path": "/local", "pin_memory": True}
    assert zero["offload_param"]["buffer_size"] >= 4096 * 4096


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("consumer", list(Consumer))
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_preset_is_clean_for_every_consumer(preset: str, consumer: Consumer, stage: int) -> None:
    for host in (CPU_HOST, GPU_HOST):
        answers = Answers(10**7, stage=stage, preset=preset, consumer=consumer, sequence_length=64)
        advice = advise_config(answers, host)
        findings = lint(advice.config, world_size=advice.job.cluster.world_size, consumer=consumer)
        assert findings == []
        assert advice.config["$schema"] == "ds_config.schema.json"
        assert ("auto" in json.dumps(advice.config)) is (consumer is Consumer.HF)


def test_an_unknown_preset_is_refused_with_the_real_ones() -> None:
    with pytest.raises(ToolkitError, match="no preset `fast`") as caught:
        advise_config(replace(TINY, preset="fast"), CPU_HOST)
    assert "pretrain, finetune, debug" in str(caught.value.fix)


def test_presets_differ_where_they_say() -> None:
    configs = {name: advise_config(replace(TINY, preset=name), CPU_HOST).config for name in PRESETS}
    assert "scheduler" in configs["finetune"]
    assert configs["debug"]["wall_clock_breakdown"] is True
    rates = {name: config["optimizer"]["params"]["lr"] for name, config in configs.items()}  # type: ignore[index]
    assert rates["finetune"] == pytest.approx(rates["pretrain"] / 10)


def test_what_the_trainer_fills_in_is_told_as_its_flags() -> None:
    answers = Answers(10**9, micro_batch_size=4, global_batch_size=64, consumer=Consumer.HF)
    (told,) = [reason for reason in advise_config(answers, GPU_HOST).reasons if "--per_device" in reason]
    assert "--per_device_train_batch_size 4 --gradient_accumulation_steps 2" in told
    assert "--bf16" in told


def test_the_mean_time_to_failure_sets_the_interval() -> None:
    often = advise_config(replace(TINY, mttf_per_gpu_seconds=3600.0), CPU_HOST)
    rarely = advise_config(replace(TINY, mttf_per_gpu_seconds=5e4 * 3600), CPU_HOST)
    intervals = [
        GuardSettings.model_validate(advice.config["ds_toolkit"]).save_every_seconds
        for advice in (often, rarely)
    ]
    # A cost of 0.1 s, and two ranks: sqrt(2 x 0.1 s x 1800 s), and the same for 25,000 h.
    assert intervals == pytest.approx([19, 4243], rel=0.05)


@pytest.mark.parametrize(
    ("answers", "found", "name"),
    [
        (Answers(10**9), None, "PCIe4"),
        (Answers(10**9, num_nodes=2), "4x200Gb-IB", "4x200Gb-IB"),
        (Answers(10**9, num_nodes=2), None, "10GbE"),
        (Answers(10**9, num_nodes=2, network=parse_network("25GbE")), "4x200Gb-IB", "25GbE"),
    ],
)
def test_the_network_is_said_found_or_assumed(answers: Answers, found: str | None, name: str) -> None:
    advice = advise_config(answers, GPU_HOST, found)
    assert advice.network is not None
    assert advice.network.name == name
    assert all(rung.communication_seconds for rung in advice.rungs)
    assert any(name in reason for reason in advice.reasons) is (answers.network is None)
    assert advise_config(TINY, CPU_HOST).network is None


@pytest.mark.parametrize(
    ("num_parameters", "rate"), [(10**6, 1e-3), (125 * 10**6, 6.4e-4), (7 * GB, 7.7e-5), (10**12, 6e-5)]
)
def test_the_learning_rate_falls_with_size_within_bounds(num_parameters: int, rate: float) -> None:
    assert learning_rate(num_parameters) == rate


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        (replace(TINY, nvme_path=""), "--nvme is empty"),
        (replace(TINY, nvme_path=" "), "--nvme is empty"),
        (replace(TINY, host_memory_bytes=0), "the host memory is 0"),
        (replace(TINY, gpu_memory_bytes=0), "the GPU memory is 0"),
        (replace(TINY, gpus_per_node=0), "number of ranks a node is 0"),
        (replace(TINY, num_nodes=0), "number of nodes is 0"),
        (replace(TINY, micro_batch_size=0), "micro batch size is 0"),
        (replace(TINY, global_batch_size=0), "the global batch 0"),
        (replace(TINY, sequence_length=0), "sequence length is 0"),
        (replace(TINY, mttf_per_gpu_seconds=0.0), "mean time to failure is 0"),
    ],
)
def test_nothing_and_zero_are_refused(answers: Answers, says: str) -> None:
    with pytest.raises(ToolkitError, match=says):
        advise_config(answers, CPU_HOST)


def test_findings_in_the_advice_itself_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = Finding("DS999", Severity.ERROR, "no good", Where(None, "/x"), None)
    monkeypatch.setattr("ds_toolkit.advise.presets.lint", lambda *_, **__: [finding])
    with pytest.raises(ToolkitError, match="own rules") as caught:
        advise_config(TINY, CPU_HOST)
    assert "DS999" in str(caught.value.why)
    assert "no good" in str(caught.value.why)
