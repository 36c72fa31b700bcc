"""How a job stands on this node, read from its arena without disturbing it."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ds_toolkit.errors import ToolkitError
from ds_toolkit.guardian.arena import Arena
from ds_toolkit.guardian.arenas import arenas
from ds_toolkit.guardian.control import ControlBlock, Leaving
from ds_toolkit.guardian.processes import is_alive


@dataclass(frozen=True)
class RankStanding:
    """Where a rank is, by its page.

    Attributes:
        rank: global rank.
        pid: its process id.
        is_running: whether that process is there.
        phase: of its training loop, such as `forward`.
        step: optimizer steps that it has done.
        micro_step: micro-steps that its engine has done, all in all.
        whole_steps: steps of which it has a whole snapshot, oldest first.
        still_seconds: since its phase changed; None if it never did.
        leaving: why it is about to end; None if it is not.
    """

    rank: int
    pid: int
    is_running: bool
    phase: str
    step: int
    micro_step: int
    whole_steps: tuple[int, ...]
    still_seconds: float | None
    leaving: str | None


@dataclass(frozen=True)
class JobStanding:
    """A job on this node.

    Attributes:
        job_id: the same on all nodes.
        folder: of its arena.
        node: number of this node, from 0.
        num_nodes: how many the job has.
        guardian_pid: process that signed last as its guardian; None if none did.
        has_guardian: whether that process is there.
        ranks: those of this node whose page can be read.
        unreadable: what is wrong with the pages of the others.
    """

    job_id: str
    folder: Path
    node: int
    num_nodes: int
    guardian_pid: int | None
    has_guardian: bool
    ranks: tuple[RankStanding, ...]
    unreadable: tuple[str, ...]

    @property
    def is_running(self) -> bool:
        """Whether any of its ranks is there."""
        return any(rank.is_running for rank in self.ranks)

    @property
    def step(self) -> int:
        """Optimizer steps that the foremost rank of this node has done."""
        return max((rank.step for rank in self.ranks), default=0)

    @property
    def whole_step(self) -> int | None:
        """Newest step of which all ranks of this node have a whole snapshot; None if there is none."""
        if self.unreadable or not self.ranks:
            return None
        return max(set.intersection(*(set(rank.whole_steps) for rank in self.ranks)), default=None)

    def problems(self) -> Iterator[str]:
        """What somebody should look into, in sentences."""
        for why in self.unreadable:
            yield f"job {self.job_id}: {why}"
        if not self.is_running:
            return
        if not self.has_guardian:
            yield f"job {self.job_id} has no guardian: nothing will write last words for it"
        for rank in self.ranks:
            if not rank.is_running:
                yield f"job {self.job_id}: rank {rank.rank} (process {rank.pid}) has ended"


@dataclass(frozen=True)
class Loss:
    """What would be lost if a job died now.

    Attributes:
        num_steps: completed steps, at most; the one that is under way is lost besides.
        from_step: the step that training would go on from.
        source: what has that step: `snapshots`, `checkpoint`, or `nothing` if there is neither.
    """

    num_steps: int
    from_step: int
    source: str


def standing_of_jobs(directory: Path, root: Path | None = None) -> list[JobStanding]:
    """The jobs on this node that save into a directory, also those that have ended and left an arena.

    Args:
        directory: of the checkpoints.
        root: where arenas lie; None for where they lie unless told otherwise.
    """
    found = []
    for arena in arenas(root):
        try:
            standing = _standing(arena, directory)
        except ToolkitError:
            # Of a version that describes jobs in another way; whose directory it is cannot be known.
            continue
        if standing is not None:
            found.append(standing)
    return found


def loss_of_death(job: JobStanding, checkpoint_step: int | None) -> Loss:
    """What would be lost if the job died now, the newest whole checkpoint being of this step.

    Snapshots count as long as there is a guardian that would write them. Those of other nodes are not seen
    from here.
    """
    sources = [(0, "nothing")]
    if checkpoint_step is not None:
        sources.append((checkpoint_step, "checkpoint"))
    if job.has_guardian and job.whole_step is not None:
        sources.append((job.whole_step, "snapshots"))
    # Of equals the last: what needs no reading from a disk.
    from_step, source = max(reversed(sources), key=lambda pair: pair[0])
    return Loss(max(0, job.step - from_step), from_step, source)


def _standing(arena: Arena, directory: Path) -> JobStanding | None:
    job = arena.job()
    if job.directory.resolve() != directory.resolve():
        return None
    ranks, unreadable = [], []
    for rank in job.local_ranks:
        try:
            ranks.append(_rank(arena.rank_folder(rank)))
        except ToolkitError as error:
            unreadable.append(f"rank {rank}: {error}")
    guardian = arena.guardian()
    return JobStanding(
        job_id=job.job_id,
        folder=arena.folder,
        node=job.node,
        num_nodes=job.num_nodes,
        guardian_pid=None if guardian is None else guardian[0],
        has_guardian=arena.has_guardian(),
        ranks=tuple(ranks),
        unreadable=tuple(unreadable),
    )


def _rank(folder: Path) -> RankStanding:
    page = ControlBlock(folder, writable=False)
    try:
        pid, ticks = page.process
        changed_ns = page.changed_ns
        return RankStanding(
            rank=page.rank,
            pid=pid,
            is_running=is_alive(pid, ticks),
            phase=page.phase.name.lower(),
            step=page.step,
            micro_step=page.micro_step,
            whole_steps=tuple(sorted(slot.step for slot in page.slots() if slot.is_whole)),
            still_seconds=max(0, time.monotonic_ns() - changed_ns) / 1e9 if changed_ns else None,
            leaving=None if page.leaving is Leaving.NO else page.leaving.name.lower(),
        )
    except (ValueError, struct.error) as error:
        raise ToolkitError("a rank's page of the arena cannot be understood", why=str(error)) from error
    finally:
        page.close()
