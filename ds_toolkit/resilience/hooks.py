"""Functions around an engine's public methods, taken off again without disturbing anybody else's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_toolkit.errors import ToolkitError

Around = Callable[[Callable[..., Any]], Callable[..., Any]]


class EngineHooks:
    """What stands around the methods of one engine instance; its class is never touched."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._hooks: list[tuple[str, Any, Any]] = []

    def put_around(self, name: str, around: Around) -> None:
        """Replace the method `name` by `around(method)`."""
        original = getattr(self._engine, name)
        hook = functools.wraps(original)(around(original))
        self._hooks.append((name, hook, self._engine.__dict__.get(name)))
        setattr(self._engine, name, hook)

    def take_off(self) -> None:
        """Put the methods back.

        A hook that somebody has put another one around stays in the chain: it must do nothing from now on.
        """
        for name, hook, hooked_before in self._hooks:
            if self._engine.__dict__.get(name) is not hook:
                continue
            delattr(self._engine, name)
            if hooked_before is not None:
                setattr(self._engine, name, hooked_before)
        self._hooks.clear()


def after_each_step(engine: Any, then: Callable[[int], None], is_open: Callable[[], bool]) -> Around:
    """Around the method that ends a step: `then(step)` after each optimizer step, while `is_open`."""

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: object, **kwargs: object) -> object:
            step_before = engine.global_steps
            result = original(*args, **kwargs)
            # Micro-steps of gradient accumulation do not count: only the optimizer's step does.
            if engine.global_steps != step_before and is_open():
                then(int(engine.global_steps))
            return result

        return step

    return around


def keeping_out_of(directory: Path, is_open: Callable[[], bool]) -> Around:
    """Around `save_checkpoint`: DeepSpeed's own saves go elsewhere while `is_open`."""

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def save_checkpoint(save_dir: str, *args: object, **kwargs: object) -> object:
            if is_open() and Path(save_dir).resolve() == directory.resolve():
                raise ToolkitError(
                    "engine.save_checkpoint() would write over the files of committed checkpoints",
                    where=directory,
                    fix="call guard.save(tag), or save into another directory",
                )
            return original(save_dir, *args, **kwargs)

        return save_checkpoint

    return around


def accumulated_micro_steps(engine: Any) -> int:
    """Micro-steps taken since the last optimizer step; a pipeline takes them all in one call."""
    if isinstance(engine, PipelineEngine):
        return 0
    return int(engine.micro_steps % engine.gradient_accumulation_steps())
