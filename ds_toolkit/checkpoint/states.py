"""What DeepSpeed keeps in model states and optimizer states, checked and under one name each.

Keys: DeepSpeed 0.19.8, runtime/engine.py (`_common_checkpoint_state`), runtime/zero/stage_1_and_2.py
(`state_dict`), runtime/zero/stage3.py (`_rigid_state_dict`).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_toolkit.checkpoint.layout import unsupported
from ds_toolkit.checkpoint.reductions import Inert, TensorRecord
from ds_toolkit.checkpoint.shards import Shard
from ds_toolkit.errors import ToolkitError

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class ModelStates:
    """A `*_model_states.pt` file.

    `group_shapes` holds the optimized parameters, a mapping a group, in the order in which they lie in the
    flat groups (stage 0: empty). At stage 3 the tensors of `module` are empty placeholders, buffers excepted.
    """

    shard: Shard
    module: Mapping[str, TensorRecord]
    left_out: tuple[str, ...]
    buffer_names: frozenset[str]
    group_shapes: tuple[Shapes, ...]
    frozen_shapes: Shapes
    frozen_fragments: Mapping[str, TensorRecord]
    shared: Mapping[str, str]
    optimizer: Mapping[str, Any]
    step: int
    dp_world_size: int
    mp_world_size: int
    ds_version: str | None


@dataclass(frozen=True)
class OptimizerStates:
    """A `*_optim_states.pt` file of a ZeRO optimizer; `groups` are flat fp32 weights of one rank.

    `group_paddings` counts the elements at the end of each group that were cut off before saving;
    `alignment_paddings` those that follow each parameter. `step` is the base optimizer's, where it has one.
    """

    shard: Shard
    zero_stage: int
    partition_counts: tuple[int, ...]
    groups: tuple[TensorRecord, ...]
    group_paddings: tuple[int, ...]
    alignment_paddings: tuple[tuple[int, ...], ...] | None
    step: float | None


def model_states(shard: Shard) -> ModelStates:
    """Read them out of an opened file.

    Raises:
        ToolkitError: the file holds something else, or a layout that is not supported, which is then named.
    """
    root = _mapping(shard, shard.root, "the file")
    if "module" not in root or "dp_world_size" not in root:
        raise _unexpected(shard, "it holds no model states of DeepSpeed")
    if root["module"] is None:
        raise unsupported(shard.path, "a pipeline model, whose weights lie in layer files")
    if root.get("autoep_layers") or root.get("ds_autoep_layers"):
        raise unsupported(shard.path, "a model with automatic expert parallelism")
    module = _mapping(shard, root["module"], "module")
    tensors = {name: value for name, value in module.items() if isinstance(value, TensorRecord)}
    left_out = tuple(str(name) for name in module if name not in tensors)
    for name in left_out:
        # torch's modules may keep anything under this one name; elsewhere it is a weight of a kind not known.
        if not name.endswith("_extra_state"):
            raise unsupported(shard.path, f"something other than an ordinary tensor under the name {name}")
    return ModelStates(
        shard=shard,
        module=tensors,
        left_out=left_out,
        buffer_names=frozenset(root.get("buffer_names") or ()),
        group_shapes=tuple(_shapes(shard, group) for group in root.get("param_shapes") or ()),
        frozen_shapes=_shapes(shard, root.get("frozen_param_shapes") or {}),
        frozen_fragments=_tensors(shard, root.get("frozen_param_fragments") or {}, "frozen_param_fragments"),
        shared=_mapping(shard, root.get("shared_params") or {}, "shared_params"),
        optimizer=root["optimizer"] if isinstance(root.get("optimizer"), dict) else {},
        step=_number(shard, root.get("global_steps"), "global_steps"),
        dp_world_size=_number(shard, root["dp_world_size"], "dp_world_size"),
        mp_world_size=_number(shard, root.get("mp_world_size", 1), "mp_world_size"),
        ds_version=str(root["ds_version"]) if root.get("ds_version") else None,
    )


def optimizer_states(shard: Shard) -> OptimizerStates:
    """Read them out of an opened file.

    Raises:
        ToolkitError: the file holds something else, or a layout that is not supported, which is then named.
    """
    root = _mapping(shard, shard.root, "the file")
    state = _mapping(shard, root.get("optimizer_state_dict"), "optimizer_state_dict")
    # BF16_Optimizer (bf16 with grad_accum_dtype fp32, pipelines) says no stage and splits as stage 1 does,
    # but leaves the padding at the end of each group where it is.
    is_bf16_optimizer = "zero_stage" not in state and "single_partition_of_fp32_groups" in state
    if "zero_stage" not in state and not is_bf16_optimizer:
        raise _unexpected(shard, "it holds no states of a ZeRO optimizer")
    stage = 1 if is_bf16_optimizer else _stage(shard, state["zero_stage"])
    flat = state.get("fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups")
    base = state.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state")
    counts = state.get("partition_count")
    paddings = state.get("param_alignment_paddings")
    return OptimizerStates(
        shard=shard,
        zero_stage=stage,
        partition_counts=tuple(
            _number(shard, count, "partition_count")
            for count in (counts if isinstance(counts, list | tuple) else [counts])
        ),
        groups=_flat_groups(shard, flat),
        group_paddings=() if is_bf16_optimizer else tuple(state.get("group_paddings") or ()),
        alignment_paddings=tuple(map(tuple, paddings)) if paddings else None,
        step=_optimizer_step(shard, base),
    )


def _unexpected(shard: Shard, why: str) -> ToolkitError:
    return ToolkitError("a checkpoint file does not hold what its name says", where=shard.path, why=why)


def _mapping(shard: Shard, value: Any, key: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _unexpected(shard, f"{key} is no mapping")
    return value


def _number(shard: Shard, value: Any, key: str) -> int:
    if not isinstance(value, int) or value < 0:
        raise _unexpected(shard, f"{key} is no number")
    return value


def _shapes(shard: Shard, value: Any) -> Shapes:
    shapes = _mapping(shard, value, "a table of shapes")
    if not all(isinstance(name, str) and isinstance(shape, tuple) for name, shape in shapes.items()):
        raise _unexpected(shard, "a table of shapes holds something else")
    return shapes


def _tensors(shard: Shard, value: Any, key: str) -> Mapping[str, TensorRecord]:
    tensors = _mapping(shard, value, key)
    if not all(isinstance(tensor, TensorRecord) for tensor in tensors.values()):
        raise _unexpected(shard, f"{key} holds what is no tensor")
    return tensors


def _flat_groups(shard: Shard, value: Any) -> tuple[TensorRecord, ...]:
    groups = tuple(value) if isinstance(value, list | tuple) else ()
    if not groups or not all(isinstance(group, TensorRecord) and len(group.shape) == 1 for group in groups):
        raise _unexpected(shard, "its flat fp32 groups are missing")
    return groups


def _stage(shard: Shard, value: Any) -> int:
    # DeepSpeed pickles an enum member, which stays the call that would have looked it up.
    stage = value.arguments[0] if isinstance(value, Inert) and value.arguments else value
    if stage not in (1, 2, 3):
        raise _unexpected(shard, f"zero_stage is {stage!r}")
    return int(stage)


def _optimizer_step(shard: Shard, base: Any) -> float | None:
    state = base.get("state") if isinstance(base, dict) else None
    first = next(iter(state.values()), None) if isinstance(state, dict) else None
    step = first.get("step") if isinstance(first, dict) else None
    if isinstance(step, TensorRecord) and step.num_elements == 1 and step.dtype.name == "float32":
        (step,) = struct.unpack("<f", shard.read(step))
    return float(step) if isinstance(step, int | float) else None
