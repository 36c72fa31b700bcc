"""What the ranks of a run decide together, so that none of them goes on alone or waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import deepspeed.comm as dist

from ds_toolkit.errors import ToolkitError

T = TypeVar("T")


def rank() -> int:
    """Global rank of this process."""
    return int(dist.get_rank())


def world_size() -> int:
    """Number of ranks of the run."""
    return int(dist.get_world_size())


def gather(value: T) -> list[T]:
    """Everybody's value, in the order of ranks. Collective."""
    values: list[T] = [value] * world_size()
    dist.all_gather_object(values, value)
    return values


def broadcast(value: T) -> T:
    """Rank 0's value on every rank. Collective."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def same(what: str, value: object) -> None:
    """Go on only if every rank has the same value. Collective.

    Raises:
        ToolkitError: on all ranks alike, with the first two values that differ.
    """
    values = gather(value)
    for number, other in enumerate(values):
        if other != values[0]:
            raise ToolkitError(
                f"the ranks differ in {what}",
                why=f"{values[0]} on rank 0, {other} on rank {number}",
                fix="make the same calls with the same arguments on every rank",
            )


def together(doing: str, phase: Callable[[], T]) -> T:
    """Run a phase on every rank; if it fails anywhere, it has failed everywhere. Collective.

    Args:
        doing: the phase in words, as in `cannot <doing>`.
        phase: this rank's part. If it contains collectives it must reach them whatever happens.

    Returns:
        This rank's result.

    Raises:
        ToolkitError: on all ranks alike, naming the first rank that failed and its reason.
    """
    failure: Exception | None = None
    try:
        result = phase()
    except Exception as error:
        failure = error
    reports = gather(None if failure is None else _explained(doing, failure).as_dict())
    failed = [number for number, report in enumerate(reports) if report is not None]
    if not failed:
        return result
    joint = ToolkitError.from_dict(reports[failed[0]] or {})
    if len(reports) > 1:
        ranks = f"rank {failed[0]}" if len(failed) == 1 else f"ranks {', '.join(map(str, failed))}"
        joint.why = f"{ranks}: {joint.why}" if joint.why else ranks
    raise joint from failure


def only_on_rank_0(doing: str, phase: Callable[[], T]) -> T:
    """Run a phase on rank 0 and give its result to everybody; its failure is everybody's. Collective."""
    return broadcast(together(doing, lambda: phase() if rank() == 0 else None))  # type: ignore[return-value]


def _explained(doing: str, failure: Exception) -> ToolkitError:
    if isinstance(failure, ToolkitError):
        return failure
    what = f"cannot {doing}"
    if isinstance(failure, OSError):
        return ToolkitError(what, where=failure.filename, why=failure.strerror or str(failure))
    first_line = str(failure).partition("\n")[0]
    return ToolkitError(what, why=f"{type(failure).__name__}: {first_line}")
