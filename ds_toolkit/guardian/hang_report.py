"""A hang is looked into: stacks are asked for, what is found is put into words and into an incident."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ds_toolkit.checkpoint.incident import HANG, REPORTED, Hang, HungRank, Incident, utc_now
from ds_toolkit.guardian.arena import Job
from ds_toolkit.guardian.hang_wording import Standstill, in_words, main_stack
from ds_toolkit.guardian.hangs import IN_A_STEP
from ds_toolkit.guardian.journal import note
from ds_toolkit.guardian.ranks import LocalRank
from ds_toolkit.guardian.stacks import stacks_of

_MAX_RANKS = 16


def standstill_of(ranks: Mapping[int, LocalRank]) -> list[Standstill]:
    """Where the ranks of a node stand, with their stacks; takes two seconds at most."""
    pages = {rank: known.page for rank, known in ranks.items() if known.page is not None}
    # First: while one that does not answer is waited for, the others may move.
    places = {rank: (page.phase, page.micro_step) for rank, page in pages.items()}
    stacks = stacks_of({rank: (*page.process, page.stacks) for rank, page in pages.items()})
    return [Standstill(rank, *places[rank], stacks[rank], ranks[rank].said_goodbye) for rank in pages]


def hang_of(job: Job, ranks: Sequence[Standstill], pids: Mapping[int, int], still_seconds: float) -> Hang:
    """The hang as an incident has it."""
    return Hang(
        what=in_words(ranks, job.num_nodes),
        still_seconds=round(still_seconds, 1),
        ranks=tuple(
            HungRank(
                known.rank,
                pids.get(known.rank, 0),
                known.phase.name.lower(),
                known.batches,
                known.stacks.text or f"none: {known.stacks.why_none}",
            )
            for known in ranks
        ),
    )


def may_be_ended(job: Job, ranks: Sequence[Standstill]) -> bool:
    """Whether last words are wanted, and this can be nothing but a hang.

    Between two batches a program does what it likes, an evaluation of an hour included; inside a step it does
    nothing of its own.
    """
    return job.on_hang == "last-words" and any(known.phase in IN_A_STEP for known in ranks)


def report(job: Job, ranks: Mapping[int, LocalRank], hang: Hang, *, moves: bool = False) -> str:
    """Write the incident of a hang that is left alone; where it lies, or why it does not.

    Args:
        job: of the ranks.
        ranks: of this node.
        hang: what there is to tell.
        moves: whether it moved again before it could be ended.
    """
    steps = [known.page.step for known in ranks.values() if known.page is not None]
    why = "Nothing was ended"
    if moves:
        why += ": it moved again"
    elif job.on_hang == "last-words":
        why += ": no rank of this node is inside a step"
    incident = Incident(
        happened_at=utc_now(),
        job_id=job.job_id,
        node=job.node,
        ended=(),
        ranks=tuple(known.place() for known in ranks.values()),
        outcome=REPORTED,
        why=f"{why}.",
        last_step=min(steps, default=None),
        event=HANG,
        hang=hang,
    )
    if not job.directory.is_dir():
        return "no incident is written: the checkpoint directory is gone"
    try:
        return f"the incident, with all stacks, is {incident.write(job.directory)}"
    except OSError as error:
        return f"the incident cannot be written: {error}"


def lines_of(job: Job, hang: Hang, ranks: Sequence[Standstill], then: str) -> list[str]:
    """What is said of it: the hang, the main threads of the ranks, and what is done."""
    where = f" (node {job.node})" if job.num_nodes > 1 else ""
    lines = [f"HANG{where}: {hang}"]
    # Every rank that is elsewhere matters; of those that wait at one place one is like the other.
    shown: dict[tuple[str, ...], list[int]] = {}
    for known in ranks:
        shown.setdefault((known.phase.name.lower(), *main_stack(known)), []).append(known.rank)
    for (phase, *stack), numbers in list(shown.items())[:_MAX_RANKS]:
        lines.append(
            f"main thread of rank {', '.join(map(str, numbers))}, in phase {phase}, innermost first:"
        )
        lines += [f"  {line}" for line in stack]
    if len(shown) > _MAX_RANKS:
        lines.append(f"and {len(shown) - _MAX_RANKS} more, which the incident has")
    return [*lines, then]


def note_lines(lines: Sequence[str]) -> None:
    """Put them into the guardian's log."""
    note("\n".join(lines))
