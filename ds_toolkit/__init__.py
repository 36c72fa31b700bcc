"""The toolkit beside DeepSpeed: configs that hold, checkpoints that survive, weights in one file.

Public names are loaded when they are first used, so that commands which need no torch start without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ds_toolkit.checkpoint.examination import verify_checkpoint
    from ds_toolkit.config.guard_settings import GuardSettings
    from ds_toolkit.convert.consolidate import consolidate
    from ds_toolkit.convert.opening import open_checkpoint
    from ds_toolkit.errors import ToolkitError
    from ds_toolkit.resilience.cpu import skip_cpu_extension_builds
    from ds_toolkit.resilience.guard import CheckpointGuard, Resumed
    from ds_toolkit.resilience.loading import load

_HOME = {
    "CheckpointGuard": "ds_toolkit.resilience.guard",
    "GuardSettings": "ds_toolkit.config.guard_settings",
    "Resumed": "ds_toolkit.resilience.guard",
    "ToolkitError": "ds_toolkit.errors",
    "consolidate": "ds_toolkit.convert.consolidate",
    "load": "ds_toolkit.resilience.loading",
    "open_checkpoint": "ds_toolkit.convert.opening",
    "skip_cpu_extension_builds": "ds_toolkit.resilience.cpu",
    "verify_checkpoint": "ds_toolkit.checkpoint.examination",
}

__all__ = [
    "CheckpointGuard",
    "GuardSettings",
    "Resumed",
    "ToolkitError",
    "consolidate",
    "load",
    "open_checkpoint",
    "skip_cpu_extension_builds",
    "verify_checkpoint",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
