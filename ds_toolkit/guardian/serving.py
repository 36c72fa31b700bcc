"""The guardian's life: it listens to its ranks and watches them, saves when asked, and speaks last words."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ds_toolkit.checkpoint.incident import Hang
from ds_toolkit.checkpoint.ownership import Ownership
from ds_toolkit.guardian.agreeing import Agreement
from ds_toolkit.guardian.arena import Arena, Job
from ds_toolkit.guardian.ending import end_ranks
from ds_toolkit.guardian.hang_report import (
    hang_of,
    lines_of,
    may_be_ended,
    note_lines,
    report,
    standstill_of,
)
from ds_toolkit.guardian.hangs import Change, HangWatch
from ds_toolkit.guardian.journal import note, note_failure
from ds_toolkit.guardian.lastwords import LastWords, Outcome
from ds_toolkit.guardian.ranks import LocalRank
from ds_toolkit.guardian.saving import Saving
from ds_toolkit.guardian.server import Ended, Said, Server

_LOOK_SECONDS = 0.5
_OTHER_NODES_SECONDS = 1.0
# How long ranks may take to end when they have heard that last words are over.
_AFTER_DONE_SECONDS = 60.0
# How long a guardian waits for the first rank.
_FIRST_RANK_SECONDS = 300.0


class Guardian:
    """Serves one arena until its ranks have gone."""

    def __init__(self, arena: Arena, job: Job, server: Server, ownership: Ownership | None) -> None:
        """
        Args:
            arena: that it serves.
            job: as the arena has it.
            server: that listens already.
            ownership: of the checkpoint directory, on the node of rank 0.
        """
        self._arena, self._job, self._server, self._ownership = arena, job, server, ownership
        self._ranks = {rank: LocalRank(rank, arena) for rank in job.local_ranks}
        self._saving = Saving(arena, job, self._ranks, self._tell_all)
        self._begun = time.monotonic()
        self._triggered = False
        self._called_for = False
        self._watch: HangWatch | None = HangWatch(self._ranks, job.hang_after_seconds)
        self._deadly_hang: Hang | None = None
        self._outcome: Outcome | None = None
        self._done_at = 0.0

    def serve(self) -> None:
        """Return when there is nothing left to do."""
        if self._job.num_nodes > 1:
            threading.Thread(target=self._watch_other_nodes, name="other nodes", daemon=True).start()
        while not self._is_over():
            self._meet_ranks()
            for event in self._server.poll(_LOOK_SECONDS):
                try:
                    self._react(event)
                except Exception:
                    # A mistake of ours about one event must not leave all ranks without a guardian.
                    note_failure(f"not dealt with: {event}")
            self._look_for_hangs()
        self._saving.drain(self._job.deadline_seconds)

    def _meet_ranks(self) -> None:
        """Watch those whose pages have appeared, whether they have said hello or not."""
        for known in self._ranks.values():
            process = known.meet()
            if process is not None:
                self._server.watch(known.rank, *process)

    def _react(self, event: Said | Ended) -> None:
        if isinstance(event, Ended):
            self._ended(event.rank)
        else:
            self._heard(event)

    def _heard(self, said: Said) -> None:
        known = self._ranks.get(said.rank)
        if known is None:
            note(f"rank {said.rank} is not of this node")
            return
        self._meet_ranks()
        event = said.event
        if event["event"] == "save":
            self._saving.asked(said.rank, event)
        elif event["event"] == "goodbye":
            known.said_goodbye = True
        elif event["event"] == "leaving":
            known.leaves(str(event.get("why", "signal")), str(event.get("detail", "")))
            self._begin_last_words(f"{known.end}")
            self._answer_again(said.rank)
        elif event["event"] == "hello":
            self._answer_again(said.rank)
        else:
            note(f"rank {said.rank} said what is not known here: {event['event']!r}")

    def _ended(self, rank: int) -> None:
        known = self._ranks[rank]
        known.ended()
        if not known.said_goodbye:
            self._begin_last_words(f"{known.end}")

    def _look_for_hangs(self) -> None:
        if self._triggered or self._watch is None:
            return
        try:
            change = self._watch.look()
        except Exception:
            note_failure("hangs are not looked for any more")
            self._watch = None
            return
        if change is Change.HANGS:
            seconds = self._watch.still_seconds
            threading.Thread(target=self._look_into, args=(seconds,), name="hang", daemon=True).start()
        elif change is Change.MOVES:
            self._say(["it moves again"])
        hang, self._deadly_hang = self._deadly_hang, None
        if hang is not None and self._watch.hangs:
            self._begin_last_words(f"{hang}", hang)
        elif hang is not None:
            self._say([f"nothing is ended: {report(self._job, self._ranks, hang, moves=True)}"])

    def _look_into(self, still_seconds: float) -> None:
        try:
            ranks = standstill_of(self._ranks)
            pids = {rank: known.process[0] for rank, known in self._ranks.items() if known.process}
            hang = hang_of(self._job, ranks, pids, still_seconds)
            if may_be_ended(self._job, ranks):
                then = "last words are spoken, and the ranks are ended (`on_hang` is `last-words`)"
            else:
                then = report(self._job, self._ranks, hang)
            stopped = [known.rank for known in ranks if known.stacks.is_stopped]
            self._say(lines_of(self._job, hang, ranks, then), stopped)
            if may_be_ended(self._job, ranks):
                # Not from here: all that begins them runs in the thread that listens.
                self._deadly_hang = hang
                self._server.wake()
        except Exception:
            note_failure("a hang could not be looked into")

    def _say(self, lines: Sequence[str], not_by: Collection[int] = ()) -> None:
        """In the log of the guardian, and once a node where the job's own output goes."""
        note_lines(lines)
        able = [rank for rank in self._ranks if rank not in not_by]
        self._server.tell_a_listener({"event": "say", "text": "\n".join(lines)}, able)

    def _begin_last_words(self, why: str, hang: Hang | None = None) -> None:
        if self._triggered:
            return
        self._triggered = True
        note(f"last words begin: {why}")
        self._saving.close()
        words = LastWords(self._arena, self._job, self._ranks, self._saving, hang)
        arguments = (words, hang is not None)
        threading.Thread(target=self._speak, args=arguments, name="last words", daemon=True).start()

    def _speak(self, words: LastWords, ends_ranks: bool) -> None:
        outcome = words.speak()
        if self._ownership is not None:
            # Nothing is written any more: the next run need not wait until all ranks have gone.
            self._ownership.release()
        self._done_at = time.monotonic()
        self._outcome = outcome
        self._tell_all(_done(outcome))
        if ends_ranks:
            end_ranks(self._ranks.values())

    def _answer_again(self, rank: int) -> None:
        """One that comes when all is over hears so too."""
        if self._outcome is not None:
            self._server.send(_done(self._outcome), rank)

    def _tell_all(self, event: Mapping[str, Any]) -> None:
        self._server.send(event)
        self._server.wake()

    def _watch_other_nodes(self) -> None:
        agreement = Agreement(self._job)
        while not self._triggered:
            try:
                if agreement.is_called_for():
                    # Not from here: all else that begins them runs in the thread that listens.
                    self._called_for = True
                    self._server.wake()
                    return
            except OSError as error:
                note(f"the other nodes' reports cannot be looked for: {error}")
            time.sleep(_OTHER_NODES_SECONDS)

    def _is_over(self) -> bool:
        if self._called_for:
            self._begin_last_words("another node has begun its own")
        ranks = self._ranks.values()
        if self._triggered:
            if self._outcome is None:
                return False
            all_gone = all(known.has_ended or known.page is None for known in ranks)
            return all_gone or time.monotonic() - self._done_at > _AFTER_DONE_SECONDS
        if all(known.said_goodbye for known in ranks):
            return True
        nobody_came = all(known.page is None for known in ranks)
        return nobody_came and time.monotonic() - self._begun > _FIRST_RANK_SECONDS


def _done(outcome: Outcome) -> dict[str, Any]:
    return {"event": "done", "tag": outcome.tag, "why": outcome.why}
