"""A thread that copies tensors into a slot while the next forward and backward run."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from deepspeed.accelerator import get_accelerator

from ds_toolkit.errors import ToolkitError

# Copied by one call each, during which the interpreter is free for the training loop.
_BATCH_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Copy:
    """The bytes of a storage, and where they go."""

    source: torch.Tensor
    place: torch.Tensor


@dataclass(frozen=True)
class Batch:
    """Copies that one call makes: hundreds of calls would cost more than the bytes of small ones.

    Made once for as long as sources and places stay the same.
    """

    sources: list[torch.Tensor]
    places: list[torch.Tensor]
    storages: list[torch.UntypedStorage]
    sizes_bytes: list[int]

    @classmethod
    def of(cls, copies: Sequence[Copy]) -> Batch:
        """One batch of all of them."""
        sources = [copy.source for copy in copies]
        storages = [source.untyped_storage() for source in sources]
        return cls(
            sources,
            [copy.place for copy in copies],
            storages,
            list(map(torch.UntypedStorage.nbytes, storages)),
        )

    def run(self) -> None:
        """Copy.

        Raises:
            ToolkitError: a storage has another size than it had when the batch was made.
        """
        if list(map(torch.UntypedStorage.nbytes, self.storages)) != self.sizes_bytes:
            raise ToolkitError(
                "a part of the state cannot be copied", why="a storage has changed its size in its place"
            )
        torch._foreach_copy_(self.places, self.sources)


def batched(copies: Sequence[Copy]) -> list[Batch]:
    """The copies, such that the interpreter is free for the training loop during each large call."""
    batches: list[Batch] = []
    batch: list[Copy] = []
    batch_bytes = 0
    for copy in copies:
        batch.append(copy)
        batch_bytes += copy.source.nbytes
        if batch_bytes >= _BATCH_BYTES:
            batches.append(Batch.of(batch))
            batch, batch_bytes = [], 0
    return [*batches, Batch.of(batch)] if batch else batches


class CopyingThread:
    """Does one batch of copies at a time; whoever changes the sources waits for it first."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="ds_toolkit-snapshot", daemon=True)
        self._thread.start()
        self.busy_seconds = 0.0
        """How long it has copied, all in all."""

    def start(self, batches: Sequence[Batch], then: Callable[[], None]) -> None:
        """Copy in the background, and call `then` in the thread when all bytes are there.

        What is on an accelerator is copied after what its current stream has been given to do.
        """
        ready = _now_on_the_current_stream()
        self._idle.clear()
        self._queue.put(lambda: self._copy(batches, ready, then))

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Until the copies are done; whether they are.

        Raises:
            BaseException: what made the thread fail, once.
        """
        done = self._idle.wait(timeout_seconds)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return done

    def close(self) -> None:
        """End the thread after what it has to do."""
        self._queue.put(None)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            started_seconds = time.monotonic()
            try:
                work()
            except BaseException as failure:
                self._failure = failure
            self.busy_seconds += time.monotonic() - started_seconds
            self._idle.set()

    def _copy(self, batches: Sequence[Batch], ready: object, then: Callable[[], None]) -> None:
        accelerator = get_accelerator()
        if ready is None:
            copy_all(batches)
        else:
            side = accelerator.Stream()
            with accelerator.stream(side):
                side.wait_event(ready)
                copy_all(batches)
            side.synchronize()
        then()


def copy_all(batches: Sequence[Batch]) -> None:
    """Copy one batch after the other.

    Raises:
        ToolkitError: a storage has another size than it had when its batch was made.
    """
    for batch in batches:
        batch.run()


def _now_on_the_current_stream() -> object:
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return None
    event = accelerator.Event()
    event.record(accelerator.current_stream())
    return event
