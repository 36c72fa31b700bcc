"""A slot that is written while it is read gives no checkpoint, whenever the writing began."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import fake_rank
import pytest

from ds_toolkit.guardian.arena import Arena, write_contents
from ds_toolkit.guardian.control import ControlBlock
from ds_toolkit.guardian.deadline import Deadline
from ds_toolkit.guardian.writing import Giving, SlotChangedError, copy_slot


class Interrupted(Deadline):
    """A deadline that does something to the slot when it is looked at for the n-th time: once a piece."""

    def __init__(self, at_look: int, act: Callable[[], None]) -> None:
        super().__init__()
        self._left, self._act = at_look, act

    def check(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._act()
        super().check()


class Slot:
    """One whole slot of one rank, of step 5."""

    def __init__(self, directory: Path, root: Path) -> None:
        job = fake_rank.job(directory, "0000abcd", nodes=(0,))
        self.arena, self.kinds = Arena.create(job, root), job.kinds[0]
        self.folder = self.arena.slot_folder(0, 0)
        self.folder.mkdir(parents=True)
        self.page = ControlBlock.create(self.arena.rank_folder(0), 0, 1)
        self.files = fake_rank.slot_files(job.sharding, 0, self.kinds)
        self.write(5)

    def begin(self, step: int) -> None:
        self.page.begin_slot(0, step, self.kinds)
        for file in self.files:
            (self.folder / file.name).write_bytes(fake_rank.content(file.name, step))
        write_contents(self.folder, self.files)

    def write(self, step: int) -> None:
        self.begin(step)
        self.page.end_slot(0)

    def copy(self, target: Path, deadline: Deadline) -> None:
        target.mkdir()
        giving = Giving(0, self.page, self.page.slot(0), self.kinds)
        copy_slot(self.arena, giving, target, deadline)


@pytest.fixture
def slot(tmp_path: Path, root: Path) -> Slot:
    return Slot(tmp_path, root)


def test_a_slot_at_rest_is_copied(slot: Slot, tmp_path: Path) -> None:
    slot.copy(tmp_path / "tag", Deadline())
    for file in slot.files:
        assert (tmp_path / "tag" / file.name).read_bytes() == fake_rank.content(file.name, 5)


@pytest.mark.parametrize("at_look", [1, 2, 3])
@pytest.mark.parametrize("ends", [True, False], ids=["written over", "half written"])
def test_a_slot_that_changes_while_it_is_read(slot: Slot, tmp_path: Path, at_look: int, ends: bool) -> None:
    act = slot.write if ends else slot.begin
    with pytest.raises(SlotChangedError, match="written over"):
        slot.copy(tmp_path / "tag", Interrupted(at_look, lambda: act(6)))


def test_a_slot_that_is_written_when_reading_begins(slot: Slot, tmp_path: Path) -> None:
    giving = Giving(0, slot.page, slot.page.slot(0), slot.kinds)
    slot.begin(6)
    with pytest.raises(SlotChangedError, match="written over"):
        copy_slot(slot.arena, giving, tmp_path, Deadline())
    assert not slot.page.slot(0).is_whole


def test_last_words_take_no_slot_that_is_half_written(tmp_path: Path, root: Path) -> None:
    """A rank dies in the middle of a copy: what was whole before it serves."""
    with fake_rank.FakeJob(fake_rank.job(tmp_path, "0000abcd"), root) as job:
        job.write(3)
        job.write(4)
        job.ranks[0].write(5)
        job.ranks[1].begin(5)
        job.ranks[1].kill()
        assert job.ranks[0].hear(15)["tag"] == "global_step4"
    for file in fake_rank.slot_files(job.job.sharding, 0, job.job.kinds[0]):
        assert (tmp_path / "global_step4" / file.name).read_bytes() == fake_rank.content(file.name, 4)
