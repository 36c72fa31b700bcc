"""The run's right to its checkpoint directory, taken by all ranks together when it is first needed."""

from __future__ import annotations

from pathlib import Path

from ds_toolkit.checkpoint.ownership import Ownership, wait_for_guardian
from ds_toolkit.config.guard_settings import GuardSettings
from ds_toolkit.errors import ToolkitError
from ds_toolkit.resilience import agreement
from ds_toolkit.resilience.enlisting import arena_roots, first_on_node
from ds_toolkit.resilience.resume import refuse_later_steps
from ds_toolkit.resilience.salvage import salvage

# After its deadline a guardian may still be waiting for the disk.
_GUARDIAN_END_SECONDS = 30.0


class Tenancy:
    """Held by rank 0 for all ranks from the first resume or save to the guard's end.

    Attributes:
        salvaged: ids of dead jobs whose slots on this node were made a checkpoint when it was taken.
    """

    def __init__(self, directory: Path, settings: GuardSettings) -> None:
        self._directory = directory
        self._settings = settings
        self._ownership: Ownership | None = None
        self._taken = False
        self.salvaged: list[str] = []

    def take(self) -> None:
        """Make sure, once, that all ranks mean the same and that nobody else writes here. Collective.

        Raises:
            ToolkitError: directory or settings differ between ranks, or another run holds the directory.
        """
        if self._taken:
            return
        meant = (str(self._directory), self._settings.model_dump())
        agreement.same("the directory and the settings of their guards", meant)

        patience_seconds = self._settings.deadline_seconds + _GUARDIAN_END_SECONDS
        try:
            # The last run may have died a moment ago, and its guardian still be at its last words.
            agreement.only_on_rank_0("take the checkpoint directory", lambda: self._acquire(patience_seconds))
            is_first = first_on_node()
            self.salvaged = agreement.together(
                "look for what an earlier run left in memory",
                lambda: (
                    salvage(self._directory, patience_seconds, arena_roots(self._settings))
                    if is_first
                    else []
                ),
            )
        except BaseException:
            self.release()
            raise
        self._taken = True

    def take_unasked(self, step: int) -> None:
        """The same for a run that is about to write at `step` and never asked to resume. Collective.

        Raises:
            ToolkitError: as `take`, or the directory holds checkpoints of a longer run.
        """
        if self._taken:
            return
        self.take()
        try:
            agreement.only_on_rank_0(
                "look at the checkpoint directory", lambda: refuse_later_steps(self._directory, step)
            )
        except ToolkitError:
            self.release()
            raise

    def _acquire(self, patience_seconds: float) -> None:
        self._ownership = Ownership.acquire(self._directory)
        wait_for_guardian(self._directory, patience_seconds)

    def release(self) -> None:
        """Give it back. Not collective."""
        self._taken = False
        if self._ownership is not None:
            self._ownership.release()
            self._ownership = None
