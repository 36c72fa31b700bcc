"""What the guardians have to know of a job, gathered once from all ranks; and the arena of this node."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import groups

from ds_toolkit.checkpoint.commit import new_save_id
from ds_toolkit.checkpoint.manifest import RunShape
from ds_toolkit.config.guard_settings import AUTO, GuardSettings
from ds_toolkit.env.host_memory import free_memory_bytes
from ds_toolkit.errors import ToolkitError
from ds_toolkit.guardian.arena import Arena, Job, arena_root
from ds_toolkit.guardian.birth import boot_id
from ds_toolkit.guardian.control import ControlBlock
from ds_toolkit.guardian.pieces import Coordinates, PieceKind, Sharding
from ds_toolkit.resilience import agreement
from ds_toolkit.resilience.capture import software_versions
from ds_toolkit.units import format_bytes

# Left to the training processes, which need more than they hold after the first step.
_SPARED_SHARE = 0.1
_TMPFS = Path("/dev/shm")  # noqa: S108


@dataclass(frozen=True)
class Berth:
    """Where a rank stands among all.

    Attributes:
        nodes: the node of every rank, numbered from 0 in the order of their first ranks.
        is_first: whether this rank is its node's first, which starts the guardian.
        keeps_model: whether it keeps its cell's model file: the first of the cell on its node does.
        shared_params: what rank 0 found out about tied weights; None where DeepSpeed asks this rank itself.
    """

    nodes: tuple[int, ...]
    is_first: bool
    keeps_model: bool
    shared_params: Mapping[str, str] | None


def arena_roots(settings: GuardSettings) -> list[Path]:
    """Where this user's arenas may lie on this node; the first is where a new one goes."""
    in_memory = arena_root()
    if settings.arena in (AUTO, "memory"):
        return [in_memory]
    return [Path(settings.arena) / in_memory.name, in_memory]


def first_on_node() -> bool:
    """Whether this rank is its node's first. Collective."""
    return agreement.gather(_host()).index(_host()) == agreement.rank()


def refuse_unfollowed(engine: Any) -> None:
    """Refuse what no snapshot can follow. The same on every rank.

    Raises:
        ToolkitError: state that lies on a disk, changes inside backward, or is spread over other ranks.
    """
    zero = engine._config.zero_config
    places = [getattr(zero, name, None) for name in ("offload_optimizer", "offload_param")]
    on_nvme = any(place is not None and str(getattr(place.device, "value", "")) == "nvme" for place in places)
    spread = engine._config.checkpoint_parallel_write_pipeline and isinstance(engine, PipelineEngine)
    for what, is_so in (
        ("states offloaded to NVMe", on_nvme),
        ("SuperOffload, which steps inside backward", bool(engine.super_offload())),
        ("ZenFlow, which steps inside backward", bool(engine.zenflow_config())),
        ("layers that data-parallel ranks share to write (parallel_write.pipeline_stage)", spread),
    ):
        if is_so:
            raise ToolkitError(f"snapshots cannot follow {what}", fix="checkpoints are synchronous instead")


def find_berth(engine: Any) -> Berth:
    """Which ranks share a node, and who keeps what. Collective."""
    rank = agreement.rank()
    mine = (_host(), int(engine.checkpoint_mp_rank), bool(engine.save_non_zero_checkpoint))
    everybody = agreement.gather(mine)
    hosts = list(dict.fromkeys(host for host, _, _ in everybody))
    same_cell = [other for other, (host, cell, _) in enumerate(everybody) if (host, cell) == mine[:2]]
    writers = [other for other in same_cell if everybody[other][2]]
    shared_params = agreement.broadcast(dict(engine._get_shared_params()))
    stands_in = rank != 0 and mine[1] == everybody[0][1] and not engine.zero_optimization_partition_weights()
    return Berth(
        nodes=tuple(hosts.index(host) for host, _, _ in everybody),
        is_first=[host for host, _, _ in everybody].index(mine[0]) == rank,
        keeps_model=bool(same_cell) and not writers and same_cell[0] == rank,
        shared_params=shared_params if stands_in else None,
    )


def sharding_of(engine: Any) -> Sharding:
    """How the state of this job is spread over its ranks. Collective."""
    # BF16_Optimizer partitions at whatever stage the config says.
    stage = max(int(engine.zero_optimization_stage()), int(engine.save_zero_checkpoint))
    return Sharding(
        ranks=tuple(agreement.gather(_coordinates(engine))),
        stage=stage,
        hpz_size=max(1, int(engine.zero_hpz_partition_size() or 1)),
        native_moe=bool(engine.has_moe_layers) and stage < 3,
    )


