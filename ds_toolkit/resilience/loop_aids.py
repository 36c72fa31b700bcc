"""What a guard offers a training loop besides checkpoints: against hangs, and against false alarms."""

from __future__ import annotations

import contextlib
from collections.abc import Sized
from contextlib import AbstractContextManager
from typing import Any

import deepspeed.comm as dist
import torch

from ds_toolkit.errors import ToolkitError
from ds_toolkit.guardian.control import Phase
from ds_toolkit.resilience import agreement
from ds_toolkit.resilience.background import Background

_NOT_GIVEN, _UNKNOWN = -1, -2
_MAX_RANKS = 32


class LoopAids:
    """Methods of `CheckpointGuard` that need no checkpoint."""

    engine: Any
    _background: Background | None

    def check_even(self, loader: object) -> int | None:
        """Compare the number of batches of all ranks, before an epoch. Collective: one all-reduce.

        A rank that has fewer leaves its loop while the others wait for it in their next step, for ever.

        Args:
            loader: anything with `len()`; None on ranks that read no data, as in the middle of a pipeline.

        Returns:
            `len(loader)`, the same wherever there is one; None if there is no loader here.

        Raises:
            ToolkitError: on all ranks alike, with the counts: they differ, or a loader has no length.
        """
        own = _NOT_GIVEN if loader is None else _length(loader)
        counts = torch.zeros(agreement.world_size(), dtype=torch.int64, device=self.engine.device)
        counts[agreement.rank()] = own
        dist.all_reduce(counts)
        check_counts(counts.tolist())
        return None if own == _NOT_GIVEN else own

    def busy(self) -> AbstractContextManager[None]:
        """While the block lasts, nothing that stands still on this node is taken for a hang.

        For what may take longer than `hang_after`: an evaluation, sampling, an upload. On the ranks that do
        it, or on all of them. Not collective.
        """
        return self._during(Phase.BUSY)

    def _during(self, phase: Phase) -> AbstractContextManager[None]:
        """Nobody looks before the first step, nor where there are no snapshots."""
        return contextlib.nullcontext() if self._background is None else self._background.during(phase)


def check_counts(counts: list[int]) -> None:
    """Refuse batch counts that differ.

    Args:
        counts: of every rank; -1 for a rank without a loader, -2 for a loader without a length.

    Raises:
        ToolkitError: with the counts and who has them.
    """
    unknown = [rank for rank, count in enumerate(counts) if count == _UNKNOWN]
    if unknown:
        raise ToolkitError(
            "the batches of a loader cannot be counted before they are read",
            why=f"it has no len() on {_ranks(unknown)}",
            fix="give every rank the same number of batches, and stop all of them at that count",
        )
    by_count: dict[int, list[int]] = {}
    for rank, count in enumerate(counts):
        if count != _NOT_GIVEN:
            by_count.setdefault(count, []).append(rank)
    if len(by_count) > 1:
        raise ToolkitError(
            "the ranks have different numbers of batches: the run would hang at the end of the epoch",
            why="; ".join(f"{count} on {_ranks(ranks)}" for count, ranks in sorted(by_count.items())),
            fix="use a DistributedSampler with drop_last=True, or stop all ranks after "
            f"{min(by_count)} batches",
        )


def _length(loader: object) -> int:
    if not isinstance(loader, Sized):
        return _UNKNOWN
    try:
        return len(loader)
    except TypeError:
        # A DataLoader over an IterableDataset has the method, which raises.
        return _UNKNOWN


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MAX_RANKS]))
    more = f" and {len(ranks) - _MAX_RANKS} more" if len(ranks) > _MAX_RANKS else ""
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}{more}"
