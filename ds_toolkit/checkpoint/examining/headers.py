"""What a checkpoint file says of the run that wrote it: the facts in which all files of one save agree.

DeepSpeed puts no name of the run into its files, so two runs can only be told apart by what differs in these
facts. Keys: DeepSpeed 0.19.8, runtime/engine.py (`_common_checkpoint_state`, `_save_zero_checkpoint`).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ds_toolkit.checkpoint.layout import ShardKind
from ds_toolkit.checkpoint.reductions import Inert, TensorRecord
from ds_toolkit.checkpoint.shards import Shard
from ds_toolkit.errors import ToolkitError

STAGE_OF_CONFIG = "ZeRO stage in the config"
STEP_FACTS = ("step", "optimizer step")
_MAX_DEPTH = 20
# Sections that are the same on every rank. The others may hold paths and names of a rank's own.
_CONFIG_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer",
    "scheduler",
    "fp16",
    "bf16",
)
_MODEL_KEYS = {
    "global_steps": "step",
    "global_samples": "number of samples",
    "skipped_steps": "number of skipped steps",
    "mp_world_size": "model-parallel world size",
    "checkpoint_parallel_dimensions": "parallel layout",
    "lr_scheduler": "state of the scheduler",
}
_OPTIMIZER_KEYS = {
    "loss_scaler": "loss scale",
    "zero_stage": "ZeRO stage",
}


@dataclass(frozen=True)
class Header:
    """Facts by name, as plain values that can be compared.

    Attributes:
        of_tag: those in which all files of a tag agree.
        of_kind: those in which all model states, or all optimizer states, agree.
        of_cell: those in which the model states, or optimizer states, of one cell agree.
    """

    of_tag: Mapping[str, Any] = field(default_factory=dict)
    of_kind: Mapping[str, Any] = field(default_factory=dict)
    of_cell: Mapping[str, Any] = field(default_factory=dict)


def read_header(kind: ShardKind, shard: Shard) -> Header:
    """The facts of an opened file; none where it has none, such as the layers of a pipeline."""
    root = shard.root if isinstance(shard.root, dict) else {}
    of_tag = _common(root)
    if kind is ShardKind.MODEL:
        if _is_count(root.get("dp_world_size")):
            of_tag["data-parallel world size"] = root["dp_world_size"]
        shapes = {"shapes of the parameters": root.get("param_shapes"), "buffers": root.get("buffer_names")}
        return Header(of_tag, _named(root, _MODEL_KEYS), _known(shapes))
    state = root.get("optimizer_state_dict")
    if kind is not ShardKind.OPTIMIZER or not isinstance(state, dict):
        return Header(of_tag)
    counts = state.get("partition_count")
    counts = [count for count in (counts if isinstance(counts, list) else [counts]) if _is_count(count)]
    if counts:
        # Groups of experts are shared by fewer ranks.
        of_tag["data-parallel world size"] = max(counts)
    return Header(of_tag, _optimizer_facts(shard, state), _group_facts(state))


def _common(root: Mapping[str, Any]) -> dict[str, Any]:
    of_tag = _known({"DeepSpeed version": root.get("ds_version")})
    config = root.get("ds_config")
    if not isinstance(config, dict):
        return of_tag
    zero = config.get("zero_optimization")
    zero = zero if isinstance(zero, dict) else {}
    of_tag[STAGE_OF_CONFIG] = plain(zero.get("stage", 0))
    # What a config leaves out counts: DeepSpeed keeps it as it was written.
    of_tag |= {f"`{key}` in the config": plain(config.get(key)) for key in _CONFIG_KEYS}
    # Its sections say where to offload to, which may be a path for each rank.
    settings = {key: plain(value) for key, value in zero.items() if not isinstance(value, dict)}
    of_tag["`zero_optimization` in the config"] = settings
    return of_tag


def _optimizer_facts(shard: Shard, state: Mapping[str, Any]) -> dict[str, Any]:
    facts = _named(state, _OPTIMIZER_KEYS)
    base = base_state(state)
    step = optimizer_step(shard, base)
    if step is not None:
        facts["optimizer step"] = step
    return facts


def _group_facts(state: Mapping[str, Any]) -> dict[str, Any]:
    groups = base_state(state).get("param_groups")
    facts: dict[str, Any] = {}
    if isinstance(groups, list):
        # Which parameters are in a group is numbered, not named.
        settings = [
            {key: value for key, value in group.items() if key != "params"}
            for group in groups
            if isinstance(group, dict)
        ]
        facts["settings of the optimizer"] = plain(settings)
    flat = state.get("fp32_flat_groups")
    if isinstance(flat, list):
        facts["sizes of the fp32 groups"] = [_num_elements(group) for group in flat]
    flat, paddings = state.get("single_partition_of_fp32_groups"), state.get("group_paddings")
    if isinstance(flat, list) and isinstance(paddings, list) and "zero_stage" in state:
        # What was cut off before saving counts: every rank has an equal part of a group.
        facts["sizes of the fp32 groups"] = [
            _num_elements(group) + (padding if isinstance(padding, int) else 0)
            for group, padding in zip(flat, paddings, strict=False)
        ]
    return facts


def base_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """The base optimizer's state_dict inside that of a ZeRO optimizer; empty if there is none."""
    for key in ("base_optimizer_state", "optimizer_state_dict"):
        if isinstance(state.get(key), dict):
            base: dict[str, Any] = state[key]
            return base
    return {}


def optimizer_step(shard: Shard, base: Mapping[str, Any]) -> float | None:
    """Steps that the base optimizer has counted for its first parameter, where it counts."""
    states = base.get("state")
    first = next(iter(states.values()), None) if isinstance(states, dict) else None
    step = first.get("step") if isinstance(first, dict) else None
    if isinstance(step, TensorRecord) and step.num_elements == 1 and step.dtype.name == "float32":
        try:
            (step,) = struct.unpack("<f", shard.read(step))
        except (ToolkitError, struct.error):
            return None
    return float(step) if isinstance(step, int | float) else None


def plain(value: Any, depth: int = 0) -> Any:
    """A value of a checkpoint as one that can be compared: tensors by shape, objects by class and content."""
    if depth > _MAX_DEPTH:
        return "..."
    if isinstance(value, TensorRecord):
        return ("tensor", value.shape, value.dtype.name)
    if isinstance(value, Inert):
        return (str(value.function), plain(list(value.arguments), depth + 1), plain(value.state, depth + 1))
    if isinstance(value, dict):
        return {key: plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, depth + 1) for item in value]
    # NaN is like no other value, not even itself.
    return value if value == value else str(value)


def _named(source: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return _known({name: source.get(key) for key, name in names.items()})


def _known(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: plain(value) for name, value in facts.items() if value is not None}


def _num_elements(value: Any) -> int:
    return value.num_elements if isinstance(value, TensorRecord) else 0


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and value > 0
