"""What older versions of DeepSpeed left out of their checkpoints, found out from what they kept.

Sources: runtime/engine.py (`_get_zero_param_shapes`, `_save_zero_checkpoint`) and runtime/zero/stage1.py of
DeepSpeed 0.4; utils/zero_to_fp32.py of 0.19.8, which reads most of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ds_toolkit.checkpoint.fields import Shapes
from ds_toolkit.checkpoint.layouts.states import ModelStates, OptimizerStates
from ds_toolkit.checkpoint.reductions import TensorRecord
from ds_toolkit.errors import ToolkitError


def shapes_by_group(model: ModelStates, ranks: Sequence[OptimizerStates]) -> tuple[Shapes, ...]:
    """The parameters of each flat group, in the order in which they lie there.

    Version 0.4 keeps them in the optimizer's files, those of all groups as one mapping, group after group.

    Raises:
        ToolkitError: they are nowhere, or where a group ends cannot be told.
    """
    first = ranks[0]
    shapes = model.group_shapes or first.group_shapes
    if not shapes:
        raise _unknown(model, "no file says which parameters there are (`param_shapes`)")
    if first.zero_stage == 3 or len(shapes) != 1 or first.num_groups == 1:
        return shapes
    return tuple(_cut(model, shapes[0], [_num_elements(ranks, index) for index in range(first.num_groups)]))


def _cut(model: ModelStates, shapes: Shapes, sizes: Sequence[int]) -> Sequence[Shapes]:
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    num_left = list(sizes)
    for name, shape in shapes.items():
        num_elements = math.prod(shape)
        if num_left[0] == 0 and num_elements and len(num_left) > 1:
            num_left.pop(0)
            groups.append({})
        groups[-1][name] = shape
        num_left[0] -= num_elements
        if num_left[0] < 0:
            break
    # Padding that is still there would hide where one group ends and the next begins.
    if num_left != [0]:
        raise _unknown(model, "one list of parameters, and no group of weights ends where one of them does")
    return groups


def _num_elements(ranks: Sequence[OptimizerStates], index: int) -> int:
    return sum(part.num_elements for rank in ranks for part in _parts(rank, index))


def _parts(rank: OptimizerStates, index: int) -> Sequence[TensorRecord]:
    if index < len(rank.groups):
        return (rank.groups[index],)
    return rank.sub_partitions[index] if index < len(rank.sub_partitions) else ()


def _unknown(model: ModelStates, why: str) -> ToolkitError:
    return ToolkitError(
        "which parameters the fp32 weights belong to is not recorded",
        where=model.shard.path,
        why=f"{why}; so it is in checkpoints of old versions of DeepSpeed",
        fix="load it with the DeepSpeed that saved it, and save it again with a newer one",
    )
