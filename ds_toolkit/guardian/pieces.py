"""The pieces that a checkpoint of a job consists of, and which ranks can give each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import product

from ds_toolkit.errors import ToolkitError


class PieceKind(Enum):
    """What a file of a checkpoint holds, in words for a person."""

    MODEL = "model file"
    OPTIMIZER = "optimizer shard"
    EXPERTS = "experts"
    EXPERT_OPTIMIZER = "optimizer states of the experts"
    HPZ_WEIGHTS = "hpZ copy of the weights"
    RANK_STATE = "random states and tracked objects"


_PER_EXPERT_RANK = (PieceKind.EXPERTS, PieceKind.EXPERT_OPTIMIZER)


@dataclass(frozen=True)
class Coordinates:
    """Where a rank stands.

    Attributes:
        dp: rank in the group over which the optimizer is partitioned (with sequence parallelism, that of
            sequence and data together); DeepSpeed puts it into `zero_pp_rank_<dp>`.
        tp, pp: rank among the tensor slices and among the pipeline stages. Ranks with the same two form a
            cell: they hold the same weights.
        ep: rank in the expert-parallel group, 0 where there is none. If layers have groups of several
            sizes, that in the largest: whoever covers its ranks covers those of the smaller ones.
    """

    dp: int
    tp: int = 0
    pp: int = 0
    ep: int = 0


@dataclass(frozen=True)
class Piece:
    """What one file, or the files that one writer makes together, holds of a checkpoint.

    `dp` or `ep` is None where all ranks of the cell hold the same, so that any of them can give it.
    """

    kind: PieceKind
    tp: int
    pp: int
    dp: int | None = None
    ep: int | None = None

    @property
    def place(self) -> str:
        """Its coordinates, in words."""
        named = (("dp", self.dp), ("tp", self.tp), ("pp", self.pp), ("ep", self.ep))
        return ", ".join(f"{name} {rank}" for name, rank in named if rank is not None)


@dataclass(frozen=True)
class Sharding:
    """How a job's state is spread over its ranks.

    Attributes:
        ranks: the coordinates of every rank, rank 0 first.
        stage: ZeRO stage; 1 for BF16_Optimizer, whatever the configuration says.
        hpz_size: `zero_hpz_partition_size`.
        native_moe: whether there are DeepSpeed's own MoE layers, whose experts have files of their own.
            AutoEP at stage 3 has none: its experts lie in the ZeRO shards.

    Raises:
        ToolkitError: no job has such ranks.
    """

    ranks: tuple[Coordinates, ...]
    stage: int
    hpz_size: int = 1
    native_moe: bool = False

    def __post_init__(self) -> None:
        for why in self._contradictions():
            raise ToolkitError("the ranks do not describe one DeepSpeed job", why=why)

    @property
    def num_slots(self) -> int:
        """Slots that a rank needs so that, while every slot can be read, all ranks share a whole step.

        At stages 1 to 3 no rank ends `optimizer.step` t + 1 before all have begun it, and a rank begins it
        only when its copy of step t is whole. So the slot of t - 1 is free once step t + 1 is done: two are
        enough. At stage 0 ranks meet in the backward pass alone, and the stages of a pipeline where they pass
        on activations and gradients: both before that wait. A rank may be done with t + 1 while another's
        copy of t is still being written, and t - 1 must stay.
        """
        pipeline = any(rank.pp for rank in self.ranks)
        return 3 if self.stage == 0 or pipeline else 2

    def piece(self, kind: PieceKind, rank: int) -> Piece:
        """The piece of this kind that a rank can give."""
        at = self.ranks[rank]
        if kind in _PER_EXPERT_RANK:
            return Piece(kind, at.tp, at.pp, ep=at.ep)
        if kind is PieceKind.MODEL and self.stage < 3:
            return Piece(kind, at.tp, at.pp)
        return Piece(kind, at.tp, at.pp, dp=at.dp)

    def complete(self) -> dict[Piece, tuple[int, ...]]:
        """What `load_checkpoint` needs on all ranks together, and for each piece the ranks that can give it.

        Stage 0: `mp_rank_*` of each cell, the optimizer inside; with experts their files, and
        `expp_rank_*` with the optimizer. Stages 1 and 2: `mp_rank_*` of each cell, the files of its
        experts, and the optimizer shard of every rank. Stage 3: `zero_pp_rank_*` of both kinds of every
        rank. (DeepSpeed 0.19.8: `_save_checkpoint`, `_save_moe_checkpoint`, `_save_zero_checkpoint`.)
        """
        kinds = [PieceKind.MODEL]
        if self.native_moe:
            kinds.append(PieceKind.EXPERTS)
        if self.stage > 0:
            kinds.append(PieceKind.OPTIMIZER)
        elif self.native_moe:
            kinds.append(PieceKind.EXPERT_OPTIMIZER)
        return self._of_all_ranks(kinds)

    def weights(self, there: Mapping[Piece, int]) -> list[Piece] | None:
        """The pieces that give all weights, if they are there; else None.

        Below stage 3 the model and expert files have them. At stage 3 a cell's weights lie in its shards,
        all of them, or in the second, 16-bit copy that each hpZ group may hold.
        """
        if self.stage < 3:
            kinds = (PieceKind.MODEL, *([PieceKind.EXPERTS] if self.native_moe else []))
            needed = list(self._of_all_ranks(kinds))
            return needed if there.keys() >= set(needed) else None
        weights: list[Piece] = []
        for cell in self._cells().values():
            source = next((s for s in self._stage_3_sources(cell) if there.keys() >= set(s)), None)
            if source is None:
                return None
            weights += source
        return weights

    def _stage_3_sources(self, cell: list[int]) -> Iterator[list[Piece]]:
        # The fp32 weights of the shards come first: they are exact.
        yield [self.piece(kind, r) for r in cell for kind in (PieceKind.MODEL, PieceKind.OPTIMIZER)]
        for group in self._hpz_groups():
            # DeepSpeed counts groups along global ranks; one that mixes cells holds no cell's weights.
            if set(group) <= set(cell):
                yield [
                    self.piece(kind, r) for r in group for kind in (PieceKind.MODEL, PieceKind.HPZ_WEIGHTS)
                ]

    def _hpz_groups(self) -> list[range]:
        size = min(self.hpz_size, len(self.ranks))
        return [range(first, first + size) for first in range(0, len(self.ranks), size)] if size > 1 else []

    def _cells(self) -> dict[tuple[int, int], list[int]]:
        cells: dict[tuple[int, int], list[int]] = {}
        for rank, at in sorted(enumerate(self.ranks), key=lambda pair: (pair[1].pp, pair[1].tp, pair[1].dp)):
            cells.setdefault((at.tp, at.pp), []).append(rank)
        return cells

    def _of_all_ranks(self, kinds: Iterable[PieceKind]) -> dict[Piece, tuple[int, ...]]:
        givers: dict[Piece, list[int]] = {}
        for cell in self._cells().values():
            for rank, kind in product(cell, kinds):
                givers.setdefault(self.piece(kind, rank), []).append(rank)
        return {piece: tuple(ranks) for piece, ranks in givers.items()}

    def _contradictions(self) -> Iterator[str]:
        if self.stage not in range(4):
            yield f"there is no ZeRO stage {self.stage}"
        if not self.ranks:
            yield "there are no ranks"
        places = Counter((at.dp, at.tp, at.pp) for at in self.ranks)
        sizes = [max(axis) + 1 for axis in zip(*places, strict=True)]
        for dp, tp, pp in product(*map(range, sizes)):
            if places[dp, tp, pp] != 1:
                yield f"{places[dp, tp, pp]} ranks are at dp {dp}, tp {tp}, pp {pp}"
        num_ep = max(at.ep for at in self.ranks) + 1
        for (tp, pp), cell in self._cells().items():
            at_each = Counter(self.ranks[rank].ep for rank in cell)
            if len({at_each[ep] for ep in range(num_ep)}) > 1:
                yield f"the experts of tp {tp}, pp {pp} are not spread evenly over {num_ep} expert ranks"
        if self.hpz_size < 1 or len(self.ranks) % min(self.hpz_size, len(self.ranks)):
            yield f"{len(self.ranks)} ranks do not split into hpZ groups of {self.hpz_size}"
        if self.native_moe and self.stage == 3:
            yield "DeepSpeed has no native MoE at stage 3"
