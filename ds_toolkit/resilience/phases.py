"""Where this rank is in its training loop, told to whoever looks at its page."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_toolkit.guardian.control import ControlBlock, Phase
from ds_toolkit.resilience.hooks import EngineHooks


class Phases:
    """Puts the phase into the page as the engine's methods are called; a few stores each."""

    def __init__(self, engine: Any, control: ControlBlock) -> None:
        self._engine = engine
        self._control = control
        self._is_pipeline = isinstance(engine, PipelineEngine)
        self._is_busy = False
        self.enter(Phase.DATA)

    def hook(self, hooks: EngineHooks) -> None:
        """Be told of forward, backward and the end of the step, and of what may take long."""
        if self._is_pipeline:
            hooks.put_around("train_batch", lambda original: self._within(Phase.FORWARD, original))
            hooks.put_around("eval_batch", lambda original: self._within(Phase.EVALUATION, original))
        else:
            hooks.put_around("forward", lambda original: self._within(Phase.FORWARD, original))
            hooks.put_around("backward", lambda original: self._within(Phase.BACKWARD, original))
        hooks.put_around("save_checkpoint", lambda original: self._all_through(Phase.SAVE, original))
        hooks.put_around("load_checkpoint", lambda original: self._all_through(Phase.LOAD, original))

    def enter(self, phase: Phase) -> None:
        """The rank is there from now on."""
        step = int(self._engine.global_steps)
        # A pipeline counts no micro-steps: what it is given in one call is its batch.
        batches = step if self._is_pipeline else int(self._engine.micro_steps)
        self._control.enter(phase, step, batches, time.monotonic_ns())

    @contextlib.contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """The rank is there while the block lasts, and then again where it was before."""
        before, was_busy = self._control.phase, self._is_busy
        self._is_busy = was_busy or phase is Phase.BUSY
        self.enter(phase)
        try:
            yield
        finally:
            self._is_busy = was_busy
            self.enter(before)

    def _within(self, phase: Phase, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: object, **kwargs: object) -> object:
            if self._is_busy:
                return original(*args, **kwargs)
            is_evaluation = phase is Phase.FORWARD and not self._engine.module.training
            self.enter(Phase.EVALUATION if is_evaluation else phase)
            result = original(*args, **kwargs)
            self.enter(Phase.DATA)
            return result

        return method

    def _all_through(self, phase: Phase, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: object, **kwargs: object) -> object:
            with self.during(phase):
                return original(*args, **kwargs)

        return method
