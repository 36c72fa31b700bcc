"""What checkpoints cost, and what a death would cost now, told to where the ds_config sends metrics."""

from __future__ import annotations

import time
from typing import Any

from ds_toolkit.resilience.save import SavedCheckpoint

# Between two events about snapshots: a step may take milliseconds.
_SECONDS_BETWEEN = 10.0
_PREFIX = "Checkpoints"


class Telemetry:
    """Writes to `engine.monitor` (TensorBoard, W&B, Comet, CSV), which speaks on rank 0 alone."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._told_at_seconds = float("-inf")
        self._saved_at_seconds: float | None = None

    def saved(self, saved: SavedCheckpoint, write_seconds: float) -> None:
        """A checkpoint was committed."""
        self._saved_at_seconds = time.monotonic()
        self._write(
            stall_seconds=saved.stall_seconds, write_seconds=write_seconds, total_bytes=saved.total_bytes
        )

    def snapshot(self, stall_seconds: float, step_seconds: float) -> None:
        """A snapshot was taken; told now and then.

        Args:
            stall_seconds: for which the loop waited.
            step_seconds: of the last step: what is lost at least if death comes now.
        """
        now_seconds = time.monotonic()
        if now_seconds - self._told_at_seconds < _SECONDS_BETWEEN:
            return
        self._told_at_seconds = now_seconds
        values = {"snapshot_stall_seconds": stall_seconds, "expected_loss_seconds": step_seconds}
        if self._saved_at_seconds is not None:
            values["newest_checkpoint_age_seconds"] = now_seconds - self._saved_at_seconds
        self._write(**values)

    def _write(self, **values: float) -> None:
        monitor = getattr(self._engine, "monitor", None)
        if monitor is None or not monitor.enabled:
            return
        samples = int(self._engine.global_samples)
        monitor.write_events([(f"{_PREFIX}/{name}", value, samples) for name, value in values.items()])
