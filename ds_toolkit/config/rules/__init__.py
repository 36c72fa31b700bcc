"""The rules for a ds_config, one module a family; importing the package registers them all."""

from __future__ import annotations

from ds_toolkit.config.rules import (
    batch,
    checkpoint,
    communication,
    consumers,
    curves,
    implementations,
    keys,
    offload,
    optimizer,
    params,
    precision,
    scheduler,
    sections,
    spelling,
    toolkit,
    torch_schedulers,
    values,
    zero,
)
from ds_toolkit.config.rules.registry import RULES

__all__ = [
    "RULES",
    "batch",
    "checkpoint",
    "communication",
    "consumers",
    "curves",
    "implementations",
    "keys",
    "offload",
    "optimizer",
    "params",
    "precision",
    "scheduler",
    "sections",
    "spelling",
    "toolkit",
    "torch_schedulers",
    "values",
    "zero",
]
