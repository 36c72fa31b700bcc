"""What the Hugging Face Trainer's own resolver, and then DeepSpeed, make of the configurations for it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import deepspeed_parser
import pytest
import transformers
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from ds_toolkit.advise.answers import Answers
from ds_toolkit.advise.presets import PRESETS, advise_config
from ds_toolkit.config.consumers import Consumer
from ds_toolkit.env.fabric import Gpu, Host
from ds_toolkit.plan.job import Precision

GB = 10**9
CPU_HOST = Host((), 1000 * GB, 2, (), ())
GPU_HOST = Host((Gpu("A100", 80 * GB),) * 2, 1000 * GB, 64, (), ())


class Sized:
    """As much of a model as the resolver looks at."""

    config = transformers.LlamaConfig(hidden_size=256)


def resolved(config: dict[str, object], arguments: transformers.TrainingArguments) -> dict[str, Any]:
    resolver = HfTrainerDeepSpeedConfig(copy.deepcopy(config))
    resolver.trainer_config_process(arguments)
    resolver.trainer_config_finalize(arguments, Sized(), 100)
    result: dict[str, Any] = resolver.config
    return result


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP32])
@pytest.mark.parametrize("host", [CPU_HOST, GPU_HOST], ids=["cpu", "gpu"])
def test_the_trainer_resolves_what_deepspeed_accepts(
    preset: str, stage: int, precision: Precision, host: Host, tmp_path: Path
) -> None:
    answers = Answers(
        10**7, stage=stage, precision=precision, preset=preset, consumer=Consumer.HF, micro_batch_size=4
    )
    advice = advise_config(answers, host)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=3e-4,
        max_grad_norm=0.7,
        bf16=precision is Precision.BF16,
    )
    config = resolved(advice.config, arguments)
    assert "auto" not in str(config)
    with deepspeed_parser.parser() as parse:
        # The resolver counts the ranks that there are here: one.
        parsed = parse(config, 1)
    assert parsed.zero_optimization_stage == stage
    assert (parsed.train_micro_batch_size_per_gpu, parsed.gradient_accumulation_steps) == (4, 2)
    assert parsed.gradient_clipping == 0.7
    assert parsed.bfloat16_config.enabled is (precision is Precision.BF16)
    assert config["optimizer"]["params"]["lr"] == 3e-4


def test_a_trainer_that_is_told_otherwise_does_not_contradict(tmp_path: Path) -> None:
    config = advise_config(Answers(10**7, stage=2, consumer=Consumer.HF), GPU_HOST).config
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, per_device_train_batch_size=16, weight_decay=0.25
    )
    config = resolved(config, arguments)
    assert config["train_micro_batch_size_per_gpu"] == 16
    assert config["optimizer"]["params"]["weight_decay"] == 0.25
    assert config["bf16"]["enabled"] is False


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("consumer", [Consumer.NATIVE, Consumer.ACCELERATE, Consumer.LIGHTNING])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_accepts_what_needs_no_resolver(preset: str, consumer: Consumer, stage: int) -> None:
    answers = Answers(10**7, stage=stage, preset=preset, consumer=consumer, micro_batch_size=4)
    advice = advise_config(answers, GPU_HOST)
    config: dict[str, Any] = copy.deepcopy(advice.config)
    if consumer is Consumer.LIGHTNING:
        # Its Trainer writes this key, and refuses one that is there.
        config["gradient_accumulation_steps"] = 1
    with deepspeed_parser.parser() as parse:
        parsed = parse(config, 2)
    assert parsed.zero_optimization_stage == stage
    assert parsed.train_batch_size == 8
