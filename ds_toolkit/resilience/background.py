"""Checkpoints that cost the training loop almost nothing: snapshots every step, written by the guardian.

Hooked around the engine's and its optimizer's methods; the decision to save is the only thing for which ranks
wait for each other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ds_toolkit.checkpoint.commit import new_save_id
from ds_toolkit.config.guard_settings import GuardSettings
from ds_toolkit.errors import ToolkitError
from ds_toolkit.guardian.control import Leaving, Phase
from ds_toolkit.resilience import agreement
from ds_toolkit.resilience.departure import Departure
from ds_toolkit.resilience.hooks import EngineHooks
from ds_toolkit.resilience.overhead import pace_for
from ds_toolkit.resilience.rank_state import Stateful
from ds_toolkit.resilience.reporting import logger, on_rank_0
from ds_toolkit.resilience.save import SavedCheckpoint
from ds_toolkit.resilience.standby import SaveRequest, Standby
from ds_toolkit.resilience.telemetry import Telemetry
from ds_toolkit.units import format_bytes, format_seconds


class Background:
    """This rank's snapshots, and the periodic checkpoints made of them."""

    def __init__(
        self,
        engine: Any,
        standby: Standby,
        settings: GuardSettings,
        on_saved: Callable[[SavedCheckpoint, float], None],
    ) -> None:
        self._engine = engine
        self._standby = standby
        self._settings = settings
        self._on_saved = on_saved
        self._pace = pace_for(settings)
        self._telemetry = Telemetry(engine)
        self._step_ended_seconds = time.monotonic()
        self._stalled_seconds = 0.0
        self._begun_seconds = 0.0
        self._failed_save: str | None = None
        self._stalls: dict[int, float] = {}
        self._is_overdue = False
        self._closed = False
        self._hooks = [EngineHooks(engine), EngineHooks(engine.optimizer)]
        self._standby.phases.hook(self._hooks[0])
        self._hooks[0].put_around("load_checkpoint", self._after_forgetting)
        self._hooks[1].put_around("step", self._behind_the_fence)
        self._departure = Departure(self.leave)

    @classmethod
    def enter(
        cls,
        engine: Any,
        directory: Path,
        settings: GuardSettings,
        *,
        tracked: Mapping[str, Stateful],
        client_state: Callable[[], Mapping[str, object]] | None,
        broken: Collection[str],
        on_saved: Callable[[SavedCheckpoint, float], None],
    ) -> Background | None:
        """Stand by from now on; None, with a warning, where that cannot be. Collective, after a step.

        Args:
            engine: a DeepSpeed engine that has done an optimizer step.
            directory: of the checkpoints.
            settings: the guard's.
            tracked: objects whose state each rank saves.
            client_state: gives what goes into DeepSpeed's client state.
            broken: tags that did not verify.
            on_saved: called between two steps for each checkpoint that was committed, with the seconds that
                writing it took.
        """
        try:
            standby = Standby.enter(
                engine,
                directory,
                tracked=tracked,
                client_state=client_state,
                settings=settings,
                broken=broken,
            )
        except ToolkitError as error:
            on_rank_0(
                logging.WARNING,
                "no snapshots: a failure costs all since the last checkpoint, and nobody sees a hang: %s",
                error,
            )
            return None
        return cls(engine, standby, settings, on_saved)

    @property
    def stall_seconds(self) -> float:
        """How long the training loop has waited for snapshots, all in all."""
        return self._standby.snapshots.stall_seconds

    def after_step(self, step: int, *, due: bool) -> bool:
        """A step is done: snapshot it, and have it written if that is due.

        Returns:
            Whether all ranks must save together instead: one of them has no snapshots or no guardian.

        Raises:
            ToolkitError: on all ranks alike, an earlier checkpoint failed and `on_save_failure` is `raise`.
        """
        step_seconds = self._observe_step()
        self._hear()
        due = due or self._is_overdue
        request, together = self._agree(step) if due else (None, False)
        wanted = self._pace.due(step)
        # A step that the loss scaler skipped is not a new state.
        if request is not None or (wanted and self._engine.was_step_applied()):
            self._snapshot(step, request, step_seconds)
        self._standby.phases.enter(Phase.DATA)
        self._step_ended_seconds = time.monotonic()
        return together

    def during(self, phase: Phase) -> AbstractContextManager[None]:
        """A block in which this rank is somewhere else than in its training loop, for the others to see."""
        return self._standby.phases.during(phase)

    def settle(self) -> None:
        """Wait for the checkpoint that is being written, at most as long as a death may wait."""
        self._fence()
        self._note(self._standby.wait_for_saves(self._settings.deadline_seconds))

    def leave(self, why: Leaving, detail: str) -> None:
        """This process ends with an open guard: last words. Not collective, from any thread."""
        if not self._closed:
            self._standby.leave(why, detail)

    def abandon(self) -> None:
        """Let go of the engine without a goodbye; the guardian goes on watching this process."""
        self._detach()
        self._standby.abandon()

    def close(self) -> None:
        """Let go of the engine and say goodbye to the guardian. Not collective."""
        self._detach()
        self._standby.close()

    def _detach(self) -> None:
        self._closed = True
        self._departure.close()
        for hooks in self._hooks:
            hooks.take_off()

    def _behind_the_fence(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: object, **kwargs: object) -> object:
            if not self._closed:
                self._fence()
                self._standby.phases.enter(Phase.STEP)
            return original(*args, **kwargs)

        return step

    def _after_forgetting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def load_checkpoint(*args: object, **kwargs: object) -> object:
            if not self._closed:
                # What was asked for of the state before is written first.
                self.settle()
                self._standby.snapshots.forget()
            return original(*args, **kwargs)

        return load_checkpoint

    def _fence(self) -> None:
        try:
            self._standby.snapshots.fence()
        except Exception as error:
            self._give_up(error)

    def _observe_step(self) -> float:
        """How long the step took that has just ended, without what snapshots kept it waiting."""
        stall_seconds = self.stall_seconds - self._stalled_seconds
        self._stalled_seconds = self.stall_seconds
        # The snapshot was begun before `_step_ended_seconds`; what was waited for since is the fence.
        fence_seconds = max(0.0, stall_seconds - self._begun_seconds)
        step_seconds = max(0.0, time.monotonic() - self._step_ended_seconds - fence_seconds)
        self._pace.observe(step_seconds=step_seconds, stall_seconds=stall_seconds)
        return step_seconds

    def _snapshot(self, step: int, request: SaveRequest | None, step_seconds: float) -> None:
        try:
            stall_seconds = self._standby.after_step(step, request)
        except Exception as error:
            self._give_up(error)
        else:
            self._begun_seconds = stall_seconds
            self._telemetry.snapshot(stall_seconds, step_seconds)
            if request is not None:
                self._stalls[step] = stall_seconds

    def _give_up(self, error: Exception) -> None:
        """This rank has no snapshots from now on; the others learn it when the next checkpoint is due."""
        logger.warning("rank %d takes no snapshots any more: %s", agreement.rank(), error)
        self._standby.fail()

    def _agree(self, step: int) -> tuple[SaveRequest | None, bool]:
        """Whether the guardians write this step, or all ranks together; the same answer on every rank."""
        standby = self._standby
        state = "none" if not standby.is_heard else "busy" if standby.is_saving else "ready"
        answers = agreement.gather((state, self._failed_save, new_save_id()))
        self._failed_save = None
        failure = next((why for _, why, _ in answers if why is not None), None)
        if failure is not None and self._settings.on_save_failure == "raise":
            raise ToolkitError("a checkpoint could not be saved", why=failure)
        states = {answer[0] for answer in answers}
        if "busy" in states and "none" not in states:
            if not self._is_overdue:
                on_rank_0(
                    logging.WARNING, "the checkpoint of step %d waits: the last one is being written", step
                )
            self._is_overdue = True
            return None, False
        self._is_overdue = False
        if "none" in states:
            return None, True
        return SaveRequest(save_id=answers[0][2], tag=f"global_step{step}", step=step), False

    def _hear(self) -> None:
        self._note(self._standby.heard())

    def _note(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            step = int(event.get("step") or 0)
            if event.get("event") == "saved":
                stall_seconds = self._stalls.pop(step, 0.0)
                saved = SavedCheckpoint(
                    event["tag"], step, event["total_bytes"], stall_seconds, in_background=True
                )
                write_seconds = float(event["write_seconds"])
                on_rank_0(
                    logging.INFO,
                    "saved %s: %s in %s, in the background",
                    saved.tag,
                    format_bytes(saved.total_bytes),
                    format_seconds(write_seconds),
                )
                self._telemetry.saved(saved, write_seconds)
                self._on_saved(saved, write_seconds)
            elif event.get("event") == "failed":
                self._failed_save = f"{event.get('tag')}: {event.get('why')}"
                on_rank_0(logging.ERROR, "the checkpoint of step %d is missing: %s", step, event.get("why"))
