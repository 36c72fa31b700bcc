"""Periodic checkpoints: a worker writes one at a time, while the guardian goes on watching."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ds_toolkit.checkpoint.commit import PartialTag
from ds_toolkit.checkpoint.expiry import delete_expired
from ds_toolkit.checkpoint.manifest import PERIODIC, Manifest, check_tag
from ds_toolkit.errors import ToolkitError
from ds_toolkit.guardian.arena import Arena, Job
from ds_toolkit.guardian.deadline import Deadline
from ds_toolkit.guardian.joint import JointTag, Purpose
from ds_toolkit.guardian.journal import note, note_failure
from ds_toolkit.guardian.pieces import PieceKind
from ds_toolkit.guardian.priority import give_way, give_way_in_this_thread
from ds_toolkit.guardian.ranks import LocalRank
from ds_toolkit.guardian.topology import Slot, Verdict, decide
from ds_toolkit.guardian.writing import Giving

# How long the guardian of another node may take longer than this one.
_PATIENCE_SECONDS = 600.0


@dataclass(frozen=True)
class Request:
    """A save, as every rank of this node has asked for it."""

    save_id: str
    tag: str
    step: int
    protect: bool
    micro_steps: int

    @classmethod
    def from_event(cls, event: Mapping[str, Any]) -> Request:
        """Out of a rank's `save`.

        Raises:
            ToolkitError: it cannot be understood.
        """
        try:
            save_id = str(event["save_id"])
            if not 0 < int(save_id, 16) < 2**32:
                raise ValueError(f"{save_id} is no save id")
            step, micro_steps = int(event["step"]), int(event.get("micro_steps", 0))
            return cls(save_id, check_tag(event["tag"]), step, bool(event.get("protect")), micro_steps)
        except (KeyError, TypeError, ValueError) as error:
            raise ToolkitError("a save cannot be understood", why=str(error)) from error

    @property
    def wanted(self) -> int:
        """What the slots that are kept for it say."""
        return int(self.save_id, 16)


class Saving:
    """The saves of this node. `asked` is for the thread that listens; the work is done in another."""

    def __init__(
        self,
        arena: Arena,
        job: Job,
        ranks: Mapping[int, LocalRank],
        answer: Callable[[dict[str, Any]], None],
    ) -> None:
        """
        Args:
            arena: of this node.
            job: as the arena has it.
            ranks: of this node.
            answer: tells all of them something; called from the thread that writes.
        """
        self._arena, self._job, self._ranks, self._answer = arena, job, ranks, answer
        self._asked: dict[Request, set[int]] = {}
        self._todo: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._unfinished: list[Request] = []
        self._deadline = Deadline()
        self._is_closed = self._is_stopped = self._is_deleting = False
        threading.Thread(target=self._work, name="saving", daemon=True).start()

    def asked(self, rank: int, event: Mapping[str, Any]) -> None:
        """A rank has sent `save`; the last one of the node begins it."""
        try:
            request = Request.from_event(event)
        except ToolkitError as error:
            note(f"rank {rank}: {error}")
            return
        if self._is_closed:
            self._fail(request, "last words have begun")
            return
        asking = self._asked.setdefault(request, set())
        asking.add(rank)
        if asking == set(self._job.local_ranks):
            del self._asked[request]
            with self._idle:
                self._unfinished.append(request)
            self._todo.put(request)

    def close(self) -> None:
        """Begin no save any more: what not all ranks have asked for by now is not written."""
        self._is_closed = True
        give_way(False)
        for request in self._asked:
            self._fail(request, "not all ranks of the node came to it")
        self._asked.clear()

    @property
    def step_in_work(self) -> int | None:
        """Step of the save that is being written; None if there is none."""
        with self._idle:
            return self._unfinished[0].step if self._unfinished else None

    def wait(self, timeout_seconds: float) -> bool:
        """Wait for what is being written; whether it has ended."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._unfinished, timeout_seconds)

    def drain(self, timeout_seconds: float) -> bool:
        """Wait for what is being written, and for old checkpoints being deleted; whether all has ended."""
        with self._idle:
            return self._idle.wait_for(
                lambda: not self._unfinished and not self._is_deleting, timeout_seconds
            )

    def stop(self, timeout_seconds: float) -> bool:
        """Give up what is being written; whether that was done within the time."""
        self._is_stopped = True
        self._deadline.at = 0.0
        return self.wait(timeout_seconds)

    def _work(self) -> None:
        give_way_in_this_thread()
        while True:
            request = self._todo.get()
            manifest = None
            give_way(True)
            if self._is_closed:
                # Last words have begun, perhaps just now: what is being written stands in their way.
                give_way(False)
            try:
                manifest = self._save(request)
            except Exception:
                # A mistake of ours must not end the thread: the ranks would wait for ever.
                note_failure(f"the checkpoint `{request.tag}` failed")
                self._fail(request, "the guardian made a mistake; its log has more")
            self._let_go(request)
            with self._idle:
                self._unfinished.remove(request)
                self._is_deleting = True
                self._idle.notify_all()
            # Large tags take long to delete; last words do not wait for that.
            if manifest is not None and self._job.node == self._job.nodes[0]:
                delete_old_tags(self._job, manifest)
            with self._idle:
                self._is_deleting = False
                self._idle.notify_all()
            give_way(False)

    def _save(self, request: Request) -> Manifest | None:
        begun = time.monotonic()
        try:
            manifest = self._write(request)
        except ToolkitError as error:
            self._fail(request, str(error))
            return None
        seconds = time.monotonic() - begun
        note(f"saved {request.tag}: {manifest.total_bytes} bytes in {seconds:.2f} s")
        self._let_go(request)
        saved = {"total_bytes": manifest.total_bytes, "write_seconds": seconds}
        self._answer({"event": "saved", **_named(request), **saved})
        return manifest

    def _write(self, request: Request) -> Manifest:
        self._deadline = Deadline(_PATIENCE_SECONDS) if self._job.num_nodes > 1 else Deadline()
        if self._is_stopped:
            self._deadline.at = 0.0
        tag = JointTag(
            self._arena,
            self._job,
            PartialTag(self._job.directory, request.tag, request.save_id),
            request.step,
            committer=self._job.nodes[0],
            nodes=self._job.nodes,
            deadline=self._deadline,
        )
        try:
            # First, so that a node that cannot give its part has a place to say so.
            tag.begin()
            files = tag.copy(self._givings(request))
            # The ranks may write there again; nothing below reads the slots.
            self._let_go(request)
            tag.seal(files)
            return tag.finish(Purpose(PERIODIC, request.protect, request.micro_steps))
        except ToolkitError as error:
            tag.give_up(str(error))
            raise

    def _givings(self, request: Request) -> list[Giving]:
        """What the ranks of this node give: the same choice on every node, as all have asked for one step."""
        readable = {rank: [Slot(request.step, kinds)] for rank, kinds in enumerate(self._job.kinds)}
        decision = decide(self._job.sharding, readable)
        if decision.verdict is not Verdict.COMPLETE:
            raise ToolkitError("the slots of all ranks together are no whole checkpoint")
        kinds: dict[int, set[PieceKind]] = {}
        for piece, rank in decision.sources.items():
            kinds.setdefault(rank, set()).add(piece.kind)
        return [self._giving(request, rank, kinds[rank]) for rank in self._job.local_ranks if rank in kinds]

    def _giving(self, request: Request, rank: int, kinds: set[PieceKind]) -> Giving:
        known = self._ranks[rank]
        for slot in known.whole_slots():
            is_kept = slot.wanted == request.wanted and slot.step == request.step
            if is_kept and slot.kinds >= kinds and known.page is not None:
                return Giving(rank, known.page, slot, frozenset(kinds))
        raise ToolkitError(f"rank {rank} has no whole slot of step {request.step} that is kept for the save")

    def _let_go(self, request: Request) -> None:
        for known in self._ranks.values():
            for slot in known.slots():
                if slot.wanted == request.wanted and known.page is not None:
                    known.page.let_go(slot.index)

    def _fail(self, request: Request, why: str) -> None:
        note(f"the checkpoint `{request.tag}` was not written: {why}")
        self._let_go(request)
        self._answer({"event": "failed", **_named(request), "why": why})


def _named(request: Request) -> dict[str, object]:
    return {"save_id": request.save_id, "tag": request.tag, "step": request.step}


def delete_old_tags(job: Job, newest: Manifest) -> None:
    """Delete what the job keeps no longer; a failure costs space and is told in the log."""
    for line in delete_expired(
        job.directory, newest=newest, keep_last=job.keep_last, keep_every=job.keep_every, broken=job.broken
    ):
        note(line)
