"""What the guard relies on inside the installed DeepSpeed, its private names included."""

from __future__ import annotations

import inspect
import re
from types import FunctionType

import deepspeed
import pytest
from deepspeed.checkpoint import constants
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.topology import PipelineParallelGrid
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import groups

from ds_toolkit.resilience import following
from ds_toolkit.resilience.capture import DEEPSPEED_STATE_KEYS, RECOVERY_SCRIPTS


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (DeepSpeedEngine._save_checkpoint, ["self", "save_dir", "tag", "client_state"]),
        (DeepSpeedEngine._save_moe_checkpoint, ["self", "save_dir", "tag", "client_state"]),
        (DeepSpeedEngine._save_zero_checkpoint, ["self", "save_path", "tag"]),
        (DeepSpeedEngine._get_param_fragment_func, ["self", "param"]),
        (DeepSpeedEngine.module_state_dict, ["self"]),
        (DeepSpeedEngine.load_checkpoint, ["self", "load_dir", "tag"]),
        (DeepSpeedZeroOptimizer_Stage3.checkpoint_event_prologue, ["self"]),
        (DeepSpeedZeroOptimizer_Stage3.checkpoint_event_epilogue, ["self"]),
        (TorchCheckpointEngine.save, ["self", "state_dict", "path"]),
        (TorchCheckpointEngine.load, ["self", "path", "map_location"]),
        (PipelineEngine.train_batch, ["self", "data_iter"]),
        (PipelineEngine.eval_batch, ["self", "data_iter"]),
    ],
)
def test_functions_take_what_we_give(function: FunctionType, parameters: list[str]) -> None:
    assert list(inspect.signature(function).parameters)[: len(parameters)] == parameters


@pytest.mark.parametrize(
    "name",
    [
        "basic_optimizer",
        "checkpoint_engine",
        "checkpoint_mp_rank",
        "config",
        "data_parallel_group",
        "device",
        "dp_world_size",
        "global_samples",
        "global_steps",
        "has_moe_layers",
        "lr_scheduler",
        "micro_steps",
        "monitor",
        "mp_world_size",
        "param_names",
        "save_non_zero_checkpoint",
        "save_zero_checkpoint",
        "skipped_steps",
    ],
)
def test_the_engine_sets_the_attributes_we_read(name: str) -> None:
    assert f"self.{name} =" in inspect.getsource(DeepSpeedEngine)


@pytest.mark.parametrize(
    "name",
    [
        "_get_shared_params",
        "backward",
        "bfloat16_enabled",
        "forward",
        "fp16_enabled",
        "load_universal_checkpoint",
        "step",
        "super_offload",
        "was_step_applied",
        "zenflow_config",
        "zero_hpz_partition_size",
        "zero_nvme_offload_optimizer",
        "zero_optimization_partition_weights",
        "zero_optimization_stage",
    ],
)
def test_the_engine_has_the_methods_we_call(name: str) -> None:
    assert callable(getattr(DeepSpeedEngine, name))


def test_the_optimizer_steps_through_the_attribute_that_is_fenced() -> None:
    assert "self.optimizer.step()" in inspect.getsource(DeepSpeedEngine._take_model_step)
    assert "self._take_model_step(" in inspect.getsource(PipelineEngine)


def test_who_stands_where() -> None:
    for name in (
        "_get_sequence_data_parallel_rank",
        "_get_expert_parallel_rank",
        "_get_max_expert_size_name",
    ):
        assert callable(getattr(groups, name))
    for name in ("get_data_parallel_rank", "get_slice_parallel_rank", "get_stage_id"):
        assert callable(getattr(PipelineParallelGrid, name))
    assert "checkpoint_parallel_write_pipeline" in inspect.getsource(DeepSpeedConfig)


def test_save_checkpoint_calls_the_writers_we_call_and_no_others() -> None:
    source = inspect.getsource(DeepSpeedEngine.save_checkpoint)
    called = {name for name in dir(DeepSpeedEngine) if f"self.{name}(" in source and "save" in name}
    assert called == {"_save_moe_checkpoint", "_save_checkpoint", "_save_zero_checkpoint"}


def test_the_recovery_scripts() -> None:
    source = inspect.getsource(DeepSpeedEngine._copy_recovery_script)
    assert all(f'"{script}"' in source for script in RECOVERY_SCRIPTS)
    assert source.count(".py") == len(RECOVERY_SCRIPTS)


def test_keys_that_deepspeed_reserves_are_known() -> None:
    source = inspect.getsource(DeepSpeedEngine._common_checkpoint_state)
    written = set(re.findall(r"^\s+(?:return dict\()?(\w+)=", source, re.MULTILINE))
    assert {"module", "ds_version"} <= written
    assert "param_shapes" in written
    assert written <= DEEPSPEED_STATE_KEYS
    assert {
        constants.CHECKPOINT_PARALLEL_DIMS,
        constants.UNIVERSAL_CHECKPOINT_INFO,
        constants.AUTOEP_LAYERS_KEY,
        constants.AUTOEP_LAYERS_KEY_LEGACY,
        constants.FOLDING_METADATA_KEY,
    } <= DEEPSPEED_STATE_KEYS


def test_all_that_the_writers_write_is_followed() -> None:
    """Each name in a snapshot is learned, looked up, or makes the rank record each step."""
    source = inspect.getsource(DeepSpeedEngine._common_checkpoint_state)
    written = set(re.findall(r"^\s+(?:return dict\()?(\w+)=", source, re.MULTILINE))
    followed = following.STATIC | following.ABSENT | following.LOOKED_UP.keys() | following.ASKED
    assert written | {constants.CHECKPOINT_PARALLEL_DIMS} == followed
    for name in following.LOOKED_UP.keys() - {"lr_scheduler"}:
        assert f"{name}=self.{'config' if name == 'ds_config' else name}," in source
    source = inspect.getsource(DeepSpeedEngine._save_zero_checkpoint)
    assert set(re.findall(r"[( ](\w+)=", source.split("zero_sd = dict", 1)[1].split("\n", 1)[0])) == (
        following.OF_THE_OPTIMIZER
    )


def test_where_zero_keeps_what_it_trains() -> None:
    source = inspect.getsource(DeepSpeedEngine._get_zero_param_shapes)
    assert set(re.findall(r"self\.optimizer\.(\w+)", source)) == set(following.GROUPS)


def test_the_table_that_the_shared_memory_collectives_ask() -> None:
    from deepspeed.comm.torch import build_shm_op
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    from ds_toolkit.resilience.cpu import SHARED_MEMORY_COLLECTIVES

    assert ShareMemCommBuilder.NAME == SHARED_MEMORY_COLLECTIVES
    assert "deepspeed.ops.__compatible_ops__.get(" in inspect.getsource(build_shm_op)
    assert isinstance(deepspeed.ops.__compatible_ops__, dict)
