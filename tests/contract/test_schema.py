"""The schema is DeepSpeed's: the same keys, aliases and defaults, the same keys read and refused."""

from __future__ import annotations

import inspect
from importlib.metadata import version
from types import ModuleType
from typing import Any

import pytest
from pydantic_core import PydanticUndefined

from ds_toolkit.config import schema
from ds_toolkit.config.linter import is_newer_than_supported
from ds_toolkit.config.schema import (
    REMOVED_TOP_LEVEL_KEYS,
    REMOVED_ZERO_KEYS,
    TOP_LEVEL_KEYS,
    DsConfig,
    Section,
    keys_of,
    monitoring,
    optimization,
    parallelism,
    precision,
    storage,
    torch_classes,
    zero,
)

# Read outside DeepSpeedConfig, before it is made.
MESH_KEYS = {"data_parallel_size", "sequence_parallel_size"}
CHECKED = {
    zero.ZeroOptimization: "deepspeed.runtime.zero.config.DeepSpeedZeroConfig",
    zero.OffloadParam: "deepspeed.runtime.zero.offload_config.DeepSpeedZeroOffloadParamConfig",
    zero.OffloadOptimizer: "deepspeed.runtime.zero.offload_config.DeepSpeedZeroOffloadOptimizerConfig",
    zero.ZenFlow: "deepspeed.runtime.zenflow.zenflow_config.ZenFlowConfig",
    zero.LeafModule: "deepspeed.runtime.zero.leaf_module_config.DeepSpeedZeroLeafModuleConfig",
    precision.Fp16: "deepspeed.runtime.precision_config.DeepSpeedFP16Config",
    precision.Bf16: "deepspeed.runtime.precision_config.DeepSpeedBF16Config",
    monitoring.TensorBoard: "deepspeed.monitor.config.TensorBoardConfig",
    monitoring.Wandb: "deepspeed.monitor.config.WandbConfig",
    monitoring.CsvMonitor: "deepspeed.monitor.config.CSVConfig",
    monitoring.Comet: "deepspeed.monitor.config.CometConfig",
    monitoring.CommsLogger: "deepspeed.comm.config.CommsLoggerConfig",
    monitoring.ThroughputTimer: "deepspeed.utils.config.DeepSpeedThroughputTimerConfig",
    parallelism.TensorParallel: "deepspeed.runtime.tensor_parallel.config.TPTrainingConfig",
    parallelism.TensorParallelGroup: "deepspeed.runtime.tensor_parallel.config.TPConfig",
    parallelism.Compile: "deepspeed.compile.config.CompileConfig",
    parallelism.HybridEngine: "deepspeed.runtime.config.HybridEngineConfig",
    parallelism.WeightQuantization: "deepspeed.inference.config.WeightQuantConfig",
}
# Sections that are read key by key, and where what was read ends up.
READ_RAW = {
    "activation_checkpointing": "activation_checkpointing_config",
    "flops_profiler": "flops_profiler_config",
    "autotuning": "autotuning_config",
    "aio": "aio_config",
    "expert_parallel": "expert_parallel_config",
    "pipeline": "pipeline",
}
RAW_PATHS = [
    ("activation_checkpointing",),
    ("flops_profiler",),
    ("autotuning",),
    ("autotuning", "model_info"),
    ("aio",),
    ("expert_parallel",),
    ("torch_autocast",),
    ("data_types",),
    ("checkpoint",),
    ("checkpoint", "writer"),
    ("checkpoint", "parallel_write"),
    ("optimizer",),
    ("scheduler",),
    ("timers",),
    ("data_efficiency",),
    ("data_efficiency", "data_sampling"),
    ("data_efficiency", "data_routing"),
]


def all_sections(section: type[Section] = DsConfig) -> list[type[Section]]:
    from ds_toolkit.config.members import known_keys

    inner = [known.subsection for known in known_keys(section).values() if known.subsection]
    return [section, *(found for part in dict.fromkeys(inner) for found in all_sections(part))]


def model_at(path: tuple[str, ...]) -> type[Section]:
    from ds_toolkit.config.members import known_keys

    section: type[Section] = DsConfig
    for key in path:
        subsection = known_keys(section)[key].subsection
        assert subsection is not None
        section = subsection
    return section


