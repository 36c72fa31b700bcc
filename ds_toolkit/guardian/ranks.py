"""What the guardian knows of each rank of its node."""

from __future__ import annotations

from dataclasses import dataclass, field

from ds_toolkit.checkpoint.incident import RankEnd, RankPlace
from ds_toolkit.errors import ToolkitError
from ds_toolkit.guardian.arena import Arena
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
    """

    rank: int
    page: ControlBlock | None = None
    process: tuple[int, int] | None = None
    has_ended: bool = False
    said_goodbye: bool = False
    end: RankEnd | None = field(default=None)

    def open(self, arena: Arena) -> bool:
        """Map its page, if it is there by now; whether it is."""
        if self.page is None:
            try:
                self.page = ControlBlock(arena.rank_folder(self.rank))
            except ToolkitError:
                return False
            self.process = self.page.process
        return True

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
        return self.said_goodbye or (self.end is not None and self.end.how == "end")

    def leaves(self, how: str, detail: str) -> None:
        """It ends; the first word on that stays."""
        if self.end is None:
            pid = self.process[0] if self.process else 0
            self.end = RankEnd(self.rank, pid, how, detail)

    def ended(self) -> None:
        """Its process is gone."""
        self.has_ended = True
        if not self.said_goodbye:
            leaving = self.page.leaving if self.page else Leaving.NO
            self.leaves(_LEAVING_WORDS.get(leaving, "died"), "")

    def slots(self) -> list[SlotState]:
        """Its slots; none before its page is there."""
        return [] if self.page is None else self.page.slots()

    def whole_slots(self) -> list[SlotState]:
        """Those that can be read now."""
        return [slot for slot in self.slots() if slot.is_whole]

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