def choose_num_slots(
    sharding: Sharding, berth: Berth, slot_bytes: int, place: Path, save_every: int | str
) -> tuple[int, str | None]:
    """How many slots every rank gets, and what is lost by it if they are too few. Collective.

    Args:
        sharding: the job's.
        berth: this rank's.
        slot_bytes: size of one slot of this rank.
        place: where the slots will lie.
        save_every: the guard's setting, to say how much is lost.

    Raises:
        ToolkitError: not even one has room.
    """
    node = berth.nodes[agreement.rank()]
    offers = agreement.gather((slot_bytes, free_bytes(place)))
    on_node: dict[int, list[tuple[int, int]]] = {}
    for number, offer in zip(berth.nodes, offers, strict=True):
        on_node.setdefault(number, []).append(offer)
    # The poorest node decides for all: a step counts when all ranks have it.
    needed = {number: sum(size for size, _ in of_node) for number, of_node in on_node.items()}
    free = {number: min(room for _, room in of_node) for number, of_node in on_node.items()}
    most = min(free[number] // max(1, needed[number]) for number in on_node)
    wanted = sharding.num_slots + 1
    if most >= wanted:
        return wanted, None
    facts = f"{format_bytes(needed[node])} a slot on this node, {format_bytes(free[node])} free in {place}"
    way_out = f"(`save_every` is {save_every}); a folder on a fast local disk as `arena` would have room"
    if most >= sharding.num_slots:
        return sharding.num_slots, (
            f"one slot less than wanted ({facts}): a failure while a periodic checkpoint is written may "
            f"cost the steps since that checkpoint {way_out}"
        )
    if most >= 1:
        return 1, (
            f"one slot only ({facts}): a failure in the middle of a copy, or while a periodic checkpoint is "
            f"written, costs the steps since the last one {way_out}"
        )
    raise ToolkitError(
        "there is no room for a snapshot",
        where=place,
        why=facts,
        fix="give the container a larger /dev/shm or more memory, set `arena` to a folder on a fast local "
        "disk, or `snapshot_every` to 0 for synchronous checkpoints",
    )


def enter_arena(
    berth: Berth,
    directory: Path,
    kinds: Iterable[PieceKind],
    *,
    sharding: Sharding,
    shape: RunShape,
    num_slots: int,
    settings: GuardSettings,
    broken: Collection[str],
    root: Path,
) -> tuple[Arena, ControlBlock]:
    """Make this node's arena and this rank's page in it. Collective."""
    rank = agreement.rank()
    job = Job(
        job_id=agreement.broadcast(new_save_id()),
        directory=directory,
        node=berth.nodes[rank],
        nodes=berth.nodes,
        sharding=sharding,
        kinds=tuple(agreement.gather(frozenset(kinds))),
        shape=shape,
        versions=software_versions(),
        deadline_seconds=settings.deadline_seconds,
        keep_last=settings.keep_last,
        keep_every=settings.keep_every,
        broken=tuple(broken),
        hang_after_seconds=settings.hang_after_seconds,
        on_hang=settings.on_hang,
    )
    made = agreement.together(
        "make the arena of this node",
        lambda: os.fspath(Arena.create(job, root).folder) if berth.is_first else "",
    )
    folders = agreement.gather(made)
    arena = Arena(Path(folders[berth.nodes.index(berth.nodes[rank])]))
    folder = arena.rank_folder(rank)
    folder.mkdir(mode=0o700)
    return arena, ControlBlock.create(folder, rank, num_slots)


def free_bytes(place: Path) -> int:
    """What slots in a place may take: the room of its file system and, if that is memory, the host's."""
    existing = next(folder for folder in (place, *place.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    in_memory = free_memory_bytes() if existing.is_relative_to(_TMPFS) else None
    return int(min(free, free if in_memory is None else in_memory) * (1 - _SPARED_SHARE))


def _host() -> tuple[str, str]:
    # Containers of one host may have names alike; those that share /dev/shm share its inode.
    status = _TMPFS.stat()
    return socket.gethostname(), f"{boot_id()}-{status.st_dev}-{status.st_ino}"


def _coordinates(engine: Any) -> Coordinates:
    dp = int(groups._get_sequence_data_parallel_rank())
    if isinstance(engine, PipelineEngine):
        grid = engine.grid
        return Coordinates(
            dp=int(grid.get_data_parallel_rank()),
            tp=int(grid.get_slice_parallel_rank()),
            pp=int(grid.get_stage_id()),
        )
    ep = 0
    if engine.has_moe_layers and not engine.zero_optimization_partition_weights():
        ep = int(groups._get_expert_parallel_rank(groups._get_max_expert_size_name()))
    return Coordinates(dp=dp, tp=int(engine.checkpoint_mp_rank), ep=ep)
