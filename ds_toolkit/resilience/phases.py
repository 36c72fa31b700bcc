"""Where this rank is in its training loop, told to whoever looks at its page."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_toolkit.guardian.control import ControlBlock, Phase
from ds_toolkit.resilience.hooks import EngineHooks


class Phases:
    """Puts the phase into the page as the engine's methods are called; a few stores each."""

    def __init__(self, engine: Any, control: ControlBlock) -> None:
        self._engine = engine
        self._control = control
        self.enter(Phase.DATA)

    def hook(self, hooks: EngineHooks) -> None:
        """Be told of forward, backward and the end of the step."""
        if isinstance(self._engine, PipelineEngine):
            hooks.put_around("train_batch", lambda original: self._within(Phase.FORWARD, original))
        else:
            hooks.put_around("forward", lambda original: self._within(Phase.FORWARD, original))
            hooks.put_around("backward", lambda original: self._within(Phase.BACKWARD, original))

    def enter(self, phase: Phase) -> None:
        """The rank is there from now on."""
        step, micro_steps = int(self._engine.global_steps), int(self._engine.micro_steps)
        self._control.enter(phase, step, micro_steps, time.monotonic_ns())

    def _within(self, phase: Phase, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: object, **kwargs: object) -> object:
            self.enter(phase)
            result = original(*args, **kwargs)
            self.enter(Phase.DATA)
            return result

        return method
