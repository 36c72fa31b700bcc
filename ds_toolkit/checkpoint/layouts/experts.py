"""The experts of DeepSpeed's own mixture of experts (`deepspeed.moe.layer.MoE`), found and named.

Each of `ep_size` ranks has an equal share of a layer's experts; the ranks that have the same experts share
their optimizer state as ZeRO splits it. DeepSpeed writes each expert's weights to a file of its own, under
its number in the whole layer (runtime/engine.py, `_save_moe_checkpoint`); in the optimizer's files a rank
counts its own experts from 0. Which ranks have the same ones: utils/groups.py,
`_create_expert_and_data_parallel`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping

from ds_toolkit.checkpoint.examining.headers import base_state
from ds_toolkit.checkpoint.fields import Fields, not_together
from ds_toolkit.checkpoint.layout import ShardKind
from ds_toolkit.checkpoint.layouts.cells import Cell, agree, unnamed_masters
from ds_toolkit.checkpoint.layouts.partitions import flat_group_parameters, only_groups
from ds_toolkit.checkpoint.layouts.samples import seem_equal
from ds_toolkit.checkpoint.layouts.states import ModelStates, expert_groups, state_dict
from ds_toolkit.checkpoint.layouts.whole_tensors import whole_tensor
from ds_toolkit.checkpoint.shards import Shard
from ds_toolkit.checkpoint.tag_files import TagFiles
from ds_toolkit.checkpoint.tensors import Part, Role, StoredTensor, UnnamedTensor
from ds_toolkit.errors import ToolkitError

_NAME = re.compile(
    r"(?P<layer>.*deepspeed_moe\.experts\.deepspeed_experts)\.(?P<expert>\d{1,9})\.(?P<rest>.+)", re.ASCII
)


def with_experts(tag: TagFiles, cell: Cell) -> Cell:
    """The cell with all experts, under the names of the whole model.

    fp32 weights are taken from the optimizer where they round to the weights in the experts' files; where
    they do not, a note says that the weights of the files were taken.

    Raises:
        ToolkitError: an expert's file is missing or damaged, or the files are of different runs.
    """
    has_groups = bool(cell.ranks) and any(cell.ranks[0].expert_groups)
    names = _file_names(tag, cell)
    if not names and not has_groups:
        return cell
    stored = {}
    left_out = list(cell.model.left_out)
    for file_name in names:
        shard = tag.open(file_name)
        tensors, others = state_dict(shard, shard.root, "the file")
        left_out += others
        for key, record in tensors.items():
            # A model that is itself such a layer has a name of no characters, which leaves a dot.
            name = key.removeprefix(".")
            stored[name] = whole_tensor(shard, name, record, _role(cell, name))
    _check_numbers(tag, stored)
    masters, unlike = _best_masters(cell, stored) if has_groups else ({}, [])
    notes = cell.notes
    if unlike:
        notes += (
            f"the optimizer's fp32 weights of {len(unlike)} expert tensors, {unlike[0]} among them, do not "
            "round to the weights in the experts' files; the latter were taken",
        )
    stored |= {name: master for name, master in masters.items() if name not in unlike}
    return dataclasses.replace(
        cell,
        model=dataclasses.replace(cell.model, left_out=tuple(left_out)),
        tensors={**cell.tensors, **stored},
        names=_in_order(cell.names, stored),
        unnamed_masters=(*cell.unnamed_masters, *_masters_of_other_ranks(tag, cell)),
        notes=notes,
    )


def _file_names(tag: TagFiles, cell: Cell) -> list[str]:
    """The files of experts that there should be; those that there are if the checkpoint does not say."""
    found = [file.path.name for file in tag.names_of(ShardKind.EXPERT)]
    found = [name for name in found if not name.startswith("expp_rank_")]
    if not cell.model.num_experts or any(name.startswith("expert_") for name in found):
        return found
    expected = []
    for layer, num_experts in enumerate(cell.model.num_experts):
        for expert in range(num_experts):
            name = f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"
            expected.append(name)
            if name not in found:
                # It says that the file is missing; so many experts as a damaged file says are never counted.
                tag.open(name)
    for name in found:
        if name not in expected:
            raise ToolkitError(
                "a checkpoint holds more experts than its model",
                where=tag.folder / name,
                why=f"the model's layers have {', '.join(map(str, cell.model.num_experts))} experts",
                fix="if this tag was written over by another run, move the files left over away",
            )
    return expected


def num_experts_named(model: ModelStates) -> int:
    """Experts whose trained weights one rank's model states name, of all layers."""
    matches = (_NAME.fullmatch(name) for shapes in model.group_shapes for name in shapes)
    return len({(match["layer"], match["expert"]) for match in matches if match})


