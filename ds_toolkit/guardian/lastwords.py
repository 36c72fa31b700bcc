"""The last checkpoint, written because something ended: of the newest whole step, without help of a rank."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from ds_toolkit.checkpoint.commit import PartialTag
from ds_toolkit.checkpoint.incident import END, HANG, Hang, Incident, utc_now
from ds_toolkit.checkpoint.manifest import WEIGHTS_ONLY, Manifest
from ds_toolkit.checkpoint.ownership import GUARDIAN_LOCK_NAME, Ownership
from ds_toolkit.checkpoint.tag_folders import committed
from ds_toolkit.checkpoint.verify import verify_sizes
from ds_toolkit.errors import ToolkitError
from ds_toolkit.guardian.agreeing import Agreement, Order, Report, order_for
from ds_toolkit.guardian.arena import Arena, Job
from ds_toolkit.guardian.deadline import Deadline
from ds_toolkit.guardian.joint import JointTag, Purpose
from ds_toolkit.guardian.journal import note, note_failure
from ds_toolkit.guardian.pieces import PieceKind
from ds_toolkit.guardian.ranks import LocalRank
from ds_toolkit.guardian.saving import Saving, delete_old_tags
from ds_toolkit.guardian.settling import MAX_SECONDS, settle
from ds_toolkit.guardian.topology import Verdict
from ds_toolkit.guardian.writing import Giving, SlotChangedError

_TRIES = 3


@dataclass(frozen=True)
class Outcome:
    """What came of last words.

    Attributes:
        outcome: as in an incident.
        why: in words.
        order: that was followed; None if there was none.
        manifest: of the checkpoint that was written, or was there already.
        seconds: from the end to the commit; None if nothing was written.
    """

    outcome: str
    why: str
    order: Order | None = None
    manifest: Manifest | None = None
    seconds: float | None = None

    @property
    def tag(self) -> str | None:
        """The checkpoint that training, or a person, finds now."""
        return self.manifest.tag if self.manifest else None


class LastWords:
    """Spoken once; for a thread of their own."""

    def __init__(
        self,
        arena: Arena,
        job: Job,
        ranks: Mapping[int, LocalRank],
        saving: Saving,
        hang: Hang | None = None,
    ) -> None:
        self._arena, self._job, self._ranks, self._saving, self._hang = arena, job, ranks, saving, hang
        self._agreement = Agreement(job)
        self._happened_at = utc_now()
        self._begun = time.monotonic()
        self._deadline = Deadline(job.deadline_seconds)

    def speak(self) -> Outcome:
        """Write what can be written, and the incident; every failure is an outcome."""
        try:
            outcome = self._outcome()
        except (ToolkitError, OSError) as error:
            outcome = Outcome("failed", f"It could not be written: {error}")
        except Exception as error:
            # A mistake of ours: the ranks wait for an answer all the same.
            note_failure("last words failed")
            outcome = Outcome("failed", f"The guardian made a mistake: {error!r}")
        note(f"last words: {outcome.outcome}: {outcome.why}")
        self._write_incident(outcome)
        return outcome

    def _outcome(self) -> Outcome:
        ranks = list(self._ranks.values())
        at_most_seconds = min(MAX_SECONDS, self._job.deadline_seconds / 4)
        settle(ranks, at_most_seconds=at_most_seconds, all_leave=self._all_leave)
        self._finish_save()
        for _ in range(_TRIES):
            order = self._order()
            try:
                return self._follow(order)
            except SlotChangedError as error:
                # The rank had begun to write just before it was frozen: the slot is torn now.
                note(str(error))
                changed = error
                if self._job.num_nodes > 1:
                    # The order binds all nodes; there is no second one.
                    break
        raise changed

    def _all_leave(self) -> bool:
        """Whether all this is the program's end, which ranks come to one after the other."""
        if self._hang is not None:
            return False
        if not any(known.is_leaving or known.has_ended for known in self._ranks.values()):
            return self._others_ended_well()
        ends = [known for known in self._ranks.values() if known.end is not None]
        return bool(ends) and all(known.has_ended_well for known in ends)

    def _others_ended_well(self) -> bool:
        try:
            return all(report.ended_well for report in self._agreement.reports())
        except (ToolkitError, OSError):
            return False

    def _finish_save(self) -> None:
        """Let a checkpoint that is being written come to its end: it may be all that is needed."""
        step = self._saving.step_in_work
        if step is None:
            return
        share = 1 / 4 if self._job.num_nodes > 1 else 1 / 2
        if self._job.num_nodes == 1 and step == order_for(self._job, [self._report()]).step:
            share = 1.0
        if not self._saving.wait(self._deadline.seconds_left * share):
            note("the checkpoint that was being written is given up")
            self._saving.stop(self._deadline.seconds_left / 2)

    def _order(self) -> Order:
        if self._job.num_nodes == 1:
            return order_for(self._job, [self._report()])
        half = Deadline(self._begun + self._job.deadline_seconds / 2 - time.monotonic())
        return self._agreement.come_to(self._report(), half)

    def _report(self) -> Report:
        ranks = self._ranks
        return Report(
            node=self._job.node,
            slots={rank: known.readable() for rank, known in ranks.items()},
            steps={rank: known.page.step for rank, known in ranks.items() if known.page is not None},
            ended_well=all(known.has_ended_well for known in ranks.values()),
        )

    def _follow(self, order: Order) -> Outcome:
        if order.verdict is Verdict.IMPOSSIBLE:
            return Outcome("impossible", order.words, order)
        there = self._there_already(order)
        if there is not None:
            why = f"{order.words} The checkpoint `{there.tag}` of that step is there already."
            return Outcome("there already", why, order, there)
        if self._job.node not in order.nodes:
            return Outcome("failed", f"{order.words} This node was heard of too late to take part.", order)
        manifest = self._write(order)
        seconds = time.monotonic() - self._begun
        why = f"{order.words} It is the checkpoint `{manifest.tag}`, written within {seconds:.1f} s."
        return Outcome(order.verdict.value, why, order, manifest, seconds)

    def _there_already(self, order: Order) -> Manifest | None:
        """A whole checkpoint of the step that this very job has written: an older one is of another past."""
        if order.verdict is not Verdict.COMPLETE:
            return None
        birth = self._arena.birth()
        for manifest in committed(self._job.directory):
            is_of_step = manifest.step == order.step and manifest.kind != WEIGHTS_ONLY
            if is_of_step and not birth.is_earlier(manifest):
                folder = self._job.directory / manifest.tag
                if not verify_sizes(folder, manifest):
                    return manifest
        return None

    def _write(self, order: Order) -> Manifest:
        lock = self._lock(order)
        tag = JointTag(
            self._arena,
            self._job,
            PartialTag(self._job.directory, order.tag, order.save_id),
            order.step or 0,
            committer=order.committer,
            nodes=order.nodes,
            deadline=self._deadline,
        )
        try:
            tag.begin()
            tag.seal(tag.copy(self._givings(order)))
            manifest = tag.finish(Purpose(order.kind))
        except ToolkitError as error:
            tag.give_up(str(error))
            raise
        finally:
            if lock is not None:
                lock.release()
        if order.committer == self._job.node and order.kind != WEIGHTS_ONLY:
            delete_old_tags(self._job, manifest)
        return manifest

    def _lock(self, order: Order) -> Ownership | None:
        """The right to write; the node of rank 0 has it since it began."""
        if order.committer != self._job.node or self._job.node == self._job.nodes[0]:
            return None
        patience_seconds = self._deadline.seconds_left / 2
        return Ownership.acquire(self._job.directory, patience_seconds, GUARDIAN_LOCK_NAME)

    def _givings(self, order: Order) -> list[Giving]:
        kinds: dict[int, set[PieceKind]] = {}
        for rank, kind in order.gives:
            if rank in self._ranks:
                kinds.setdefault(rank, set()).add(kind)
        return [self._giving(rank, order.step, kinds[rank]) for rank in sorted(kinds)]

    def _giving(self, rank: int, step: int | None, kinds: set[PieceKind]) -> Giving:
        known = self._ranks[rank]
        for slot in known.whole_slots():
            if slot.step == step and slot.kinds >= kinds and known.page is not None:
                return Giving(rank, known.page, slot, frozenset(kinds))
        raise SlotChangedError(f"the slot of step {step} of rank {rank} was written over")

    def _write_incident(self, outcome: Outcome) -> None:
        order, manifest = outcome.order, outcome.manifest
        written = outcome.seconds is not None
        in_order = sorted(self._ranks.values(), key=lambda known: known.end_ns)
        incident = Incident(
            happened_at=self._happened_at,
            job_id=self._job.job_id,
            node=self._job.node,
            ended=tuple(known.end for known in in_order if known.end is not None),
            ranks=tuple(known.place() for known in self._ranks.values()),
            outcome=outcome.outcome,
            why=outcome.why,
            last_step=order.last_step if order else None,
            step=order.step if order else None,
            tag=outcome.tag,
            kind=manifest.kind if manifest else None,
            total_bytes=manifest.total_bytes if manifest and written else 0,
            seconds=outcome.seconds,
            event=END if self._hang is None else HANG,
            hang=self._hang,
        )
        if not self._job.directory.is_dir():
            note(f"the incident is lost with the directory: {incident}")
            return
        try:
            note(f"the incident is {incident.write(self._job.directory)}")
        except OSError as error:
            note(f"the incident cannot be written: {error}")
