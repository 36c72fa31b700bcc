"""Functions around an engine's public methods, taken off again without disturbing anybody else's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class EngineHooks:
    """What stands around the methods of one engine instance; its class is never touched."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._hooks: list[tuple[str, Any, Any]] = []

    def put_around(self, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
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