def _best_masters(
    cell: Cell, stored: Mapping[str, StoredTensor]
) -> tuple[dict[str, StoredTensor], list[str]]:
    """fp32 weights by name, and the names of those that are not the weights in the experts' files.

    The order of ranks that the configuration says is tried first. An engine takes over the groups of ranks
    that another one in its process has made, so that the configuration can be wrong.

    Raises:
        ToolkitError: the files fit together neither way.
    """
    outcomes: list[tuple[dict[str, StoredTensor], list[str]]] = []
    errors = []
    for data_first in (cell.model.data_before_experts, not cell.model.data_before_experts):
        try:
            masters = dict(_masters(cell, stored, data_first=data_first))
        except ToolkitError as error:
            errors.append(error)
            continue
        unlike = [name for name, master in masters.items() if not seem_equal(master, stored[name])]
        if not unlike:
            return masters, []
        outcomes.append((masters, unlike))
    if not outcomes:
        raise errors[0]
    return min(outcomes, key=lambda outcome: len(outcome[1]))


def _masters(
    cell: Cell, stored: Mapping[str, StoredTensor], *, data_first: bool
) -> Iterator[tuple[str, StoredTensor]]:
    """The optimizer's fp32 weights of experts by their names in the whole model.

    If `data_first` neighbouring ranks have the same experts, otherwise every `ep_size`-th rank.
    """
    model, ranks = cell.model, cell.ranks
    num_local = _num_local(cell)
    for rank in ranks:
        # Each rank orders groups of experts in its own way (a set of strings), which one rank's shapes tell.
        agree(rank.shard, "the order of groups of experts", ranks[0].expert_groups, rank.expert_groups)
    for index in range(len(model.group_shapes)):
        if ranks[0].expert_group(index) is None:
            continue
        counts = ranks[0].partition_counts
        num_sharing = counts[index] if index < len(counts) else 0
        ep_size, rest = divmod(len(ranks), num_sharing) if num_sharing else (0, 1)
        if rest:
            raise _wrong_files(ranks[0].shard, f"{num_sharing} ranks share experts, of {len(ranks)} ranks")
        for ep_rank in range(ep_size):
            if data_first:
                members = ranks[ep_rank * num_sharing : (ep_rank + 1) * num_sharing]
            else:
                members = ranks[ep_rank::ep_size]
            narrowed, owners = only_groups(model, members, [index])
            for name, shape, dtype, slices in flat_group_parameters(narrowed, owners):
                full = _global_name(name, ep_rank, num_local)
                if full is None or full not in stored or stored[full].shape != shape:
                    raise _wrong_files(
                        ranks[0].shard, f"no expert's file has {full or name} with shape {shape}"
                    )
                yield full, StoredTensor(full, shape, dtype, (Part(tuple(slices)),), Role.TRAINED)


def _num_local(cell: Cell) -> dict[str, int]:
    """How many experts of each layer one rank has."""
    counts: dict[str, int] = {}
    for shapes in cell.model.group_shapes:
        for match in filter(None, map(_NAME.fullmatch, shapes)):
            counts[match["layer"]] = max(counts.get(match["layer"], 0), int(match["expert"]) + 1)
    return counts


def _global_name(name: str, ep_rank: int, num_local: Mapping[str, int]) -> str | None:
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    expert = ep_rank * num_local[match["layer"]] + int(match["expert"])
    return f"{match['layer']}.{expert}.{match['rest']}"


def _role(cell: Cell, name: str) -> Role:
    """Files do not say; what one rank has of its first expert is what every expert has."""
    match = _NAME.fullmatch(name)
    local = f"{match['layer']}.0.{match['rest']}" if match else name
    if local in cell.model.buffer_names:
        return Role.BUFFER
    if cell.ranks and all(local not in shapes for shapes in cell.model.group_shapes):
        return Role.FROZEN
    return Role.TRAINED