def import_class(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(__import__(module, fromlist=[attribute]), attribute)


def default_of(field: Any) -> Any:
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return None
    if isinstance(default, Section) or hasattr(default, "model_fields_set") or default == {}:
        return "a section" if default != {} else {}
    return getattr(default, "value", default)


def test_the_installed_version_is_one_that_is_supported() -> None:
    oldest, newest = schema.SUPPORTED_DEEPSPEED
    assert oldest <= version("deepspeed") <= newest
    assert not is_newer_than_supported(version("deepspeed"))
    assert is_newer_than_supported("0.20.0")
    assert is_newer_than_supported("1.0")
    assert not is_newer_than_supported("0.19.8+unknown")


@pytest.mark.parametrize("ours", CHECKED, ids=lambda section: section.__name__)
def test_fields_aliases_and_defaults_are_those_of_deepspeeds_models(ours: type[Section]) -> None:
    theirs = import_class(CHECKED[ours])
    assert {name: field.alias for name, field in ours.model_fields.items()} == {
        name: field.alias for name, field in theirs.model_fields.items()
    }
    for name, field in theirs.model_fields.items():
        expected, found = default_of(field), default_of(ours.model_fields[name])
        if found == "a section" and expected in ({}, "a section"):
            continue
        if name == "dtype":
            # A torch.dtype, which no file can hold.
            continue
        assert found == expected, name


@pytest.mark.parametrize("ours", CHECKED, ids=lambda section: section.__name__)
def test_constraints_are_those_of_deepspeeds_models(ours: type[Section]) -> None:
    theirs = import_class(CHECKED[ours])
    for name, field in theirs.model_fields.items():
        bounds = {repr(bound) for bound in field.metadata}
        assert bounds <= {repr(bound) for bound in ours.model_fields[name].metadata}, name


def test_every_checked_section_is_compared() -> None:
    checked = {section for section in all_sections() if not section.read_raw}
    assert checked == set(CHECKED)


def test_the_top_level_keys_are_those_that_the_parser_asks_for(
    parse: Any, recorder: Any, deepspeed: ModuleType
) -> None:
    asked: set[str] = set()
    # A bare boolean is the only spelling with which allgather_size is read.
    for stage in ({"stage": 0}, True):
        config = recorder(train_micro_batch_size_per_gpu=1, zero_optimization=stage)
        parse(config)
        asked |= config.asked
    assert asked - REMOVED_TOP_LEVEL_KEYS.keys() == TOP_LEVEL_KEYS - MESH_KEYS
    source = inspect.getsource(deepspeed)
    assert all(f'"{key}" in config' in source for key in MESH_KEYS)


def test_the_removed_keys_are_those_that_the_parser_refuses(deepspeed: ModuleType) -> None:
    config = deepspeed.runtime.config
    assert REMOVED_TOP_LEVEL_KEYS.keys() == config._REMOVED_TOP_LEVEL_CONFIG_KEYS.keys()
    assert REMOVED_ZERO_KEYS.keys() == config._REMOVED_ZERO_CONFIG_KEYS.keys()


@pytest.mark.parametrize("path", RAW_PATHS, ids=".".join)
def test_the_keys_of_raw_sections_are_those_that_the_parser_asks_for(
    path: tuple[str, ...], parse: Any, recorder: Any
) -> None:
    section = recorder(type="AdamW") if path == ("optimizer",) else recorder()
    if path in (("timers",), ("scheduler",)):
        section = recorder(type="WarmupLR") if path == ("scheduler",) else recorder(throughput={})
    if path == ("expert_parallel",):
        # An empty section is not looked into.
        section = recorder(enabled=False, load_balance_coeff=None)
    if path == ("torch_autocast",):
        section = recorder(enabled=False)
    data: Any = section
    for key in reversed(path):
        data = {key: data}
    parse({"train_batch_size": 1, **data})
    assert section.asked == set(keys_of(model_at(path)))


@pytest.mark.parametrize("section", READ_RAW)
def test_defaults_of_raw_sections_are_those_that_the_parser_fills_in(section: str, parse: Any) -> None:
    parsed = getattr(parse({"train_batch_size": 1, section: {}}), READ_RAW[section])
    values = parsed if isinstance(parsed, dict) else vars(parsed)
    for key, field in model_at((section,)).model_fields.items():
        # The engine fills it in, and AutoEP marks it as not given.
        if key in values and key != "expert_w3":
            assert values[key] == default_of(field), key


def test_defaults_at_the_top_level_are_those_that_the_parser_fills_in(parse: Any) -> None:
    parsed = parse({"train_batch_size": 1})
    compared = 0
    for key, field in DsConfig.model_fields.items():
        if hasattr(parsed, key) and key not in ("pipeline", "hybrid_engine"):
            expected = str(getattr(parsed, key)).replace("torch.float32", "fp32")
            if key not in (
                "train_batch_size",
                "train_micro_batch_size_per_gpu",
                "gradient_accumulation_steps",
            ):
                assert str(default_of(field)) == expected, key
                compared += 1
    assert compared > 15


def test_every_key_has_a_line() -> None:
    for section in all_sections():
        for key, field in section.model_fields.items():
            assert field.description, (section, key)
            assert field.description.endswith("."), (section, key)
            assert len(field.description) > 10, (section, key)


def test_optimizers_and_schedulers_take_what_we_say(deepspeed: ModuleType) -> None:
    import torch
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
    from deepspeed.runtime import lr_schedules
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
    from deepspeed.runtime.engine import DeepSpeedEngine

    def takes(*classes: Any) -> set[str]:
        arguments = {name for made in classes for name in inspect.signature(made.__init__).parameters}
        return arguments - {"self", "params", "model_params", "optimizer"}

    # The engine makes these arguments itself, or takes them out before.
    by_engine = {"adam_w_mode", "adamw_mode", "torch_adam", "fp32_optimizer_states", "max_grad_norm"}
    params = optimization.OPTIMIZER_PARAMS
    adam = takes(FusedAdam, DeepSpeedCPUAdam, torch.optim.AdamW)
    assert params["adamw"] - by_engine == adam - by_engine
    assert params["adam"] == params["adamw"]
    assert params["adagrad"] == takes(DeepSpeedCPUAdagrad, torch.optim.Adagrad)
    assert params["lamb"] == takes(FusedLamb) - by_engine
    assert params["lion"] == takes(FusedLion, DeepSpeedCPULion)
    halves = {*DeepSpeedEngine._MUON_HALF_KEYS, *DeepSpeedEngine._ADAM_HALF_KEYS, "muon_lr", "adam_lr"}
    assert params["muon"] - by_engine == halves
    assert set(DEEPSPEED_OPTIMIZERS) == params.keys() | optimization.MUP_OPTIMIZERS
    in_torch = {name for name, made in vars(torch.optim).items() if isinstance(made, type)} - {"Optimizer"}
    assert {name for name in in_torch if name.lower() not in params} == torch_classes.TORCH_OPTIMIZERS.keys()
    for name, known in torch_classes.TORCH_OPTIMIZERS.items():
        assert takes(getattr(torch.optim, name)) == known
    assert set(lr_schedules.VALID_LR_SCHEDULES) == optimization.SCHEDULER_PARAMS.keys()
    for name, known in optimization.SCHEDULER_PARAMS.items():
        made = getattr(lr_schedules, name)
        assert takes(made) == known
        signature = inspect.signature(made.__init__).parameters.values()
        needed = tuple(each.name for each in signature if each.default is each.empty)[2:]
        assert needed == optimization.NEEDED_SCHEDULER_PARAMS.get(name, ())
    for name, known in torch_classes.TORCH_SCHEDULERS.items():
        made = getattr(torch.optim.lr_scheduler, name)
        assert takes(made) == known
        signature = inspect.signature(made.__init__).parameters.values()
        needed = tuple(each.name for each in signature if each.default is each.empty)[2:]
        assert needed == torch_classes.NEEDED_TORCH_PARAMS.get(name, ())


def test_checkpoint_choices_are_deepspeeds() -> None:
    from deepspeed.runtime.model_checkpointing import constants

    for values, annotation in (
        (constants.CHECKPOINT_TAG_VALIDATION_MODES, storage.TagValidation),
        (constants.CHECKPOINT_WRITER_TYPES, storage.WriterType),
        (constants.CHECKPOINT_DATA_PARALLEL_UNITS, storage.WriterUnit),
    ):
        choices = annotation.__origin__.__args__  # type: ignore[attr-defined]
        assert set(choices) == set(values)
