"""Run under torchrun by benchmarks/stall.py: train and time each step, with checkpoints of one kind.

    stall_worker.py MODE STAGE STEPS DIRECTORY

MODE is `none`, `deepspeed` (`engine.save_checkpoint` every step), `snapshots` (a snapshot every step, a save
every 10), `saves` (a snapshot and a save every 10 steps). Rank 0 writes `<directory>/result.json`.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from torch import nn

from ds_toolkit import CheckpointGuard, skip_cpu_extension_builds

WIDTH = 2000
NUM_LAYERS = 4
ROWS = 160
SAVE_EVERY = 10
NUM_WARM_UP = 3


class Net(nn.Module):
    """16 million parameters, and batches large enough that a step takes most of a second."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        return inputs


def main() -> None:
    """Train, measure, report."""
    mode, stage, num_steps, directory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    skip_cpu_extension_builds()
    deepspeed.init_distributed(verbose=False)
    torch.manual_seed(0)
    engine = new_engine(stage)
    guard = guard_for(mode, engine, directory)
    inputs = torch.randn(ROWS, WIDTH)
    step_seconds, save_seconds = [], []
    for number in range(NUM_WARM_UP + num_steps):
        dist.barrier()
        started = time.perf_counter()
        engine.backward(engine(inputs).square().mean())
        engine.step()
        if mode == "deepspeed":
            before = time.perf_counter()
            engine.save_checkpoint(str(directory / "deepspeed"))
            save_seconds.append(time.perf_counter() - before)
        if number >= NUM_WARM_UP:
            step_seconds.append(time.perf_counter() - started)
    result = {
        "step_seconds": step_seconds,
        "save_seconds": save_seconds[NUM_WARM_UP:],
        **(measured_by(guard) if guard is not None else {}),
    }
    if guard is not None:
        guard.close()
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, result)
    if dist.get_rank() == 0:
        (directory / "result.json").write_text(json.dumps(everybody))
    dist.barrier()
    # Past the interpreter's own end, which may abort a run that is done.
    os._exit(0)


def new_engine(stage: int) -> Any:
    """Plain fp32 with Adam."""
    model = Net()
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def guard_for(mode: str, engine: Any, directory: Path) -> CheckpointGuard | None:
    """The guard that the mode asks for."""
    if mode not in ("snapshots", "saves"):
        return None
    snapshot_every = 1 if mode == "snapshots" else SAVE_EVERY
    guard = CheckpointGuard(
        engine,
        directory / "guarded",
        save_every=SAVE_EVERY,
        settings={"snapshot_every": snapshot_every, "keep_last": 1},
    )
    guard.resume()
    return guard


def measured_by(guard: CheckpointGuard) -> dict[str, Any]:
    """What each snapshot cost, and what copying the same bytes costs."""
    background = guard._background
    assert background is not None
    snapshots = background._standby.snapshots
    stalls = list(snapshots.stalls_seconds)
    sources = [storage for file in snapshots._sources._files.values() for storage in file.storages]
    targets = [torch.empty_like(source) for source in sources]
    times = []
    for _ in range(6):
        started = time.perf_counter()
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        times.append(time.perf_counter() - started)
    return {
        "stall_seconds": stalls[1:],
        "first_stall_seconds": stalls[0] if stalls else None,
        "state_bytes": sum(source.nbytes for source in sources),
        # The first touches pages that nobody has touched.
        "memcpy_seconds": statistics.median(times[1:]),
        "copy_seconds": snapshots.copy_seconds / max(1, snapshots.num_taken),
    }


main()
