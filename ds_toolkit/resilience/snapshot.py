"""After every optimizer step, this rank's part of a checkpoint goes to a slot. Nothing is collective.

Buffers, random states, counters: all that the next forward may change is copied before the training loop goes
on. Trained weights and optimizer states change in `optimizer.step` alone. A thread copies them while the next
forward and backward run; the fence before the next `optimizer.step` waits for the rest. A slot is whole only
when the rank's page says so, which it does after the last byte.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ds_toolkit.guardian.arena import Arena, write_contents
from ds_toolkit.guardian.arena import SlotFile as SlotEntry
from ds_toolkit.guardian.control import ControlBlock, SlotState
from ds_toolkit.resilience.copying_thread import Copy, CopyingThread, copy_all
from ds_toolkit.resilience.rank_files import RankFiles, frozen_storages, steady_storages
from ds_toolkit.resilience.slot_files import SlotFile, bytes_of
from ds_toolkit.resilience.state_pickle import Pickled

# Of a frozen weight, how many elements are looked at to see whether somebody has changed it by hand.
_NUM_SAMPLES = 256
_NUM_STALLS = 100


@dataclass
class _Slot:
    """What lies in a slot: its files, and of frozen weights what they were when they were copied."""

    files: dict[str, SlotFile] = field(default_factory=dict)
    frozen: dict[tuple[str, int], tuple[object, ...]] = field(default_factory=dict)


class Snapshots:
    """The slots of this rank.

    Attributes:
        stall_seconds: how long the training loop has waited for snapshots, all in all.
        stalls_seconds: the same of the latest ones, each with the fence behind it.
        num_taken: how many there were.
        step: optimizer steps that the newest one holds, whole or not yet; None before the first.
    """

    def __init__(self, engine: Any, files: RankFiles, arena: Arena, control: ControlBlock) -> None:
        self._engine = engine
        self._files = files
        self._arena = arena
        self._control = control
        self._thread = CopyingThread()
        self._slots: dict[int, _Slot] = {}
        self._sources: dict[str, list[torch.Tensor]] = {}
        self._steady: set[int] = set()
        self._frozen: dict[int, torch.Tensor] = {}
        self.stall_seconds = 0.0
        self.stalls_seconds: deque[float] = deque(maxlen=_NUM_STALLS)
        self.num_taken = 0
        self.step: int | None = None

    @property
    def copy_seconds(self) -> float:
        """How long the thread has copied, all in all."""
        return self._thread.busy_seconds

    def prepare(self, pickled: dict[str, Pickled]) -> None:
        """Make the files of all slots, so that no snapshot has to: pages are touched for the first time here.

        Args:
            pickled: this rank's files (`RankFiles.collect`).

        Raises:
            ToolkitError: there is no room for them.
        """
        for index in range(self._control.num_slots):
            self._fit(index, self._slots.setdefault(index, _Slot()), pickled)

    def take(self, step: int, *, wanted: int = 0, then: Callable[[], None] = lambda: None) -> float:
        """Begin the snapshot of a step that is done; returns the seconds that it took before going on.

        Args:
            step: optimizer steps done.
            wanted: number of the save that the slot is kept for; 0 if it may be written over.
            then: called by the copying thread when the slot is whole.

        Raises:
            ToolkitError: a part of the state cannot be had, or there is no room for it. The slot is void.
        """
        started_seconds = time.monotonic()
        self.fence()
        if self._control.frozen:
            return 0.0
        index = self._free_slot()
        slot = self._slots.setdefault(index, _Slot())
        pickled = self._files.collect()
        kinds = {self._files.kind_of(name) for name in pickled}
        self._control.begin_slot(index, step, kinds, wanted)
        self._fit(index, slot, pickled)
        at_once, later = self._copies(slot, pickled)
        copy_all(at_once)
        tails = [(slot.files[name], part.data) for name, part in pickled.items()]

        def finish() -> None:
            for file, data in tails:
                file.write_tail(data)
            self._control.end_slot(index)
            then()

        self._thread.start(later, finish)
        self.step = step
        self.num_taken += 1
        stall_seconds = time.monotonic() - started_seconds
        self.stall_seconds += stall_seconds
        self.stalls_seconds.append(stall_seconds)
        return stall_seconds

    def fence(self, timeout_seconds: float | None = None) -> bool:
        """Wait until the snapshot that was begun is whole: what it copies from is about to change.

        Raises:
            Exception: the copying failed; the slot stays void.
        """
        started_seconds = time.monotonic()
        done = self._thread.wait(timeout_seconds)
        waited_seconds = time.monotonic() - started_seconds
        self.stall_seconds += waited_seconds
        if self.stalls_seconds:
            self.stalls_seconds[-1] += waited_seconds
        return done

    def close(self) -> None:
        """End the thread and let go of the files."""
        self._thread.wait()
        self._thread.close()
        for slot in self._slots.values():
            for file in slot.files.values():
                file.close()

    def _free_slot(self) -> int:
        """The oldest slot that no save is kept for; one that is void comes first."""
        slots = self._control.slots()
        free = [slot for slot in slots if not slot.wanted] or slots
        return min(free, key=_worth).index

    def _fit(self, index: int, slot: _Slot, pickled: dict[str, Pickled]) -> None:
        """Make the slot's files such as the state needs them."""
        folder = self._arena.slot_folder(self._control.rank, index)
        folder.mkdir(mode=0o700, exist_ok=True)
        if any(part.is_new or name not in self._sources for name, part in pickled.items()):
            self._steady, self._frozen = steady_storages(self._engine), frozen_storages(self._engine)
        for name, part in pickled.items():
            self._refresh_sources(name, part)
            sizes = tuple(storage.nbytes() for storage in part.storages)
            file = slot.files.get(name)
            if file is None or file.layout.storage_bytes != sizes:
                if file is not None:
                    file.close()
                slot.frozen = {place: seen for place, seen in slot.frozen.items() if place[0] != name}
                slot.files[name] = SlotFile(folder / name, sizes)
        for name in slot.files.keys() - pickled.keys():
            slot.files.pop(name).close()
            (folder / name).unlink()
        write_contents(folder, [SlotEntry(name, self._files.kind_of(name)) for name in pickled])

    def _refresh_sources(self, name: str, part: Pickled) -> None:
        sources = self._sources.get(name)
        if sources is None or part.is_new or len(sources) != len(part.storages):
            self._sources[name] = [bytes_of(storage) for storage in part.storages]
            return
        for key in part.replaced:
            sources[key] = bytes_of(part.storages[key])

    def _copies(self, slot: _Slot, pickled: dict[str, Pickled]) -> tuple[list[Copy], list[Copy]]:
        """What is copied at once, and what the thread copies."""
        at_once: list[Copy] = []
        later: list[Copy] = []
        for name, part in pickled.items():
            sources, places = self._sources[name], slot.files[name].places
            for key, storage in enumerate(part.storages):
                identity = storage._cdata
                if identity in self._steady:
                    later.append(Copy(sources[key], places[key]))
                elif not self._is_there(slot, name, key, identity):
                    at_once.append(Copy(sources[key], places[key]))
        return at_once, later

    def _is_there(self, slot: _Slot, name: str, key: int, identity: int) -> bool:
        """Whether a frozen weight lies in the slot already, such as it is now."""
        tensor = self._frozen.get(identity)
        if tensor is None:
            return False
        seen = (identity, tensor._version, tuple(_samples(tensor)))
        known = slot.frozen.get((name, key))
        slot.frozen[name, key] = seen
        return known == seen


def _worth(slot: SlotState) -> tuple[bool, int]:
    return slot.is_whole, slot.step


def _samples(tensor: torch.Tensor) -> Iterable[object]:
    # Writing through `.data` leaves no trace in the version; an average of the weights moves all elements.
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _NUM_SAMPLES)].tolist()
