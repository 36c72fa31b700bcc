"""What we believe of the installed DeepSpeed's parser: its keys, and what it accepts and refuses."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ds_toolkit.advise.answers import Answers
from ds_toolkit.advise.presets import advise_config
from ds_toolkit.config.rules import RULES
from ds_toolkit.config.schema import (
    REMOVED_TOP_LEVEL_KEYS,
    REMOVED_ZERO_KEYS,
    TOP_LEVEL_KEYS,
    ZERO_KEYS,
    ZERO_SHORT_NAMES,
)
from ds_toolkit.env.fabric import Gpu, Host
from ds_toolkit.plan.job import Precision

GB = 10**9
GPU_HOST = Host((Gpu("A100", 80 * GB),) * 2, 1000 * GB, 64, (), ())
CPU_HOST = Host((), 1000 * GB, 2, (), ())
# Read outside DeepSpeedConfig, before it is made.
MESH_KEYS = {"data_parallel_size", "sequence_parallel_size"}
REFUSED_AT_THE_START = {"DS003", "DS004", "DS101", "DS102", "DS301"}


class ReadRecorder(dict[str, Any]):
    """A configuration that notes each key that is asked for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.asked: set[str] = set()

    def __copy__(self) -> ReadRecorder:
        return self

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        recorder = self

        class Keys:
            def __contains__(self, key: object) -> bool:
                return key in recorder

            def __iter__(self) -> Iterator[str]:
                return iter(list(dict.keys(recorder)))

        return Keys()


@pytest.fixture(scope="module")
def deepspeed() -> ModuleType:
    import deepspeed
    import deepspeed.runtime.config
    import deepspeed.runtime.zero.config

    return deepspeed


@pytest.fixture
def parse(deepspeed: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """DeepSpeed's parser for a number of ranks, without a process group."""
    config = deepspeed.runtime.config
    monkeypatch.setattr(config.dist, "get_rank", lambda: 0)

    def parse_for(data: dict[str, Any], world_size: int = 1) -> Any:
        stub = SimpleNamespace(get_data_parallel_world_size=lambda: world_size)
        return config.DeepSpeedConfig(data, mpu=stub)

    return parse_for


def test_the_top_level_keys_are_those_that_the_parser_asks_for(parse: Any, deepspeed: ModuleType) -> None:
    asked: set[str] = set()
    # A bare boolean is the only spelling with which allgather_size is read.
    for zero in ({"stage": 0}, True):
        recorder = ReadRecorder(train_micro_batch_size_per_gpu=1, zero_optimization=zero)
        parse(recorder)
        asked |= recorder.asked
    assert asked - REMOVED_TOP_LEVEL_KEYS.keys() == TOP_LEVEL_KEYS.keys() - MESH_KEYS
    source = inspect.getsource(deepspeed)
    assert all(f'"{key}" in config' in source for key in MESH_KEYS)


def test_the_removed_keys_are_those_that_the_parser_refuses(deepspeed: ModuleType) -> None:
    config = deepspeed.runtime.config
    assert REMOVED_TOP_LEVEL_KEYS.keys() == config._REMOVED_TOP_LEVEL_CONFIG_KEYS.keys()
    assert REMOVED_ZERO_KEYS.keys() == config._REMOVED_ZERO_CONFIG_KEYS.keys()


def test_the_zero_keys_are_the_fields_of_deepspeeds_model(deepspeed: ModuleType) -> None:
    fields = deepspeed.runtime.zero.config.DeepSpeedZeroConfig.model_fields
    assert ZERO_KEYS.keys() == {field.alias or name for name, field in fields.items()}
    assert {name for name, field in fields.items() if field.alias} == ZERO_SHORT_NAMES


def test_every_key_has_a_line() -> None:
    lines = {**TOP_LEVEL_KEYS, **ZERO_KEYS}.values()
    assert all(line.endswith(".") and len(line) > 15 for line in lines)


@pytest.mark.parametrize("rule", list(RULES), ids=lambda rule: rule.code)
def test_deepspeed_refuses_what_the_manuals_say_it_refuses(rule: Any, parse: Any) -> None:
    for example in rule.good:
        parse(json.loads(example.text), int(example.context.get("world_size", 1)))
    for example in rule.bad:
        data, world_size = json.loads(example.text), int(example.context.get("world_size", 1))
        if rule.code in REFUSED_AT_THE_START:
            with pytest.raises(Exception, match=r"."):
                parse(data, world_size)
        else:
            parse(data, world_size)


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


@pytest.mark.parametrize(("gpu_memory_gb", "offloaded"), [(24, (True, False)), (14, (True, True))])
def test_generated_offloading_is_understood(
    gpu_memory_gb: int, offloaded: tuple[bool, bool], parse: Any
) -> None:
    answers = Answers(7 * GB, gpus_per_node=8, gpu_memory_bytes=gpu_memory_gb * GB, stage=3)
    zero = parse(advise_config(answers, GPU_HOST).config, 8).zero_config
    assert (zero.offload_optimizer is not None, zero.offload_param is not None) == offloaded


def test_defaults_that_the_advice_speaks_of_are_deepspeeds(parse: Any) -> None:
    from ds_toolkit.plan.memory import DEFAULT_BUCKET_SIZE, DEFAULT_PREFETCH_BUCKET_SIZE

    config = parse({"train_batch_size": 1})
    assert config.gradient_clipping == 1.0
    assert config.steps_per_print is None
    zero = config.zero_config
    assert zero.reduce_bucket_size == zero.allgather_bucket_size == DEFAULT_BUCKET_SIZE
    assert zero.prefetch_bucket_size == DEFAULT_PREFETCH_BUCKET_SIZE
    assert zero.param_persistence_threshold == 100_000
    assert zero.gather_16bit_weights_on_model_save is False
