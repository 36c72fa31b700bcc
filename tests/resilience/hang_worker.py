"""Run under torchrun: stands still in several ways, while a test looks on from outside.

    hang_worker.py ROOT STORY...

Each story trains an engine of its own, with its guard in `ROOT/<story>`, and touches `ROOT/<story>.done` when
it has come to its end; the last one of a job need not.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import torch
import training
from torch.utils.data import DataLoader, Dataset

from ds_toolkit import CheckpointGuard
from ds_toolkit.errors import ToolkitError

HANG_AFTER_SECONDS = 2.0
STEPS = 6
STORIES: dict[str, Callable[[Path], None]] = {}


def story(function: Callable[[Path], None]) -> Callable[[Path], None]:
    STORIES[function.__name__] = function
    return function


class Data(Dataset[torch.Tensor]):
    """Batches of one rank; number `stuck_at` is not read before the file `go` is there."""

    def __init__(self, length: int, stuck_at: int | None = None, go: Path | None = None) -> None:
        self.length, self.stuck_at, self.go = length, stuck_at, go

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        while index == self.stuck_at and self.go is not None and not self.go.exists():
            time.sleep(0.05)
        return torch.full((training.WIDTH,), float(index))


def guarded(directory: Path, **settings: Any) -> tuple[Any, CheckpointGuard]:
    engine = training.new_engine(training.ds_config(1, "fp32", gradient_accumulation_steps=1))
    settings = {"hang_after": HANG_AFTER_SECONDS, **settings}
    guard = CheckpointGuard(
        engine, directory, save_every=1000, client_state=lambda: slow_state(directory), settings=settings
    )
    guard.resume()
    return engine, guard


def slow_state(directory: Path) -> dict[str, object]:
    """Makes a save by all ranks slow, once the file that asks for it is there."""
    if directory.with_suffix(".slow_save").exists():
        time.sleep(1.7 * HANG_AFTER_SECONDS)
    return {}


def train(engine: Any, batches: Iterator[torch.Tensor] | DataLoader[torch.Tensor]) -> None:
    for batch in batches:
        loss = engine(batch).square().mean()
        engine.backward(loss)
        engine.step()


def loader(length: int, **arguments: Any) -> DataLoader[torch.Tensor]:
    return DataLoader(Data(length, **arguments), batch_size=training.MICRO_BATCH, drop_last=True)


def batches(count: int) -> DataLoader[torch.Tensor]:
    return loader(count * training.MICRO_BATCH)


@story
def slow(directory: Path) -> None:
    """All that takes longer than `hang_after` and is no hang."""
    engine, guard = guarded(directory)
    engine.module.first.register_forward_pre_hook(slow_first_step := SlowOnce())
    train(engine, batches(2))
    assert slow_first_step.done
    assert guard._background is not None
    phases, control = [], guard._background._standby._control
    engine.module.register_forward_pre_hook(lambda *_: phases.append(control.phase.name))
    with guard.busy():
        engine.eval()
        engine(torch.ones(training.MICRO_BATCH, training.WIDTH))
        time.sleep(1.7 * HANG_AFTER_SECONDS)
        engine.train()
    # An evaluation through the engine moves with each of its batches.
    engine.eval()
    for _ in range(4):
        engine(torch.ones(training.MICRO_BATCH, training.WIDTH))
        time.sleep(0.4 * HANG_AFTER_SECONDS)
    engine.train()
    train(engine, batches(2))
    assert phases == ["BUSY", *["EVALUATION"] * 4, *["FORWARD"] * 2], phases
    # Snapshots ask for the client state as well: none is to be taken by then.
    dist.barrier()
    directory.with_suffix(".slow_save").touch()
    guard.save("slow")
    directory.with_suffix(".slow_save").unlink(missing_ok=True)
    dist.barrier()
    train(engine, batches(1))
    guard.close()


class SlowOnce:
    def __init__(self) -> None:
        self.done = False

    def __call__(self, *_: object) -> None:
        if not self.done:
            self.done = True
            time.sleep(1.7 * HANG_AFTER_SECONDS)


@story
def checks(directory: Path) -> None:
    """`check_even`, which needs no step."""
    _, guard = guarded(directory)
    assert guard.check_even(batches(7)) == 7
    assert guard.check_even(None if dist.get_rank() else batches(7)) == (None if dist.get_rank() else 7)
    for odd, words in (
        (batches(7 + dist.get_rank()), ("7 on rank 0; 8 on rank 1", "after 7 batches")),
        (iter([]) if dist.get_rank() else batches(7), ("no len() on rank 1",)),
    ):
        try:
            guard.check_even(odd)
        except ToolkitError as error:
            assert all(word in str(error) for word in words), error
        else:
            raise AssertionError("uneven loaders passed")
    guard.close()


@story
def stuck_loader(directory: Path) -> None:
    """The data of rank 1 do not come until somebody lets them."""
    engine, guard = guarded(directory)
    stuck_at = 3 * training.MICRO_BATCH if dist.get_rank() == 1 else None
    data = Data(STEPS * training.MICRO_BATCH, stuck_at, directory.with_suffix(".go"))
    train(engine, DataLoader(data, batch_size=training.MICRO_BATCH, num_workers=1, prefetch_factor=1))
    guard.close()


@story
def stopped(directory: Path) -> None:
    """Somebody stops rank 1 for a while."""
    engine, guard = guarded(directory)
    train(engine, batches(2))
    dist.barrier()
    directory.with_suffix(f".pid{dist.get_rank()}").write_text(str(os.getpid()))
    go = directory.with_suffix(".go")
    while True:
        train(engine, batches(1))
        time.sleep(0.1)
        # All decide alike.
        ends = torch.tensor([float(go.exists())])
        dist.all_reduce(ends)
        if ends.item() == dist.get_world_size():
            break
    guard.close()


@story
def evaluation(directory: Path) -> None:
    """A long evaluation that nobody has told the watch of."""
    engine, guard = guarded(directory, on_hang="last-words")
    train(engine, batches(2))
    time.sleep(1.7 * HANG_AFTER_SECONDS)
    train(engine, batches(2))
    guard.close()


@story
def uneven(directory: Path) -> None:
    """Rank 1 has one batch less, and closes its guard."""
    engine, guard = guarded(directory, hang_after=5)
    train(engine, batches(38 - dist.get_rank()))
    directory.with_suffix(f".left{dist.get_rank()}").touch()
    guard.close()


@story
def reference(directory: Path) -> None:
    """What the next two would be if nobody disturbed them."""
    run_tracked(directory.with_name("undisturbed"), rank_0_saves_at=None)


@story
def rank_0_saves(directory: Path) -> None:
    """Rank 0 alone calls what all have to call; the guard ends the run."""
    run_tracked(directory, rank_0_saves_at=4)


@story
def goes_on(directory: Path) -> None:
    """The same run, resumed, without that."""
    run_tracked(directory.with_name("rank_0_saves"), rank_0_saves_at=None)


def run_tracked(directory: Path, rank_0_saves_at: int | None) -> None:
    engine = training.new_engine(training.ds_config(2, "fp32"))
    sampler = training.new_sampler(engine)
    settings = {"hang_after": HANG_AFTER_SECONDS, "on_hang": "last-words"}
    guard = CheckpointGuard(engine, directory, save_every=1000, settings=settings)
    guard.track("sampler", sampler)
    resumed = guard.resume()
    if rank_0_saves_at is not None:
        training.train_until(engine, sampler, rank_0_saves_at)
        if dist.get_rank() == 0:
            engine.save_checkpoint(str(directory.with_name("by_hand")))
    losses = training.train_until(engine, sampler, 2 * STEPS)
    result = {"losses": losses, "fingerprint": training.fingerprint(engine)}
    guard.close()
    result["resumed"] = resumed and [resumed.step, resumed.kind]
    directory.with_suffix(f".result{dist.get_rank()}").write_text(json.dumps(result))


def main() -> None:
    training.start()
    root = Path(sys.argv[1])
    for name in sys.argv[2:]:
        STORIES[name](root / name)
        dist.barrier()
        if dist.get_rank() == 0:
            (root / name).with_suffix(".done").touch()
    training.finish()


main()