def _check_numbers(tag: TagFiles, stored: Mapping[str, StoredTensor]) -> None:
    """The experts of every layer are numbered without a gap, and each has the same tensors."""
    layers: dict[str, dict[int, set[tuple[str, tuple[int, ...]]]]] = {}
    for name, tensor in stored.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise ToolkitError(
                f"an expert's file holds {name}, which is no expert's weight", where=tag.folder
            )
        experts = layers.setdefault(match["layer"], {})
        experts.setdefault(int(match["expert"]), set()).add((match["rest"], tensor.shape))
    for layer, experts in layers.items():
        for number in range(max(experts) + 1):
            if experts.get(number) != experts[max(experts)]:
                raise ToolkitError(
                    f"weights of expert {number} of {layer} are missing",
                    where=tag.folder,
                    why=f"it has not the tensors of expert {max(experts)}",
                    fix="take another tag, or bring the file back",
                )


def _masters_of_other_ranks(tag: TagFiles, cell: Cell) -> Iterator[tuple[UnnamedTensor, ...]]:
    """fp32 weights of the experts that stage 0 keeps on other expert-parallel ranks than the first.

    The first one's are those of the model states. The others have the weights that are no experts once more,
    and those of layers whose experts fewer ranks share out.
    """
    seen: set[tuple[str, int]] = set()
    for name in _optimizer_names(tag, cell):
        shard = tag.open(name)
        optimizer = Fields(shard, shard.root).mapping("optimizer")
        groups = expert_groups(optimizer.get("optimizer_state_dict"))
        found = unnamed_masters(shard, optimizer.value)
        if len(found) != len(groups):
            raise _wrong_files(
                shard, f"it has {len(groups)} groups of parameters, and weights of {len(found)}"
            )
        sizes = {group: _ep_size(shard, group) for group in groups if group is not None}
        for group, masters in zip(groups, found, strict=True):
            if group is None:
                continue
            size, largest = sizes[group], max(sizes.values())
            rank = _expp_rank(name)
            ep_rank = rank * size // largest if cell.model.data_before_experts else rank % size
            if (group, ep_rank) not in seen and rank > 0:
                yield masters
            seen.add((group, ep_rank))


def _optimizer_names(tag: TagFiles, cell: Cell) -> list[str]:
    """The optimizer's files of stage 0: one for each rank of the largest group of ranks that share experts.

    The model states have what the first one has, and say how many there should be.
    """
    optimizer = cell.model.optimizer
    groups = expert_groups(base_state(optimizer) or optimizer)
    num_ranks = max((_ep_size(cell.model.shard, group) for group in groups if group is not None), default=0)
    found = [file.path.name for file in tag.names_of(ShardKind.EXPERT)]
    found = sorted((name for name in found if name.startswith("expp_rank_")), key=_expp_rank)
    for rank in range(num_ranks):
        name = f"expp_rank_{rank}_mp_rank_00_optim_states.pt"
        if name not in found:
            # It says that the file is missing.
            tag.open(name)
    return found if cell.unnamed_masters else []


def _ep_size(shard: Shard, group: str) -> int:
    match = re.fullmatch(r"ep_size_(\d{1,9})", group, re.ASCII)
    if match is None or int(match[1]) == 0:
        raise _wrong_files(shard, f"a group of experts is called {group}")
    return int(match[1])


def _expp_rank(name: str) -> int:
    return int(name.split("_")[2])


def _in_order(names: tuple[str, ...], stored: Mapping[str, StoredTensor]) -> tuple[str, ...]:
    """Experts stand in the model after the gate of their layer, in the order of their numbers."""
    ordered = [name for name in names if name not in stored]
    by_layer: dict[str, list[str]] = {}
    for name in sorted(stored, key=_number):
        match = _NAME.fullmatch(name)
        by_layer.setdefault(match["layer"] if match else "", []).append(name)
    for layer, experts in by_layer.items():
        before = layer.removesuffix("experts.deepspeed_experts") + "gate."
        places = [index for index, name in enumerate(ordered) if name.startswith(before)]
        place = places[-1] + 1 if places else len(ordered)
        ordered[place:place] = experts
    return tuple(ordered)


def _number(name: str) -> int:
    match = _NAME.fullmatch(name)
    return int(match["expert"]) if match else 0


def _wrong_files(shard: Shard, why: str) -> ToolkitError:
    return not_together(shard, why, what="the experts' files and the optimizer's")
