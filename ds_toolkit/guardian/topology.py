"""Is what can still be read a complete checkpoint? A pure function over the ranks and their snapshots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from ds_toolkit.errors import ToolkitError
from ds_toolkit.guardian.pieces import Piece, PieceKind, Sharding


@dataclass(frozen=True)
class Slot:
    """A whole snapshot of one rank that can be read: from an arena, also of a dead process, or a replica.

    A slot that is still being written is none. Nor does a slot hold the model file if it has a share of the
    cell's layer files only (`parallel_write.pipeline_stage`).
    """

    step: int
    holds: frozenset[PieceKind]


class Verdict(Enum):
    """What can be made of the snapshots."""

    COMPLETE = "complete"
    WEIGHTS_ONLY = "weights only"
    IMPOSSIBLE = "impossible"


@dataclass(frozen=True)
class Missing:
    """A piece that a complete checkpoint would need and that no readable slot has at the step.

    Attributes:
        piece: which.
        ranks: those that could have given it.
        other_steps: where they have it. Another step is of no use: DeepSpeed loads mixed steps in silence.
    """

    piece: Piece
    ranks: tuple[int, ...]
    other_steps: tuple[int, ...]


@dataclass(frozen=True)
class Decision:
    """What to write.

    Attributes:
        verdict: a checkpoint to resume from, weights alone, or nothing.
        step: of all that is written; where nothing can be, the step that comes nearest. None if no slot
            can be read.
        sources: for each piece to write, the rank whose slot of that step gives it. A complete checkpoint
            has the random states and tracked objects of all ranks that have them at the step, too.
        missing: what a complete checkpoint would need and does not have at the step.
        fresh_ranks: ranks whose random states and tracked objects no slot has at the step. A run that
            resumes starts them afresh, so it may differ from one that was never disturbed.
    """

    verdict: Verdict
    step: int | None
    sources: Mapping[Piece, int]
    missing: tuple[Missing, ...]
    fresh_ranks: tuple[int, ...]


def decide(sharding: Sharding, readable: Mapping[int, Iterable[Slot]]) -> Decision:
    """What the slots that can be read are good for; never more than one step is used.

    A complete step is chosen before weights of a newer one. Of the complete steps it is the newest that every
    rank with a readable slot has: a step that one of them lacks need not be done on it, and its random states
    are lost. Only if there is no such step, it is the newest of all. (A choice at stage 0 alone: above it the
    shard of every rank is needed anyway.)

    Args:
        sharding: the job.
        readable: whole slots by global rank. A rank that is left out, or has none, is lost.

    Raises:
        ToolkitError: a slot is of a rank that the job does not have.
    """
    held = _by_step(sharding, readable)
    alive = {rank for of_step in held.values() for rank in of_step}
    union = {step: _union(sharding, of_step) for step, of_step in held.items()}
    complete = sharding.complete()
    newest_first = sorted(union, reverse=True)
    for step in sorted(newest_first, key=lambda step: held[step].keys() != alive):
        if union[step].keys() >= complete.keys():
            return _decision(sharding, Verdict.COMPLETE, held, step, list(complete))
    for step in newest_first:
        weights = sharding.weights(union[step])
        if weights is not None:
            return _decision(sharding, Verdict.WEIGHTS_ONLY, held, step, weights)
    # max gives the first of equals: the newest of the steps that come nearest.
    nearest = max(newest_first, key=lambda step: len(union[step].keys() & complete.keys()), default=None)
    return _decision(sharding, Verdict.IMPOSSIBLE, held, nearest, [])


_Held = dict[int, dict[int, frozenset[PieceKind]]]


def _by_step(sharding: Sharding, readable: Mapping[int, Iterable[Slot]]) -> _Held:
    """What each rank holds at each step; an arena and a replica of one step are taken together."""
    held: _Held = {}
    for rank, slots in readable.items():
        if rank not in range(len(sharding.ranks)):
            raise ToolkitError(
                f"there is a snapshot of rank {rank}, which this job does not have",
                why=f"its ranks are 0 to {len(sharding.ranks) - 1}",
                fix="remove what an earlier run left behind",
            )
        for slot in slots:
            of_step = held.setdefault(slot.step, {})
            of_step[rank] = of_step.get(rank, frozenset()) | slot.holds
    return held


def _union(sharding: Sharding, of_step: Mapping[int, frozenset[PieceKind]]) -> dict[Piece, int]:
    """For each piece that is there, the rank that gives it: of several the first, as DeepSpeed has it."""
    sources: dict[Piece, int] = {}
    for rank in sorted(of_step, key=lambda rank: sharding.ranks[rank].dp):
        for kind in of_step[rank]:
            sources.setdefault(sharding.piece(kind, rank), rank)
    return sources


def _decision(
    sharding: Sharding, verdict: Verdict, held: _Held, step: int | None, pieces: Iterable[Piece]
) -> Decision:
    of_step = {} if step is None else held[step]
    there = _union(sharding, of_step)
    with_state = {rank for rank, kinds in of_step.items() if PieceKind.RANK_STATE in kinds}
    sources = {piece: there[piece] for piece in pieces}
    if verdict is Verdict.COMPLETE:
        sources |= {sharding.piece(PieceKind.RANK_STATE, rank): rank for rank in sorted(with_state)}
    return Decision(
        verdict=verdict,
        step=step,
        sources=sources,
        missing=tuple(
            Missing(piece, ranks, tuple(_steps_with(piece.kind, ranks, held)))
            for piece, ranks in sharding.complete().items()
            if piece not in there
        ),
        fresh_ranks=tuple(rank for rank in range(len(sharding.ranks)) if rank not in with_state),
    )


def _steps_with(kind: PieceKind, ranks: Iterable[int], held: _Held) -> Iterator[int]:
    for step in sorted(held):
        if any(kind in held[step].get(rank, ()) for rank in ranks):
            yield step
