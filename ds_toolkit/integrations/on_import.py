"""Something to do when a module is imported, without importing it earlier than its program would."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call `then` with the module right after its own code has run, or now if that has happened.

    A program may set variables before it imports torch or deepspeed: they must not be there before.
    """
    module = sys.modules.get(name)
    if module is not None:
        then(module)
    else:
        sys.meta_path.insert(0, _Watcher(name, then))


class _Watcher(MetaPathFinder):
    """Finds one module as everybody else would, until it has been imported.

    Finding alone is no import: transformers does it to see whether there is a deepspeed.
    """

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then
        self._is_asking = False

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_asking = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            sys.meta_path.remove(self)
            self._then(module)

        # Each spec has a loader of its own.
        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
