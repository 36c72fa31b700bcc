"""Slots become files of a tag: copied with bounded memory, summed on the way, flushed, compared after it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ds_toolkit.checkpoint.manifest import ManifestFile
from ds_toolkit.errors import ToolkitError
from ds_toolkit.files import write_whole
from ds_toolkit.guardian.arena import Arena, read_contents
from ds_toolkit.guardian.control import ControlBlock, SlotState
from ds_toolkit.guardian.copying import copy_file
from ds_toolkit.guardian.deadline import Deadline
from ds_toolkit.guardian.pieces import PieceKind


class SlotChangedError(ToolkitError):
    """A slot was written over, or has lost a file, while it was read: the copy is worth nothing."""


@dataclass(frozen=True)
class Giving:
    """What one rank gives to a tag: some kinds of what one look found in one of its slots."""

    rank: int
    page: ControlBlock
    slot: SlotState
    kinds: frozenset[PieceKind]

    def check(self) -> None:
        """See that the slot is as it was at that look.

        Raises:
            SlotChangedError: it is not.
        """
        if self.page.slot(self.slot.index).sequence != self.slot.sequence:
            raise SlotChangedError(
                f"slot {self.slot.index} of rank {self.rank} was written over while it was read",
                why=f"it held step {self.slot.step}",
            )


def copy_slot(arena: Arena, giving: Giving, folder: Path, deadline: Deadline) -> list[ManifestFile]:
    """Copy the files that a rank gives into the folder of a tag, and flush them.

    Raises:
        SlotChangedError: the slot was written over meanwhile; what was copied is to be thrown away.
        ToolkitError: the deadline has passed.
        OSError: a file cannot be written.
    """
    source = arena.slot_folder(giving.rank, giving.slot.index)
    copied = []
    for path in _sources(source, giving):
        target = folder / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        size_bytes, crc32 = copy_file(path, target, deadline)
        copied.append(ManifestFile(path.relative_to(source).as_posix(), size_bytes, crc32, giving.rank))
        giving.check()
    giving.check()
    return copied


def _sources(folder: Path, giving: Giving) -> list[Path]:
    """The files, all of which are there."""
    giving.check()
    try:
        files = read_contents(folder)
    except ToolkitError as error:
        raise SlotChangedError(error.what, where=error.where, why=error.why) from error
    paths = [folder / file.name for file in files if file.kind in giving.kinds]
    for path in paths:
        if not path.is_file():
            raise SlotChangedError(f"a file is missing in a slot of rank {giving.rank}", where=path)
    return paths


def lay_beside(scripts: Path, directory: Path) -> None:
    """Put what is to lie beside the tags there, if it is missing or another version; whole, by rename.

    Raises:
        OSError: it cannot be written.
    """
    for script in _regular_files(scripts):
        data = script.read_bytes()
        target = directory / script.name
        if not target.is_file() or target.read_bytes() != data:
            write_whole(target, data)
            target.chmod(script.stat().st_mode & 0o777)


def _regular_files(folder: Path) -> Iterable[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
