"""What the guardian knows of each rank of its node."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ds_toolkit.checkpoint.incident import RankEnd, RankPlace
from ds_toolkit.errors import ToolkitError
from ds_toolkit.guardian.arena import Arena, read_contents
from ds_toolkit.guardian.control import ControlBlock, Leaving, SlotState
from ds_toolkit.guardian.topology import Slot

_LEAVING_WORDS = {
    Leaving.END: "end",
    Leaving.EXCEPTION: "exception",
    Leaving.SIGNAL: "signal",
}


@dataclass
class LocalRank:
    """A rank of this node, alive or not.

    Attributes:
        rank: global rank.
        page: its page; None before it was there.
        process: process id and start of the process, as its page says.
        has_ended: whether the process has ended.
        said_goodbye: whether nothing is to be written on its account.
        end: how it ended, or is about to; None while nothing of that kind is known.
        end_ns: when that was heard, by `time.monotonic_ns`.
    """

    rank: int
    arena: Arena
    page: ControlBlock | None = None
    process: tuple[int, int] | None = None
    has_ended: bool = False
    said_goodbye: bool = False
    end: RankEnd | None = None
    end_ns: int = 0

    def meet(self) -> tuple[int, int] | None:
        """Map its page if that has appeared; then, once, its process."""
        if self.page is not None:
            return None
        try:
            self.page = ControlBlock(self.arena.rank_folder(self.rank))
        except ToolkitError:
            return None
        self.process = self.page.process
        return self.process

    @property
    def is_running(self) -> bool:
        """Whether it may still write its slots."""
        return self.page is not None and not self.has_ended and not self.said_goodbye

    @property
    def is_leaving(self) -> bool:
        """Whether it has said, by message or in its page, that it ends."""
        page = self.page
        return self.end is not None or (page is not None and page.leaving is not Leaving.NO)

    @property
    def has_ended_well(self) -> bool:
        """Whether it has left, or is about to leave, because its work is done."""
        if self.end is not None:
            return self.said_goodbye or self.end.how == "end"
        # Its page says so a moment before its message is heard.
        page = self.page
        return self.said_goodbye or (page is not None and page.leaving in (Leaving.END, Leaving.GOODBYE))

    def leaves(self, how: str, detail: str) -> None:
        """It ends; the first word on that stays."""
        if self.end is None:
            pid = self.process[0] if self.process else 0
            self.end, self.end_ns = RankEnd(self.rank, pid, how, detail), time.monotonic_ns()

    def ended(self) -> None:
        """Its process is gone."""
        self.has_ended = True
        leaving = self.page.leaving if self.page else Leaving.NO
        # It may have said it to a guardian before this one.
        self.said_goodbye = self.said_goodbye or leaving is Leaving.GOODBYE
        if not self.said_goodbye:
            self.leaves(_LEAVING_WORDS.get(leaving, "died"), "")

    def slots(self) -> list[SlotState]:
        """Its slots; none before its page is there."""
        return [] if self.page is None else self.page.slots()

    def whole_slots(self) -> list[SlotState]:
        """Those that can be read now: they say so, and their files are there."""
        return [slot for slot in self.slots() if slot.is_whole and self._has_files(slot)]

    def readable(self) -> list[Slot]:
        """The same, as `topology.decide` takes them."""
        return [Slot(slot.step, slot.kinds) for slot in self.whole_slots()]

    def place(self) -> RankPlace:
        """Where it is, or was when it ended."""
        whole = max((slot.step for slot in self.whole_slots()), default=None)
        if self.page is None:
            return RankPlace(self.rank, 0, "unknown", 0, whole)
        page = self.page
        return RankPlace(self.rank, page.process[0], page.phase.name.lower(), page.step, whole)

    def _has_files(self, slot: SlotState) -> bool:
        folder = self.arena.slot_folder(self.rank, slot.index)
        try:
            files = read_contents(folder)
        except ToolkitError:
            return False
        return slot.kinds <= {file.kind for file in files} and all(
            (folder / file.name).is_file() for file in files
        )
