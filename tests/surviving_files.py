"""A second opinion on completeness, by the files that DeepSpeed's writers leave and its loaders open.

Written from DeepSpeed's file names, on purpose not from `ds_toolkit.guardian`, whose nouns alone it takes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ds_toolkit.guardian.pieces import Coordinates, PieceKind, Sharding

Holds = frozenset[PieceKind]
# rank -> step -> what the slot holds
Slots = Mapping[int, Mapping[int, Holds]]


@dataclass(frozen=True)
class Grid:
    """A job. Ranks count through tp, dp, pp, or with `cells_together` through dp, tp, pp."""

    dp: int
    tp: int
    pp: int
    stage: int
    ep: int = 1
    native_moe: bool = False
    hpz: int = 1
    cells_together: bool = False

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp

    def at(self, rank: int) -> tuple[int, int, int, int]:
        """dp, tp, pp, ep of a rank."""
        pp, inner = divmod(rank, self.dp * self.tp)
        if self.cells_together:
            tp, dp = divmod(inner, self.dp)
        else:
            dp, tp = divmod(inner, self.tp)
        return dp, tp, pp, dp % self.ep

    def cell(self, rank: int) -> tuple[int, int]:
        return self.at(rank)[1:3]

    def sharding(self) -> Sharding:
        places = tuple(Coordinates(*self.at(rank)) for rank in range(self.world_size))
        return Sharding(places, self.stage, hpz_size=self.hpz, native_moe=self.native_moe)


def grids(world_size: int) -> Iterator[Grid]:
    """Every job of this many ranks that DeepSpeed would shard differently."""
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    for dp in sizes:
        for tp in sizes:
            if world_size % (dp * tp):
                continue
            pp = world_size // (dp * tp)
            for stage in (0, 1, 2):
                yield Grid(dp, tp, pp, stage)
                for ep in sizes:
                    if dp % ep == 0:
                        yield Grid(dp, tp, pp, stage, ep=ep, native_moe=True)
            for hpz in sizes:
                yield Grid(dp, tp, pp, 3, hpz=hpz)
                if tp > 1:
                    yield Grid(dp, tp, pp, 3, hpz=hpz, cells_together=True)


def usual_holds(grid: Grid, node_size: int) -> list[Holds]:
    """What a rank's slots hold: on every node one rank of a cell keeps what the cell has in common."""
    holds: list[Holds] = []
    kept: set[tuple[object, ...]] = set()
    for rank in range(grid.world_size):
        kinds = {PieceKind.RANK_STATE}
        if grid.stage > 0:
            kinds.add(PieceKind.OPTIMIZER)
        if grid.stage == 3 or (rank // node_size, grid.cell(rank)) not in kept:
            kinds.add(PieceKind.MODEL)
        kept.add((rank // node_size, grid.cell(rank)))
        experts = (rank // node_size, grid.cell(rank), grid.at(rank)[3])
        if grid.native_moe and experts not in kept:
            kinds |= {PieceKind.EXPERTS, PieceKind.EXPERT_OPTIMIZER}
        kept.add(experts)
        if grid.hpz > 1:
            kinds.add(PieceKind.HPZ_WEIGHTS)
        holds.append(frozenset(kinds))
    return holds


def random_slots(grid: Grid, chance: random.Random) -> dict[int, dict[int, Holds]]:
    """Slots such as accidents leave them: some ranks lost, steps apart, now and then a part not there."""
    usual = usual_holds(grid, chance.choice([1, 2, 4, 8]))
    lost = chance.random() ** 2
    newest = 7
    slots: dict[int, dict[int, Holds]] = {}
    for rank in range(grid.world_size):
        if chance.random() < lost:
            continue
        first = newest - chance.choice([1, 1, 1, 2])
        slots[rank] = {
            step: frozenset(kind for kind in usual[rank] if chance.random() < 0.95)
            for step in range(first, first + chance.choice([1, 2, 2, 3]))
        }
    return slots


def written(grid: Grid, rank: int, kinds: Holds) -> set[str]:
    """The files that a rank can put into a tag."""
    dp, _, _, ep = grid.at(rank)
    files: set[str] = set()
    if PieceKind.MODEL in kinds:
        files |= _model_files(grid, rank)
    if PieceKind.OPTIMIZER in kinds:
        files.add(f"zero_pp_rank_{dp}_mp_rank_{_mp(grid, rank)}_optim_states.pt")
    if PieceKind.EXPERTS in kinds:
        files |= {
            f"layer_0_expert_{expert}_mp_rank_{_mp(grid, rank)}_model_states.pt" for expert in _experts(ep)
        }
    if PieceKind.EXPERT_OPTIMIZER in kinds:
        files.add(f"expp_rank_{ep}_mp_rank_{_mp(grid, rank)}_optim_states.pt")
    return files


def opened(grid: Grid) -> set[str]:
    """The files that `load_checkpoint` opens on any rank; tests/contract sees it open them."""
    files: set[str] = set()
    for rank in range(grid.world_size):
        dp, _, _, ep = grid.at(rank)
        mp = _mp(grid, rank)
        files |= _model_files(grid, rank)
        if grid.stage > 0:
            files.add(f"zero_pp_rank_{dp}_mp_rank_{mp}_optim_states.pt")
        if grid.native_moe:
            files |= {f"layer_0_expert_{expert}_mp_rank_{mp}_model_states.pt" for expert in _experts(ep)}
        if grid.native_moe and grid.stage == 0:
            files.add(f"expp_rank_{ep}_mp_rank_{mp}_optim_states.pt")
    return files


def _mp(grid: Grid, rank: int) -> str:
    _, tp, pp, _ = grid.at(rank)
    return f"{pp * grid.tp + tp:02d}"


def _model_files(grid: Grid, rank: int) -> set[str]:
    dp, tp, pp, _ = grid.at(rank)
    if grid.stage == 3:
        return {f"zero_pp_rank_{dp}_mp_rank_{_mp(grid, rank)}_model_states.pt"}
    files = {f"mp_rank_{_mp(grid, rank)}_model_states.pt"}
    if grid.pp > 1:
        # One layer a stage.
        files.add(f"layer_{pp:02d}{f'-model_{tp:02d}' if grid.tp > 1 else ''}-model_states.pt")
    return files


def _experts(ep: int) -> tuple[int, int]:
    """Two on each expert rank, in one layer."""
    return (2 * ep, 2 * ep + 1)


def files_at(grid: Grid, slots: Slots, step: int) -> set[str]:
    """The files of one step that all readable slots together can write."""
    files: set[str] = set()
    for rank, steps in slots.items():
        if step in steps:
            files |= written(grid, rank, steps[step])
    return files


def weights_whole(grid: Grid, slots: Slots, step: int) -> bool:
    """Whether each weight of each cell is there, counted in parts of a tensor."""
    there = files_at(grid, slots, step)
    if grid.stage < 3:
        return all(name in there for name in opened(grid) if "optim_states" not in name)
    return all(
        any(covered == set(range(grid.world_size**2)) for covered in _covered(grid, slots, step, cell))
        for cell in {grid.cell(rank) for rank in range(grid.world_size)}
    )


def _covered(grid: Grid, slots: Slots, step: int, cell: tuple[int, int]) -> Iterator[set[int]]:
    """The parts of the cell's tensors that its shards hold, and those that each hpZ group holds.

    A tensor has world_size ** 2 parts, so that any number of owners divides it.
    """
    yield _parts(grid, slots, step, [r for r in range(grid.world_size) if grid.cell(r) == cell], "shards")
    if grid.hpz > 1:
        for group in range(grid.world_size // grid.hpz):
            ranks = [rank for rank in range(grid.world_size) if rank // grid.hpz == group]
            if {grid.cell(rank) for rank in ranks} == {cell}:
                yield _parts(grid, slots, step, ranks, "copies")


def _parts(grid: Grid, slots: Slots, step: int, ranks: list[int], of: str) -> set[int]:
    num_parts = grid.world_size**2
    each = num_parts // len(ranks)
    needed = {PieceKind.MODEL, PieceKind.OPTIMIZER if of == "shards" else PieceKind.HPZ_WEIGHTS}
    covered: set[int] = set()
    for position, rank in enumerate(ranks):
        if needed <= slots.get(rank, {}).get(step, frozenset()):
            covered |= set(range(position * each, (position + 1) * each))
    return covered
