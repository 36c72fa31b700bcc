"""Waiting for a moment at which no rank of the node writes a slot, and making it last."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from ds_toolkit.guardian.control import Phase
from ds_toolkit.guardian.ranks import LocalRank

# A rank that has not moved for so long is blocked: in a collective, or because it was stopped.
QUIET_SECONDS = 0.3
MAX_SECONDS = 3.0
_LOOK_SECONDS = 0.01
# A rank may have looked whether it is frozen just before it was, and begin a slot just after.
_AFTERMATH_SECONDS = 0.02


def settle(
    ranks: Collection[LocalRank], *, at_most_seconds: float, all_leave: Callable[[], bool] = lambda: False
) -> None:
    """Return when the slots are not going to change, after which they must not.

    Args:
        ranks: of this node.
        at_most_seconds: after which they are frozen wherever they are.
        all_leave: whether those that live are about to end by themselves, one a little after the other: then
            they are waited for even if they do not move.
    """
    deadline = time.monotonic() + at_most_seconds
    seen, since = movements(ranks), time.monotonic()
    while time.monotonic() < deadline:
        if _is_over(ranks):
            break
        now = movements(ranks)
        if now != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > QUIET_SECONDS and not _is_writing(ranks) and not all_leave():
            break
        time.sleep(_LOOK_SECONDS)
    freeze(ranks)


def freeze(ranks: Collection[LocalRank]) -> None:
    """Let no rank begin a slot any more."""
    for known in ranks:
        if known.page is not None:
            known.page.freeze()
    if any(known.is_running for known in ranks):
        time.sleep(_AFTERMATH_SECONDS)


def _is_over(ranks: Collection[LocalRank]) -> bool:
    """Whether every rank has come to a stop by itself."""
    return not _is_writing(ranks) and all(_is_still(known) for known in ranks if known.is_running)


def _is_still(known: LocalRank) -> bool:
    return known.is_leaving or (known.page is not None and known.page.phase is Phase.PARKED)


def _is_writing(ranks: Collection[LocalRank]) -> bool:
    return any(slot.sequence % 2 for known in ranks if known.is_running for slot in known.slots())


def movements(ranks: Collection[LocalRank]) -> list[tuple[object, ...]]:
    """What changes when a rank that runs does anything: equal if none has."""
    return [
        (page.phase, page.step, page.micro_step, page.changed_ns, *(slot.sequence for slot in known.slots()))
        for known in ranks
        if known.is_running and (page := known.page) is not None
    ]
