"""What stands by for the death of this rank: its slots in the arena, and the guardian of its node.

Made by all ranks together after the first optimizer step, when DeepSpeed has all its states. From then on
nothing here waits for another rank.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_toolkit.config.guard_settings import GuardSettings
from ds_toolkit.errors import ToolkitError
from ds_toolkit.guardian.arena import Arena
from ds_toolkit.guardian.client import GuardianClient, GuardianGoneError, start_guardian
from ds_toolkit.guardian.control import ControlBlock, Leaving, Phase
from ds_toolkit.resilience import agreement
from ds_toolkit.resilience.capture import run_shape
from ds_toolkit.resilience.enlisting import (
    Berth,
    arena_roots,
    choose_num_slots,
    enter_arena,
    find_berth,
    refuse_unfollowed,
    sharding_of,
)
from ds_toolkit.resilience.listening import Listening
from ds_toolkit.resilience.phases import Phases
from ds_toolkit.resilience.rank_files import RankFiles
from ds_toolkit.resilience.rank_state import Stateful
from ds_toolkit.resilience.reporting import logger, on_rank_0
from ds_toolkit.resilience.snapshot import Snapshots

# Between two attempts to find a guardian again that is gone.
_RETRY_SECONDS = 1.0
_LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class SaveRequest:
    """A periodic checkpoint that all ranks have agreed on."""

    save_id: str
    tag: str
    step: int


class Standby:
    """This rank's side of the guardian.

    Attributes:
        snapshots: the slots.
        phases: where the rank is, for the others to see.
        deadline_seconds: how long an end of this rank may wait for last words.
    """

    def __init__(
        self,
        arena: Arena,
        control: ControlBlock,
        berth: Berth,
        snapshots: Snapshots,
        phases: Phases,
        deadline_seconds: float,
    ) -> None:
        self.snapshots = snapshots
        self.phases = phases
        self.deadline_seconds = deadline_seconds
        self._arena, self._control, self._berth = arena, control, berth
        self._leaving = threading.Lock()
        self._stopping = threading.Event()
        self._pending: SaveRequest | None = None
        self._has_failed = False
        self._next_attempt_seconds = 0.0
        self._client: GuardianClient | None = _greeted(arena, control)
        self._listening = Listening(arena, control)

    @classmethod
    def enter(
        cls,
        engine: Any,
        directory: Path,
        *,
        tracked: Mapping[str, Stateful],
        client_state: Callable[[], Mapping[str, object]] | None,
        settings: GuardSettings,
        broken: Collection[str],
    ) -> Standby:
        """Make the arena, start the guardians, and take the first snapshot's measure. Collective.

        Raises:
            ToolkitError: on all ranks alike: the state cannot be followed, there is no room for it, or a
                guardian does not start.
        """
        refuse_unfollowed(engine)
        berth = find_berth(engine)
        scripts = Path(tempfile.mkdtemp(prefix="ds_toolkit-"))
        files = RankFiles(
            engine,
            agreement.rank(),
            keeps_model=berth.keeps_model,
            shared_params=berth.shared_params,
            scripts_folder=scripts,
            tracked=tracked,
            client_state=client_state,
        )
        try:
            collected = agreement.together("look at the state of this rank", files.learn)
            sharding = sharding_of(engine)
            slot_bytes = sum(
                sum(storage.nbytes() for storage in part.storages) + len(part.data)
                for part in collected.values()
            )
            root = arena_roots(settings)[0]
            num_slots, loss = choose_num_slots(sharding, berth, slot_bytes, root.parent, settings.save_every)
            if loss is not None:
                on_rank_0(logging.WARNING, "snapshots: %s", loss)
            arena, control = enter_arena(
                berth,
                directory,
                {files.kind_of(name) for name in collected},
                sharding=sharding,
                shape=run_shape(engine),
                num_slots=num_slots,
                settings=settings,
                broken=broken,
                root=root,
            )
            if agreement.rank() == 0:
                shutil.copytree(scripts, arena.scripts_folder)
                files.scripts_folder = arena.scripts_folder
        finally:
            shutil.rmtree(scripts, ignore_errors=True)

        snapshots = Snapshots(engine, files, arena, control)
        try:
            agreement.together("make room for snapshots", lambda: snapshots.prepare(collected))
            agreement.together(
                "start the guardian", lambda: start_guardian(arena) if berth.is_first else None
            )
        except ToolkitError:
            # On all ranks alike; a guardian that did start is told that this is over.
            cls._give_back(arena, control, snapshots)
            raise
        return cls(arena, control, berth, snapshots, Phases(engine, control), settings.deadline_seconds)

    @staticmethod
    def _give_back(arena: Arena, control: ControlBlock, snapshots: Snapshots) -> None:
        snapshots.close()
        control.leaving = Leaving.GOODBYE
        try:
            client = _greeted(arena, control)
            client.send({"event": "goodbye"})
            client.close()
        except GuardianGoneError:
            arena.remove()

    @property
    def is_heard(self) -> bool:
        """Whether this rank has snapshots, and the guardian of this node hears it."""
        return self._client is not None and not self._has_failed

    def fail(self) -> None:
        """Take no snapshots any more. Those that are whole stay."""
        self._has_failed = True

    def after_step(self, step: int, request: SaveRequest | None) -> float:
        """Snapshot a step that is done; returns the seconds that the training loop waited.

        If this rank has been told to end, it goes no further: another thread ends the process.
        """
        if self._has_failed:
            return 0.0
        self._find_guardian_again()
        if request is not None and self._client is None:
            # Nobody would write it, and nobody let go of the slot.
            request = None
        self._pending = request or self._pending
        wanted = int(request.save_id, 16) if request is not None else 0
        stall_seconds = self.snapshots.take(
            step, wanted=wanted, then=lambda: self._ask_for(request) if request is not None else None
        )
        if self._stopping.is_set():
            self.snapshots.fence()
            self.phases.enter(Phase.PARKED)
            threading.Event().wait()
        return stall_seconds

    def heard(self) -> list[dict[str, Any]]:
        """What the guardian has said since the last time, about saves."""
        events: list[dict[str, Any]] = []
        try:
            while self._client is not None and (event := self._client.receive(0)) is not None:
                events.append(event)
                if self._pending is not None and event.get("step") == self._pending.step:
                    self._pending = None
        except GuardianGoneError:
            self._lose_guardian()
        return events

    def wait_for_saves(self, timeout_seconds: float) -> list[dict[str, Any]]:
        """Behind the fence, until the last save is over or time is up; what the guardian said meanwhile."""
        deadline = time.monotonic() + timeout_seconds
        events = self.heard()
        while self.is_saving and self.is_heard and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
            events += self.heard()
        return events

    @property
    def is_saving(self) -> bool:
        """Whether a save that was asked for is not over yet."""
        return self._pending is not None

    def leave(self, why: Leaving, detail: str) -> None:
        """This process is about to end without having closed its guard: last words, for which it waits.

        From any thread, and only once; bounded by the deadline.
        """
        if not self._leaving.acquire(blocking=False):
            return
        self._stopping.set()
        deadline = time.monotonic() + self.deadline_seconds
        try:
            self.snapshots.fence(self.deadline_seconds / 2)
        except Exception:
            logger.exception("the last snapshot failed")
        self._control.leaving = why
        try:
            if self._client is None:
                return
            self._client.send({"event": "leaving", "why": why.name.lower(), "detail": detail})
            while (left := deadline - time.monotonic()) > 0:
                event = self._client.receive(left)
                if event is not None and event.get("event") == "done":
                    logger.info("last words: %s", event.get("tag") or event.get("why"))
                    return
        except GuardianGoneError as error:
            logger.warning("%s", error)

    def abandon(self) -> None:
        """Let go of all without a goodbye: the guardian goes on watching this process."""
        self._listening.close()
        self.snapshots.close()

    def close(self) -> None:
        """Say goodbye: nothing is to be written on account of this rank."""
        self._listening.close()
        self.snapshots.close()
        self._control.leaving = Leaving.GOODBYE
        try:
            if self._client is None:
                # A new one may have been started by another rank.
                self._client = _greeted(self._arena, self._control)
            if self._client is not None:
                self._client.send({"event": "goodbye"})
                self._client.close()
        except GuardianGoneError:
            # It is not there to be said goodbye to.
            self._arena.remove()

    def _ask_for(self, request: SaveRequest) -> None:
        """In the copying thread, when the slot is whole."""
        event = {
            "event": "save",
            "save_id": request.save_id,
            "tag": request.tag,
            "step": request.step,
            "protect": False,
            "micro_steps": 0,
        }
        try:
            if self._client is not None:
                self._client.send(event)
                return
        except GuardianGoneError:
            self._lose_guardian()
        self._let_go(request)

    def _let_go(self, request: SaveRequest) -> None:
        for slot in self._control.slots():
            if slot.wanted == int(request.save_id, 16):
                self._control.let_go(slot.index)

    def _lose_guardian(self) -> None:
        if self._client is None:
            return
        self._client.close()
        self._client = self._pending = None
        # What it was writing is lost with it, and nobody else would let go of the slots.
        for slot in self._control.slots():
            self._control.let_go(slot.index)
        logger.warning("the guardian of this node has ended; training goes on, and a new one is started")

    def _find_guardian_again(self) -> None:
        if self._client is not None or time.monotonic() < self._next_attempt_seconds:
            return
        self._next_attempt_seconds = time.monotonic() + _RETRY_SECONDS
        try:
            if self._berth.is_first:
                start_guardian(self._arena)
            self._client = _greeted(self._arena, self._control)
            logger.info("a guardian stands by again")
        except ToolkitError as error:
            logger.warning("%s", error)


def _greeted(arena: Arena, control: ControlBlock) -> GuardianClient:
    """A connection to the guardian, which knows whose it is."""
    client = GuardianClient(arena.socket_path)
    client.send({"event": "hello", "rank": control.rank, "pid": control.process[0]})
    return client
