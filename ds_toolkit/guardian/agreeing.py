"""How the guardians of all nodes come to one order after a death, through files alone.

<dir>/.last_words/<job id>/node_00003.json   what the ranks of a node have
<dir>/.last_words/<job id>/decision.json     the order, made by one of them: a hard link succeeds once
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_toolkit.checkpoint.commit import new_save_id
from ds_toolkit.checkpoint.manifest import FINAL, LAST_WORDS, WEIGHTS_ONLY
from ds_toolkit.checkpoint.sweeping import AGREEMENT_FOLDER
from ds_toolkit.errors import ToolkitError
from ds_toolkit.files import fsync_directory, make_directory, write_whole
from ds_toolkit.guardian.arena import Job
from ds_toolkit.guardian.deadline import Deadline
from ds_toolkit.guardian.pieces import PieceKind
from ds_toolkit.guardian.topology import Decision, Slot, Verdict, decide
from ds_toolkit.guardian.wording import in_words

_DECISION_NAME = "decision.json"
_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Report:
    """What the guardian of one node knows when its ranks write no slot any more.

    Attributes:
        node: number of the node.
        slots: whole slots by rank.
        steps: steps that each rank had done.
        ended_well: whether all its ranks have come to the end of their program.
    """

    node: int
    slots: Mapping[int, list[Slot]]
    steps: Mapping[int, int]
    ended_well: bool

    def as_json(self) -> dict[str, Any]:
        """The form in the file."""
        slots = {
            rank: [[slot.step, sorted(kind.name for kind in slot.holds)] for slot in slots]
            for rank, slots in self.slots.items()
        }
        return {"node": self.node, "slots": slots, "steps": self.steps, "ended_well": self.ended_well}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Report:
        """Back from `as_json`."""
        slots = {
            int(rank): [
                Slot(int(step), frozenset(PieceKind[name] for name in kinds)) for step, kinds in slots
            ]
            for rank, slots in data["slots"].items()
        }
        steps = {int(rank): int(step) for rank, step in data["steps"].items()}
        return cls(int(data["node"]), slots, steps, bool(data["ended_well"]))


@dataclass(frozen=True)
class Order:
    """What is written, by whom.

    Attributes:
        verdict: what the slots are good for.
        step: that is written; where nothing is, the one that comes nearest.
        last_step: newest step that all ranks that were reported had done.
        save_id: of the tag.
        nodes: whose ranks may give something.
        committer: the node that commits: that of rank 0, which holds the guardian's lock, or the one that
            decided, if that of rank 0 was not heard of.
        gives: rank and kind of each piece.
        kind: of the checkpoint.
        words: the decision, for a person.
    """

    verdict: Verdict
    step: int | None
    last_step: int | None
    save_id: str
    nodes: tuple[int, ...]
    committer: int
    gives: tuple[tuple[int, PieceKind], ...]
    kind: str
    words: str

    @property
    def tag(self) -> str:
        """Name of the checkpoint."""
        return f"weights-only-step{self.step}" if self.kind == WEIGHTS_ONLY else f"global_step{self.step}"

    def as_json(self) -> dict[str, Any]:
        """The form in the file."""
        gives = [[rank, kind.name] for rank, kind in self.gives]
        return {**dataclasses.asdict(self), "verdict": self.verdict.name, "gives": gives}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Order:
        """Back from `as_json`."""
        return cls(
            **{
                **data,
                "verdict": Verdict[data["verdict"]],
                "nodes": tuple(data["nodes"]),
                "gives": tuple((int(rank), PieceKind[name]) for rank, name in data["gives"]),
            }
        )


def order_for(job: Job, reports: Iterable[Report]) -> Order:
    """What is to be done if these nodes are all that were heard of."""
    known = {report.node: report for report in reports}
    decision = decide(
        job.sharding, {rank: slots for report in known.values() for rank, slots in report.slots.items()}
    )
    steps = [step for report in known.values() for step in report.steps.values()]
    first = job.nodes[0]
    return Order(
        verdict=decision.verdict,
        step=decision.step,
        last_step=min(steps, default=None),
        save_id=new_save_id(),
        nodes=tuple(sorted(known)),
        committer=first if first in known else job.node,
        gives=tuple((rank, piece.kind) for piece, rank in decision.sources.items()),
        kind=_kind(job, decision, known),
        words=in_words(decision),
    )


def _kind(job: Job, decision: Decision, known: Mapping[int, Report]) -> str:
    if decision.verdict is Verdict.WEIGHTS_ONLY:
        return WEIGHTS_ONLY
    all_ended_well = len(known) == job.num_nodes and all(report.ended_well for report in known.values())
    return FINAL if all_ended_well else LAST_WORDS


class Agreement:
    """The files through which the nodes of a job agree. OSErrors and ToolkitErrors say that they cannot."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.folder = job.directory / AGREEMENT_FOLDER / job.job_id

    def is_called_for(self) -> bool:
        """Whether the guardian of another node has begun its last words."""
        # A listing, and no look at one name: a network file system may remember that a name was absent.
        return bool(self._names())

    def come_to(self, own: Report, deadline: Deadline) -> Order:
        """Report what this node has, and get the order that all follow.

        Args:
            own: what this node has.
            deadline: until when reports of other nodes are waited for.
        """
        if not self._job.directory.is_dir():
            raise ToolkitError("the checkpoint directory is gone", where=self._job.directory)
        make_directory(self.folder)
        write_whole(self._report_path(own.node), json.dumps(own.as_json()).encode())
        while True:
            if _DECISION_NAME in self._names():
                return self._read_order()
            reports = self.reports()
            if len(reports) == self._job.num_nodes or not deadline.seconds_left:
                return self.settle(order_for(self._job, reports))
            time.sleep(_LOOK_SECONDS)

    def reports(self) -> list[Report]:
        """Those that are there."""
        found = []
        for node in sorted(set(self._job.nodes)):
            path = self._report_path(node)
            try:
                found.append(Report.from_json(json.loads(path.read_bytes())))
            except FileNotFoundError:
                continue
            except (ValueError, KeyError, TypeError) as error:
                raise ToolkitError("a node's report cannot be read", where=path, why=str(error)) from error
        return found

    def settle(self, order: Order) -> Order:
        """Make an order the one that counts, unless there is one; the one that counts."""
        draft = self.folder / f".order_of_node_{self._job.node:05d}.{order.save_id}"
        write_whole(draft, json.dumps(order.as_json()).encode())
        try:
            os.link(draft, self.folder / _DECISION_NAME)
            fsync_directory(self.folder)
        except FileExistsError:
            pass
        finally:
            draft.unlink()
        return self._read_order()

    def _names(self) -> list[str]:
        try:
            return [path.name for path in self.folder.iterdir()]
        except FileNotFoundError:
            return []

    def _read_order(self) -> Order:
        path = self.folder / _DECISION_NAME
        try:
            return Order.from_json(json.loads(path.read_bytes()))
        except (ValueError, KeyError, TypeError) as error:
            raise ToolkitError("the nodes' decision cannot be read", where=path, why=str(error)) from error

    def _report_path(self, node: int) -> Path:
        return self.folder / f"node_{node:05d}.json"
