"""Random edits of good configurations, harmless and harmful ones."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

from ds_toolkit.config.members import known_keys
from ds_toolkit.config.schema import REMOVED_TOP_LEVEL_KEYS, DsConfig, Section

GOOD: list[dict[str, Any]] = [
    {"train_micro_batch_size_per_gpu": 4},
    {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "steps_per_print": 10,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "scheduler": {
            # It scales the optimizer's learning rate, which may then be any.
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": 10000, "warmup_num_steps": 100, "warmup_type": "linear"},
        },
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "reduce_bucket_size": 500000000,
            "stage3_prefetch_bucket_size": 50000000,
            "stage3_gather_16bit_weights_on_model_save": True,
            "offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": 0.5},
            "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 5},
            "leaf_module": {"classes": ["Block"]},
        },
        "aio": {"block_size": 1048576, "queue_depth": 8},
    },
    {
        "train_batch_size": 32,
        "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "min_loss_scale": 1},
        "zero_optimization": {"stage": 2, "allgather_bucket_size": 200000000, "reduce_scatter": True},
        "activation_checkpointing": {"partition_activations": True, "number_checkpoints": 4},
        "checkpoint": {"tag_validation": "Warn", "parallel_write": {"pipeline_stage": False}},
        "communication_data_type": "fp16",
        "gradient_allreduce_op": "mean",
        "data_types": {"grad_accum_dtype": "fp32"},
        "wall_clock_breakdown": False,
        "tensorboard": {"enabled": True, "output_path": "logs", "job_name": "tiny"},
        "csv_monitor": {"enabled": False},
        "wandb": {"enabled": False, "project": "tiny"},
        "comms_logger": {"enabled": True, "prof_ops": ["all_reduce"]},
        "flops_profiler": {"enabled": True, "profile_step": 5, "output_file": None},
        "timers": {"throughput": {"enabled": True, "synchronized": False}},
        "hybrid_engine": {"enabled": False, "max_out_tokens": 512},
        "compile": {"deepcompile": False, "passes": ["z1"]},
        "data_efficiency": {"enabled": True, "seed": 1, "data_sampling": {"enabled": True, "num_epochs": 2}},
        "autotuning": {"enabled": False, "fast": True},
        "torch_autocast": {"enabled": False},
        "weight_quantization": {"enabled": False},
        "log_level": "info",
    },
    {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "tensor_parallel": {"autotp_size": 1, "tp": {"tp_size": 1}},
        "expert_parallel": {"enabled": True, "autoep_size": 2, "top_k": 2},
        "pipeline": {"stages": 2, "activation_checkpoint_interval": 1},
        "zero_optimization": {"stage": 1, "round_robin_gradients": True, "elastic_checkpoint": False},
        "datastates_ckpt": False,
        "vocabulary_size": 32000,
    },
]
# World size with which each of them is right.
RANKS = 4

SCALAR_VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, 3, 4, -1, 7, 8, 16, 0.5, 1.0, 2.5, -0.5, 1e9, 1e-10, 10**20),
    *("auto", "", "8", "2.5", "5e8", "true", "false", "yes", "cpu", "nvme", "none", "gpu", "/nvme"),
    *("fp16", "bf16", "fp32", "float32", "sum", "mean", "Warn", "FAST", "adamw", "info", "nan", "-inf"),
    *([], ["x"], [1], {}, {"enabled": True}, {"x": 1}),
]
# Copies: an edit inside a value would change it for all that come after, and could put it into itself.
SCALARS = st.sampled_from(SCALAR_VALUES).map(copy.deepcopy)
VALUES = SCALARS | st.lists(SCALARS, max_size=2) | st.dictionaries(st.sampled_from(["enabled", "x"]), SCALARS)


def _paths(section: type[Section] = DsConfig, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    paths = []
    for key, known in known_keys(section).items():
        paths.append((*prefix, key))
        if known.subsection is not None:
            paths += _paths(known.subsection, (*prefix, key))
    return paths


def _is_switch(path: tuple[str, ...]) -> bool:
    section: type[Section] = DsConfig
    for key in path[:-1]:
        known = known_keys(section).get(key)
        if known is None or known.subsection is None:
            return False
        section = known.subsection
    known = known_keys(section).get(path[-1])
    return known is not None and isinstance(known.field.default, bool)


PATHS = [
    # The parser looks for a GPU when it reads this one.
    *(path for path in _paths() if path != ("aio", "use_gds")),
    *((key,) for key in REMOVED_TOP_LEVEL_KEYS),
    *(("zero_optimization", key) for key in ("mics_shard_size", "zeropp_loco_param", "aio", "stages")),
    *((section, "params", key) for section in ("optimizer", "scheduler") for key in ("lr", "max_grad_norm")),
]


SWITCHES = {path for path in PATHS if _is_switch(path)}


@st.composite
def edited(draw: st.DrawFn) -> dict[str, Any]:
    """A good configuration after one to three edits: values set, keys taken out, keys misspelt."""
    config = copy.deepcopy(draw(st.sampled_from(GOOD)))
    for _ in range(draw(st.integers(1, 3))):
        # What is there is edited as often as what is not.
        present = _present(config)
        path = draw(st.sampled_from(present) if present and draw(st.booleans()) else st.sampled_from(PATHS))
        parent = _parent(config, path)
        if parent is None:
            continue
        kind = draw(st.sampled_from(["set", "set", "set", "remove", "misspell", "nudge"]))
        value = parent.pop(path[-1], None)
        if kind == "set":
            # Of the right type as often as not: what is wrong then lies in what stands beside it.
            booleans = st.booleans() if draw(st.booleans()) and path in SWITCHES else VALUES
            parent[path[-1]] = draw(booleans)
        elif kind == "misspell":
            parent[path[-1] + draw(st.sampled_from(["s", " ", "_x"]))] = value
        elif kind == "nudge" and isinstance(value, int | float):
            parent[path[-1]] = draw(st.sampled_from([value + 1, value * 2, value / 3, -value, str(value)]))
    return config


def _present(config: dict[str, Any], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    paths = []
    for key, value in config.items():
        paths.append((*prefix, key))
        if isinstance(value, dict):
            paths += _present(value, (*prefix, key))
    return paths


def _parent(config: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any] | None:
    place: Any = config
    for key in path[:-1]:
        place = place.setdefault(key, {})
        if not isinstance(place, dict):
            return None
    return place  # type: ignore[no-any-return]


HARMLESS: list[tuple[tuple[str, ...], st.SearchStrategy[Any]]] = [
    (("gradient_clipping",), st.floats(0, 100)),
    (("steps_per_print",), st.integers(1, 10**6)),
    (("wall_clock_breakdown",), st.booleans()),
    (("memory_breakdown",), st.booleans()),
    (("dump_state",), st.booleans()),
    (("zero_optimization", "reduce_bucket_size"), st.integers(1, 10**10) | st.sampled_from([5e8, 2e8])),
    (("zero_optimization", "allgather_bucket_size"), st.integers(1, 10**9).map(lambda half: 2 * half)),
    (("zero_optimization", "overlap_comm"), st.booleans()),
    (("zero_optimization", "contiguous_gradients"), st.booleans()),
    (("zero_optimization", "load_from_fp32_weights"), st.booleans()),
    (("optimizer", "params", "lr"), st.floats(1e-8, 1)),
    (("optimizer", "params", "weight_decay"), st.floats(0, 1)),
    (("scheduler", "params", "warmup_num_steps"), st.integers(1, 10000)),
    (("fp16", "initial_scale_power"), st.integers(1, 32)),
    (("fp16", "loss_scale_window"), st.integers(1, 10**5)),
    (("fp16", "hysteresis"), st.integers(1, 10)),
    (("bf16", "check_grad_overflow"), st.booleans()),
    (("activation_checkpointing", "cpu_checkpointing"), st.booleans()),
    (("checkpoint", "tag_validation"), st.sampled_from(["Warn", "WARN", "warn", "Fail", "FAIL", "fail"])),
    (("data_efficiency", "seed"), st.integers(0, 2**31)),
    (("flops_profiler", "profile_step"), st.integers(1, 1000)),
]


@st.composite
def harmless_text(draw: st.DrawFn) -> str:
    """A good configuration as text: values within their ranges, keys in any order, comments, `$schema`."""
    config = copy.deepcopy(draw(st.sampled_from(GOOD)))
    for path, values in draw(st.lists(st.sampled_from(HARMLESS), max_size=6)):
        # A section that is not there stays away: its rules are about other things than its range.
        if path[0] in config or len(path) == 1:
            parent = _parent(config, path)
            if parent is not None:
                parent[path[-1]] = draw(values)
    extra = draw(
        st.sampled_from([{}, {"$schema": "ds_config.schema.json"}, {"_note": "ours", "x-owner": [1]}])
    )
    keys = draw(st.permutations([*config, *extra]))
    shuffled = {key: {**config, **extra}[key] for key in keys}
    text = json.dumps(shuffled, indent=draw(st.sampled_from([None, 2])))
    comment = draw(st.sampled_from(["", "// how we train\n", "# how we train\n", "/* two\nlines */"]))
    return comment + text + draw(st.sampled_from(["", "\n", "\n// the end\n"]))
