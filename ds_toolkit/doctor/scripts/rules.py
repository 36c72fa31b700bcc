"""All rules about scripts; importing this registers them."""

from __future__ import annotations

from ds_toolkit.doctor.scripts import batches, loading, partitions, stepping, waiting
from ds_toolkit.doctor.scripts.registry import RULES

__all__ = ["RULES", "batches", "loading", "partitions", "stepping", "waiting"]
