"""Guards for engines that a script makes without knowing of guards."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_toolkit.resilience.guard import CheckpointGuard

_RESUMED = (
    "the engine is at step %d, and the script does not know: what it counts itself begins at 0 again, and its"
    " data at the first batch; the count to go by is engine.global_steps"
)


class Guards:
    """One for each engine that `deepspeed.initialize` returns in this process.

    What this imports of the toolkit needs torch, and comes only when the script has imported it.
    """

    def __init__(self, directory: Path) -> None:
        """
        Args:
            directory: checkpoints of the first engine; those of the second go to its folder `engine_2`.
        """
        self._directory = directory
        self._guards: list[CheckpointGuard] = []

    def put_around_initialize(self, deepspeed: ModuleType) -> None:
        """Let `deepspeed.initialize` return engines that have a guard and are resumed."""
        original: Callable[..., Any] = deepspeed.initialize

        @functools.wraps(original)
        def initialize(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._attach(result[0])
            return result

        deepspeed.initialize = initialize  # type: ignore[attr-defined]

    def close(self) -> None:
        """The script has come to its end: final checkpoints. Collective, if the process group is still there.

        If the script has ended the group itself, the guardian writes the newest step when this process ends.
        """
        if not self._guards:
            return
        import torch.distributed

        if not torch.distributed.is_initialized():
            return
        for guard in reversed(self._guards):
            guard.close()
        # Nobody needs it any more, and left open it may end the interpreter with an abort.
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()

    def leave(self, error: BaseException) -> None:
        """The script has failed in a way that only its caller sees: last words, without the other ranks."""
        for guard in reversed(self._guards):
            guard.__exit__(type(error), error, error.__traceback__)

    def _attach(self, engine: Any) -> None:
        if engine.basic_optimizer is None:
            # A reference model, or one for evaluation: it has nothing to save.
            return
        from ds_toolkit.resilience.guard import CheckpointGuard
        from ds_toolkit.resilience.reporting import on_rank_0

        number = len(self._guards) + 1
        directory = self._directory if number == 1 else self._directory / f"engine_{number}"
        guard = CheckpointGuard(engine, directory)
        on_rank_0(logging.INFO, "checkpoints of this run: %s", directory)
        resumed = guard.resume()
        self._guards.append(guard)
        if resumed is not None:
            on_rank_0(logging.WARNING, _RESUMED, resumed.step)
