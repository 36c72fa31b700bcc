"""`CheckpointGuard`: attach it to a DeepSpeed engine and the run can always be continued."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_toolkit.config.guard_settings import SECTION, GuardSettings, guard_settings
from ds_toolkit.errors import ToolkitError
from ds_toolkit.guardian.control import Leaving, Phase
from ds_toolkit.resilience import agreement, resume, save
from ds_toolkit.resilience.background import Background
from ds_toolkit.resilience.cadence import cadence_for
from ds_toolkit.resilience.capture import run_shape
from ds_toolkit.resilience.failures import failures_of
from ds_toolkit.resilience.hooks import (
    EngineHooks,
    accumulated_micro_steps,
    after_each_step,
    keeping_out_of,
)
from ds_toolkit.resilience.loop_aids import LoopAids
from ds_toolkit.resilience.rank_state import Stateful, check_trackable
from ds_toolkit.resilience.reporting import logger, make_heard, on_rank_0
from ds_toolkit.resilience.resume import Resumed
from ds_toolkit.resilience.salvage import was_salvaged
from ds_toolkit.resilience.save import SavedCheckpoint
from ds_toolkit.resilience.tenancy import Tenancy
from ds_toolkit.units import format_bytes, format_seconds

__all__ = ["CheckpointGuard", "Resumed", "SavedCheckpoint"]

_ATTRIBUTE = "ds_toolkit_guard"


class CheckpointGuard(LoopAids):
    """Saves a training run periodically and brings it back, bit for bit.

    The guard hooks the engine's `step` (`train_batch` of a PipelineEngine); the training loop stays as it
    is. Every rank makes one, with the same arguments, after `deepspeed.initialize`:

        guard = CheckpointGuard(engine, "checkpoints", save_every=50)
        guard.track("loader", loader)
        resumed = guard.resume()
        ...
        guard.close()

    As a context manager it closes itself, with a final checkpoint, if the block ends well. Whatever else ends
    the process leads to last words (docs/last-words.md), which wait for no other rank.

    Args:
        engine: what `deepspeed.initialize` returned.
        directory: where checkpoints go; shared by all ranks, made if it does not exist.
        save_every: optimizer steps (`50`), time (`"10min"`, which is also the default) or `"auto"`, the
            interval that costs the least by what is measured.
        keep_last: how many checkpoints to keep, protected ones not counted; 3 by default.
        client_state: called at every save; its dict goes into DeepSpeed's client state and comes back as
            `Resumed.client_state`. It must give the same on every rank; what differs between ranks is for
            `track`.
        settings: the other settings. An argument beats `settings`, and these beat the section `ds_toolkit`
            of the engine's ds_config.

    Attributes:
        settings: the settings that hold.
        saved: the checkpoints committed by this guard, oldest first.

    Raises:
        ToolkitError: a setting that does not exist or is not allowed, or an engine that has a guard already.
    """

    def __init__(
        self,
        engine: Any,
        directory: str | os.PathLike[str],
        *,
        save_every: int | str | None = None,
        keep_last: int | None = None,
        client_state: Callable[[], Mapping[str, object]] | None = None,
        settings: GuardSettings | Mapping[str, object] | None = None,
    ) -> None:
        if getattr(engine, _ATTRIBUTE, None) is not None:
            raise ToolkitError(
                "this engine has a CheckpointGuard already", fix="close it before another one is attached"
            )
        if client_state is not None and not callable(client_state):
            raise ToolkitError(
                "client_state is not callable", fix="give a function that returns a dict, called at each save"
            )
        self.engine = engine
        self.directory = Path(directory).absolute()
        self.settings = guard_settings(
            engine.config.get(SECTION), settings, save_every=save_every, keep_last=keep_last
        )
        self.saved: list[SavedCheckpoint] = []
        self._client_state = client_state
        self._tracked: dict[str, Stateful] = {}
        self._cadence = cadence_for(self.settings, failures=lambda: failures_of(self.directory))
        self._committed_step: int | None = None
        self._broken_tags: list[str] = []
        self._has_resumed = False
        self._tenancy = Tenancy(self.directory, self.settings)
        self._hooks = EngineHooks(engine)
        self._background: Background | None = None
        self._takes_snapshots = self.settings.snapshot_every != 0
        self._closed = False
        make_heard()
        self._attach()

    @property
    def stall_seconds(self) -> float:
        """How long checkpoints have kept the training loop waiting on this rank, all in all."""
        saves = sum(saved.stall_seconds for saved in self.saved if not saved.in_background)
        return saves + (self._background.stall_seconds if self._background is not None else 0.0)

    def track(self, name: str, tracked: Stateful) -> None:
        """Save and restore something with `state_dict` and `load_state_dict`, on each rank its own.

        Call it before `resume`.

        Raises:
            ToolkitError: the name is taken, the object has no such methods, its state could not be loaded
                safely, or `resume` has restored the run already.
        """
        if name in self._tracked:
            raise ToolkitError(f"something is tracked as `{name}` already", fix="give it another name")
        check_trackable(name, tracked)
        if self._has_resumed:
            raise ToolkitError(f"`{name}` comes too late to be restored", fix="call track() before resume()")
        self._tracked[name] = tracked

    def resume(self, *, allow_fresh: bool = False) -> Resumed | None:
        """Continue from the newest checkpoint that verifies. Collective: every rank calls it.

        Args:
            allow_fresh: start from nothing if there are checkpoints and none of them is whole.

        Returns:
            What the run continues from; None on a fresh start.

        Raises:
            ToolkitError: there are checkpoints and none is whole, or the newest is of another kind of run.
        """
        if self.engine.load_universal_checkpoint():
            raise ToolkitError(
                "resume() reads ordinary checkpoints, and the ds_config asks for universal ones",
                where="checkpoint.load_universal",
                fix="load the universal checkpoint with engine.load_checkpoint() and take the key out for "
                "later starts",
            )
        if accumulated_micro_steps(self.engine):
            raise ToolkitError(
                "resume() stands in the middle of a gradient accumulation",
                fix="call it before the training loop, or after an optimizer step",
            )
        self._tenancy.take()
        try:
            return self._resume(allow_fresh)
        except BaseException:
            self._tenancy.release()
            raise

    def save(self, tag: str | None = None, *, protect: bool = False) -> str:
        """Save now. Collective: every rank calls it, between two steps.

        Args:
            tag: name of the checkpoint, `global_step<N>` if not given; a checkpoint of that name is replaced
                in one instant.
            protect: keep it for ever.

        Returns:
            The tag.

        Raises:
            ToolkitError: it could not be saved, on all ranks alike; earlier checkpoints are as they were and
                what was written of this one is removed.
        """
        if accumulated_micro_steps(self.engine):
            raise ToolkitError(
                "save() stands in the middle of a gradient accumulation",
                why="its gradients are not part of a checkpoint, while the data have moved on",
                fix="call it after an optimizer step",
            )
        return self._save(tag, protect)

    def close(self) -> None:
        """Save a final checkpoint, unless this very step is saved, and let go of the engine. Collective."""
        if self._closed:
            return
        with self._during(Phase.IDLE):
            self._finish()
        if self._background is not None:
            self._background.close()
        self._detach()

    def _finish(self) -> None:
        step = int(self.engine.global_steps)
        if self._background is not None:
            self._background.settle()
        unsaved = step > 0 and step != self._committed_step
        # One rank may have heard of the commit, and another have lost its guardian.
        if any(agreement.gather(unsaved)) if self._background is not None else unsaved:
            if lost := accumulated_micro_steps(self.engine):
                on_rank_0(logging.WARNING, "the last %d micro-steps end with no optimizer step", lost)
            self._save(None, protect=False)

    def __enter__(self) -> CheckpointGuard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is None:
            self.close()
        else:
            # The other ranks may be anywhere: nothing collective may begin here.
            if self._background is not None:
                self._background.leave(Leaving.EXCEPTION, f"{kind.__name__}: {error}".partition("\n")[0])
                self._background.abandon()
            self._detach()

    def _is_open(self) -> bool:
        return not self._closed

    def _attach(self) -> None:
        step = "train_batch" if isinstance(self.engine, PipelineEngine) else "step"
        self._hooks.put_around(step, after_each_step(self.engine, self._after_step, self._is_open))
        self._hooks.put_around("save_checkpoint", keeping_out_of(self.directory, self._is_open))
        setattr(self.engine, _ATTRIBUTE, self)

    def _detach(self) -> None:
        self._closed = True
        self._hooks.take_off()
        self._tenancy.release()
        setattr(self.engine, _ATTRIBUTE, None)

    def _after_step(self, step: int) -> None:
        self._tenancy.take_unasked(step)
        due = self._cadence.due(step)
        if self._takes_snapshots and self._background is None:
            self._background = Background.enter(
                self.engine,
                self.directory,
                self.settings,
                tracked=self._tracked,
                client_state=self._client_state,
                broken=self._broken_tags,
                on_saved=self._note_saved,
            )
            self._takes_snapshots = self._background is not None
        together = due if self._background is None else self._background.after_step(step, due=due)
        if together:
            self._save_or_go_on(step)
        elif due:
            # Here and not when it is committed, which ranks hear at different steps.
            self._cadence.saved(step)

    def _note_saved(self, saved: SavedCheckpoint, write_seconds: float) -> None:
        self._committed_step = saved.step
        self._cadence.observe(stall_seconds=saved.stall_seconds, write_seconds=write_seconds)
        self.saved.append(saved)

    def _save_or_go_on(self, step: int) -> None:
        try:
            self._save(None, protect=False)
        except ToolkitError:
            if self.settings.on_save_failure == "raise":
                raise
            self._cadence.saved(step)
            if agreement.rank() == 0:
                logger.exception("the checkpoint of step %d is missing; training goes on", step)

    def _resume(self, allow_fresh: bool) -> Resumed | None:
        candidate, self._broken_tags = resume.choose(
            self.directory, self.settings.verify_on_resume, allow_fresh=allow_fresh
        )
        if candidate is None:
            return None
        resume.check_shape(candidate, run_shape(self.engine))
        resumed = resume.load(self.engine, candidate, self._tracked)
        if any(agreement.gather(was_salvaged(self.directory, self._tenancy.salvaged, candidate.tag))):
            resumed = replace(resumed, kind="memory")
        self._committed_step = resumed.step
        self._has_resumed = True
        self._cadence.moved_to(resumed.step)
        on_rank_0(logging.INFO, "resumed from %s (step %d, %s)", resumed.tag, resumed.step, resumed.kind)
        return resumed

    def _save(self, tag: str | None, protect: bool) -> str:
        started_seconds = time.monotonic()
        step = int(self.engine.global_steps)
        tag = f"global_step{step}" if tag is None else tag
        self._tenancy.take_unasked(step)
        with self._during(Phase.SAVE):
            manifest = save.save(
                self.engine,
                self.directory,
                tag,
                protect=protect,
                micro_steps=accumulated_micro_steps(self.engine),
                tracked=self._tracked,
                client_state=self._client_state,
            )
        self._broken_tags = [broken for broken in self._broken_tags if broken != tag]
        if agreement.rank() == 0:
            save.delete_old_tags(self.directory, self.settings, newest=manifest, broken=self._broken_tags)
        stall_seconds = time.monotonic() - started_seconds
        self._committed_step = step
        self._cadence.observe(stall_seconds=stall_seconds, write_seconds=0.0)
        self._cadence.saved(step)
        self.saved.append(SavedCheckpoint(tag, step, manifest.total_bytes, stall_seconds))
        size, duration = format_bytes(manifest.total_bytes), format_seconds(stall_seconds)
        on_rank_0(logging.INFO, "saved %s: %s in %s", tag, size, duration)
        return tag
