"""After every optimizer step, this rank's part of a checkpoint goes to a slot. Nothing is collective.

Buffers, random states, counters: all that the next forward may change is copied before the training loop goes
on. Trained weights and optimizer states change in `optimizer.step` alone. A thread copies them while the next
forward and backward run; the fence before the next `optimizer.step` waits for the rest. A slot is whole only
when the rank's page says so, which it does after the last byte.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ds_toolkit.guardian.arena import Arena, write_contents
from ds_toolkit.guardian.arena import SlotFile as SlotEntry
from ds_toolkit.guardian.control import ControlBlock, SlotState
from ds_toolkit.resilience.copying_thread import Batch, Copy, CopyingThread, batched, copy_all
from ds_toolkit.resilience.rank_files import RankFiles
from ds_toolkit.resilience.slot_files import SlotFile
from ds_toolkit.resilience.sources import FileSources, Sources
from ds_toolkit.resilience.state_pickle import Pickled

# Of a frozen weight, how many elements are looked at to see whether somebody has changed it by hand.
_NUM_SAMPLES = 256
_NUM_STALLS = 100


@dataclass(frozen=True)
class _Plan:
    """What is copied from a file's sources as long as they stay the same."""

    version: int
    later: list[Batch]
    at_once: list[Batch]
    frozen: dict[int, Copy]


@dataclass
class _Slot:
    """What lies in a slot: its files, and of frozen weights what they were when they were copied.

    `version` is that of the sources that the files were made for.
    """

    version: int = 0
    files: dict[str, SlotFile] = field(default_factory=dict)
    plans: dict[str, _Plan] = field(default_factory=dict)
    frozen: dict[tuple[str, int], tuple[object, ...]] = field(default_factory=dict)


