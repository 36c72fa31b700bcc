"""What DeepSpeed keeps in model states and optimizer states, checked and under one name each.

Keys: DeepSpeed 0.19.8, runtime/engine.py (`_common_checkpoint_state`), runtime/zero/stage_1_and_2.py
(`state_dict`), runtime/zero/stage3.py (`_rigid_state_dict`).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_toolkit.checkpoint.fields import Fields, Shapes, unexpected
from ds_toolkit.checkpoint.layout import unsupported
from ds_toolkit.checkpoint.reductions import Inert, TensorRecord
from ds_toolkit.checkpoint.shards import Shard


@dataclass(frozen=True)
class ModelStates:
    """A `*_model_states.pt` file.

    `group_shapes` holds the optimized parameters, a mapping a group, in the order in which they lie in the
    flat groups (stage 0: empty). At stage 3 the tensors of `module` are empty placeholders, buffers excepted.
    `lists_no_frozen`: there is a place for frozen parameters and nothing in it, not even an empty list; below
    stage 2 that is always so.
    `universal_info` says how tensor parallelism split the tensors, if anything does. `dp_world_size` is 0
    where the file does not say it.
    A pipeline has nothing in `module`: `in_layer_files`. Its ranks of the model count the pipeline's stages,
    `pp_degree`, and `tp_degree` ranks in each; older versions of DeepSpeed do not say how many. If
    `data_before_experts`, neighbouring ranks have the same experts (see experts.py). `num_experts` has one
    number a layer of experts.
    """

    shard: Shard
    module: Mapping[str, TensorRecord]
    left_out: tuple[str, ...]
    buffer_names: frozenset[str]
    group_shapes: tuple[Shapes, ...]
    frozen_shapes: Shapes
    frozen_fragments: Mapping[str, TensorRecord]
    lists_no_frozen: bool
    shared: Mapping[str, str]
    optimizer: Mapping[str, Any]
    step: int
    dp_world_size: int
    mp_world_size: int
    ds_version: str | None
    universal_info: Mapping[str, Any]
    in_layer_files: bool = False
    pp_degree: int | None = None
    tp_degree: int | None = None
    data_before_experts: bool = False
    num_experts: tuple[int, ...] = ()


@dataclass(frozen=True)
class OptimizerStates:
    """A `*_optim_states.pt` file of a ZeRO optimizer; `groups` are flat fp32 weights of one rank.

    `group_paddings` counts the elements at the end of each group that were cut off before saving;
    `alignment_paddings` those that follow each parameter. `step` is the base optimizer's, where it has one.
    Stage 1 of DeepSpeed 0.4 has `sub_partitions` of each group in place of `groups`; that version keeps
    `group_shapes` here, those of all groups as one.
    `fragments` counts, for each group, the elements that this rank has of the parameters that it names.
    `expert_groups` has, for a group of experts' parameters, the name of the ranks that share them, else None.
    """

    shard: Shard
    zero_stage: int
    partition_counts: tuple[int, ...]
    groups: tuple[TensorRecord, ...]
    group_paddings: tuple[int, ...]
    alignment_paddings: tuple[tuple[int, ...], ...] | None
    step: float | None
    sub_partitions: tuple[tuple[TensorRecord, ...], ...] = ()
    group_shapes: tuple[Shapes, ...] = ()
    fragments: tuple[Mapping[str, int], ...] = ()
    expert_groups: tuple[str | None, ...] = ()

    @property
    def num_groups(self) -> int:
        """Groups of parameters (stage 3: sub-groups)."""
        return len(self.groups) or len(self.sub_partitions)

    def expert_group(self, index: int) -> str | None:
        """The name of the ranks that share the experts of a group; None if it holds no experts."""
        return self.expert_groups[index] if index < len(self.expert_groups) else None


def model_states(shard: Shard) -> ModelStates:
    """Read them out of an opened file.

    Raises:
        ToolkitError: the file holds something else, or a layout that is not supported, which is then named.
    """
    root = Fields(shard, shard.root)
    if "module" not in root:
        raise unexpected(shard, "it holds no model states of DeepSpeed")
    if root.get("autoep_layers") or root.get("ds_autoep_layers"):
        raise unsupported(shard.path, "a model with automatic expert parallelism")
    in_layer_files = root.get("module") is None
    tensors, left_out = state_dict(shard, {} if in_layer_files else root.get("module"), "module")
    version = root.get("ds_version")
    degrees = root.mapping("checkpoint_parallel_dimensions")
    ds_config = root.get("ds_config")
    return ModelStates(
        shard=shard,
        module=tensors,
        left_out=left_out,
        buffer_names=frozenset(root.strings("buffer_names")),
        group_shapes=root.rows_of_shapes("param_shapes"),
        frozen_shapes=root.shapes("frozen_param_shapes"),
        frozen_fragments=root.tensors("frozen_param_fragments"),
        lists_no_frozen="frozen_param_shapes" in root and root.get("frozen_param_shapes") is None,
        shared=root.aliases("shared_params"),
        optimizer=optimizer if isinstance(optimizer := root.get("optimizer"), dict) else {},
        step=root.number("global_steps"),
        dp_world_size=root.number("dp_world_size", default=0),
        mp_world_size=root.number("mp_world_size", default=1),
        ds_version=version if isinstance(version, str) and version else None,
        universal_info=root.mapping("universal_checkpoint_info").value,
        in_layer_files=in_layer_files,
        pp_degree=degrees.number("pp_degree", default=0) or None,
        tp_degree=degrees.number("tp_degree", default=0) or None,
        data_before_experts=isinstance(ds_config, dict)
        and ds_config.get("use_data_before_expert_parallelism") is True,
        num_experts=root.numbers("num_experts"),
    )


def state_dict(shard: Shard, value: Any, key: str) -> tuple[dict[str, TensorRecord], tuple[str, ...]]:
    """The tensors of a module's state dict, and the names of what else torch's modules keep there.

    Raises:
        ToolkitError: it is no state dict, or holds a weight of a kind that is not known.
    """
    module = Fields(shard, value, key).value
    tensors = {name: value for name, value in module.items() if isinstance(value, TensorRecord)}
    left_out = tuple(str(name) for name in module if name not in tensors)
    for name in left_out:
        # torch's modules may keep anything under this one name; elsewhere it is a weight of a kind not known.
        if not name.endswith("_extra_state"):
            raise unsupported(shard.path, f"something other than an ordinary tensor under the name {name}")
    if not all(isinstance(name, str) for name in tensors):
        raise unexpected(shard, f"{key} holds what is not a name")
    return tensors, left_out


def optimizer_states(shard: Shard) -> OptimizerStates:
    """Read them out of an opened file.

    Raises:
        ToolkitError: the file holds something else, or a layout that is not supported, which is then named.
    """
    state = Fields(shard, shard.root).mapping("optimizer_state_dict")
    # BF16_Optimizer (bf16 with grad_accum_dtype fp32, pipelines) says no stage and splits as stage 1 does,
    # but leaves the padding at the end of each group where it is.
    is_bf16_optimizer = "zero_stage" not in state and "single_partition_of_fp32_groups" in state
    is_old_stage_1 = "local_sub_partitions_of_fp32_groups" in state
    if "zero_stage" not in state and not is_bf16_optimizer and not is_old_stage_1:
        raise unexpected(shard, "it holds no states of a ZeRO optimizer")
    stage = 1 if is_bf16_optimizer or is_old_stage_1 else _stage(shard, state.get("zero_stage"))
    flat = state.get("fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups")
    base = state.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state")
    return OptimizerStates(
        shard=shard,
        zero_stage=stage,
        partition_counts=state.numbers("partition_count"),
        groups=() if is_old_stage_1 else _flat_groups(shard, flat),
        group_paddings=() if is_bf16_optimizer else state.numbers("group_paddings"),
        alignment_paddings=state.rows_of_numbers("param_alignment_paddings") or None,
        step=_optimizer_step(shard, base),
        fragments=tuple(map(_fragments, state.items("param_slice_mappings"))),
        expert_groups=expert_groups(base),
        sub_partitions=tuple(
            _flat_groups(shard, group) for group in state.items("local_sub_partitions_of_fp32_groups")
        ),
        group_shapes=Fields(shard, shard.root).rows_of_shapes("param_shapes"),
    )


def zero_stage(shard: Shard) -> int:
    """The stage that a universal checkpoint was converted from, out of its `optimizer_state.pt`.

    Raises:
        ToolkitError: the file holds something else.
    """
    root = Fields(shard, shard.root)
    # BF16_Optimizer, which says no stage, splits as stage 1 does.
    return _stage(shard, root.get("zero_stage")) if "zero_stage" in root else 1


def expert_groups(base: Any) -> tuple[str | None, ...]:
    """For each group of a base optimizer: the name of the ranks that share its experts, None without any."""
    groups = base.get("param_groups") if isinstance(base, dict) else None
    mappings = [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
    return tuple(str(group.get("name")) if group.get("moe") is True else None for group in mappings)


def _fragments(value: Any) -> Mapping[str, int]:
    # DeepSpeed pickles `fragment_address(numel, start)` objects by name.
    counts = {}
    for name, fragment in value.items() if isinstance(value, dict) else ():
        state = fragment.state if isinstance(fragment, Inert) else None
        count = state.get("numel") if isinstance(state, dict) else None
        if isinstance(count, int) and count >= 0:
            counts[str(name)] = count
    return counts


def _flat_groups(shard: Shard, value: Any) -> tuple[TensorRecord, ...]:
    groups = tuple(value) if isinstance(value, list | tuple) else ()
    if not groups or not all(isinstance(group, TensorRecord) and len(group.shape) == 1 for group in groups):
        raise unexpected(shard, "its flat fp32 groups are missing")
    return groups


def _stage(shard: Shard, value: Any) -> int:
    # DeepSpeed pickles an enum member, which stays the call that would have looked it up.
    stage = value.arguments[0] if isinstance(value, Inert) and value.arguments else value
    if stage not in (1, 2, 3):
        raise unexpected(shard, f"zero_stage is {stage!r}")
    return int(stage)


def _optimizer_step(shard: Shard, base: Any) -> float | None:
    state = base.get("state") if isinstance(base, dict) else None
    first = next(iter(state.values()), None) if isinstance(state, dict) else None
    step = first.get("step") if isinstance(first, dict) else None
    if isinstance(step, TensorRecord) and step.num_elements == 1 and step.dtype.name == "float32":
        (step,) = struct.unpack("<f", shard.read(step))
    return float(step) if isinstance(step, int | float) else None