class Snapshots:
    """The slots of this rank.

    Attributes:
        stall_seconds: how long the training loop has waited for snapshots, all in all.
        stalls_seconds: the same of the latest ones, each with the fence behind it.
        num_taken: how many there were.
    """

    def __init__(self, engine: Any, files: RankFiles, arena: Arena, control: ControlBlock) -> None:
        self._files = files
        self._arena = arena
        self._control = control
        self._thread = CopyingThread()
        self._slots: dict[int, _Slot] = {}
        self._sources = Sources(engine)
        self.stall_seconds = 0.0
        self.stalls_seconds: deque[float] = deque(maxlen=_NUM_STALLS)
        self.num_taken = 0

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
            slot = self._slots.setdefault(index, _Slot())
            self._fit(index, slot, pickled)
            for name in slot.files:
                self._plan(slot, name)

    def take(self, step: int, *, wanted: int = 0, then: Callable[[], None] = lambda: None) -> float:
        """Begin the snapshot of a step that is done; returns the seconds that it took before going on.

        None is taken while last words are written, nor where the only slot is kept for a save.

        Args:
            step: optimizer steps done.
            wanted: number of the save that the slot is kept for; 0 if it may be written over.
            then: called by the copying thread when the slot is whole.

        Raises:
            ToolkitError: a part of the state cannot be had, or there is no room for it. The slot is void.
        """
        started_seconds = time.monotonic()
        self.fence()
        index = self._free_slot()
        if self._control.frozen or index is None:
            return 0.0
        slot = self._slots.setdefault(index, _Slot())
        pickled = self._files.collect(must_prove=wanted != 0)
        kinds = {self._files.kind_of(name) for name in pickled}
        self._control.begin_slot(index, step, kinds, wanted)
        self._fit(index, slot, pickled)
        at_once, later = self._copies(slot)
        copy_all(at_once)
        tails = [(slot.files[name], part.data) for name, part in pickled.items()]

        def finish() -> None:
            for file, data in tails:
                file.write_tail(data)
            self._control.end_slot(index)
            then()

        self._thread.start(later, finish)
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

    def forget(self) -> None:
        """Void all slots: the run goes on from another state, and they hold steps of the one before."""
        self.fence()
        for slot in self._control.slots():
            # Whole, and of nothing: one that stays odd would be waited for.
            self._control.begin_slot(slot.index, 0, ())
            self._control.end_slot(slot.index)

    def close(self) -> None:
        """End the thread and let go of the files."""
        self._thread.wait()
        self._thread.close()
        for slot in self._slots.values():
            for file in slot.files.values():
                file.close()

    def _free_slot(self) -> int | None:
        """The oldest slot that is kept for no save; one that is void comes first."""
        free = [slot for slot in self._control.slots() if not slot.wanted]
        return min(free, key=_worth).index if free else None

    def _fit(self, index: int, slot: _Slot, pickled: dict[str, Pickled]) -> None:
        """Make the slot's files such as the state needs them."""
        self._sources.refresh(pickled)
        if slot.version == self._sources.version and slot.files.keys() == pickled.keys():
            return
        wanted = {
            name: tuple(map(torch.UntypedStorage.nbytes, part.storages)) for name, part in pickled.items()
        }
        if wanted != {name: file.layout.storage_bytes for name, file in slot.files.items()}:
            self._make_files(index, slot, wanted)
        slot.version = self._sources.version

    def _make_files(self, index: int, slot: _Slot, wanted: Mapping[str, tuple[int, ...]]) -> None:
        folder = self._arena.slot_folder(self._control.rank, index)
        folder.mkdir(mode=0o700, exist_ok=True)
        for name, sizes in wanted.items():
            file = slot.files.get(name)
            if file is None or file.layout.storage_bytes != sizes:
                if file is not None:
                    file.close()
                slot.frozen = {place: seen for place, seen in slot.frozen.items() if place[0] != name}
                slot.plans.pop(name, None)
                slot.files[name] = SlotFile(folder / name, sizes)
        for name in slot.files.keys() - wanted.keys():
            slot.files.pop(name).close()
            slot.plans.pop(name, None)
            (folder / name).unlink()
        write_contents(folder, [SlotEntry(name, self._files.kind_of(name)) for name in wanted])

    def _copies(self, slot: _Slot) -> tuple[list[Batch], list[Batch]]:
        """What is copied at once, and what the thread copies."""
        at_once: list[Batch] = []
        later: list[Batch] = []
        changed: list[Copy] = []
        for name in slot.files:
            sources, plan = self._sources[name], self._plan(slot, name)
            later += plan.later
            at_once += plan.at_once
            for key, copy in plan.frozen.items():
                seen = (sources.version, *_looks(sources.frozen[key]))
                if slot.frozen.get((name, key)) != seen:
                    slot.frozen[name, key] = seen
                    changed.append(copy)
        return [*at_once, *batched(changed)], later

    def _plan(self, slot: _Slot, name: str) -> _Plan:
        sources, plan = self._sources[name], slot.plans.get(name)
        if plan is None or plan.version != sources.version:
            plan = slot.plans[name] = _planned(sources, slot.files[name].places)
        return plan


def _planned(sources: FileSources, places: list[torch.Tensor]) -> _Plan:
    copies = {key: Copy(source, places[key]) for key, source in enumerate(sources.storages) if source.nbytes}
    later = [copy for key, copy in copies.items() if key in sources.steady]
    frozen = {
        key: copy for key, copy in copies.items() if key in sources.frozen and key not in sources.steady
    }
    at_once = [
        copy for key, copy in copies.items() if key not in sources.steady and key not in sources.frozen
    ]
    return _Plan(sources.version, batched(later), batched(at_once), frozen)


def _worth(slot: SlotState) -> tuple[bool, int]:
    return slot.is_whole, slot.step


def _looks(tensor: torch.Tensor) -> tuple[object, ...]:
    """Tells whether somebody has changed a frozen weight.

    Writing through `.data` leaves no trace in the version; an average of the weights moves all elements.
    """
    flat = tensor.detach().reshape(-1)
    return tensor._version, *flat[:: max(1, flat.numel() // _NUM_SAMPLES)].tolist()
