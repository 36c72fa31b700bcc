"""Run under torchrun by benchmarks/step_overhead.py: train, and time what the guard does after each step.

    step_overhead_worker.py STAGE STEPS DIRECTORY [PROFILE]

Each rank pauses before a step until its copying thread is idle, so that nothing is waited for. Rank 0 writes
`<directory>/result.json`, and with PROFILE (a number of lines) prints where the time goes.
"""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from torch import nn

from ds_toolkit import CheckpointGuard, skip_cpu_extension_builds
from ds_toolkit.resilience import snapshot

WIDTH = 16
# Two parameters each: a weight and a bias.
NUM_LAYERS = 150
NUM_WARM_UP = 5
IDLE_SECONDS = 0.005


class Timed(CheckpointGuard):
    """Times its own work after each step, and the copying in it apart."""

    work_seconds: list[float]
    copy_seconds = 0.0
    profile: cProfile.Profile | None = None

    def _after_step(self, step: int) -> None:
        self.copy_seconds = 0.0
        if self.profile is not None:
            self.profile.enable()
        started = time.perf_counter()
        super()._after_step(step)
        self.work_seconds.append(time.perf_counter() - started - self.copy_seconds)
        if self.profile is not None:
            self.profile.disable()


def main() -> None:
    """Train, measure, report."""
    stage, num_steps, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    skip_cpu_extension_builds()
    deepspeed.init_distributed(verbose=False)
    engine = new_engine(stage)
    guard = Timed(engine, directory / "guarded", save_every=10**6)
    guard.work_seconds = []
    guard.resume()
    time_copies(guard)
    inputs = torch.randn(1, WIDTH)
    for number in range(NUM_WARM_UP + num_steps):
        if number == NUM_WARM_UP and dist.get_rank() == 0 and len(sys.argv) > 4:
            guard.profile = cProfile.Profile()
        engine.backward(engine(inputs).square().mean())
        wait_for_copies(guard)
        engine.step()
    if guard.profile is not None:
        pstats.Stats(guard.profile).sort_stats("tottime").print_stats(int(sys.argv[4]))
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, guard.work_seconds[NUM_WARM_UP:])
    if dist.get_rank() == 0:
        num_parameters = len(list(engine.module.parameters()))
        result = {"num_parameters": num_parameters, "work_seconds": everybody}
        (directory / "result.json").write_text(json.dumps(result))
    guard.close()
    dist.barrier()
    sys.stdout.flush()
    # Past the interpreter's own end, which may abort a run that is done.
    os._exit(0)


def time_copies(guard: Timed) -> None:
    """Take the time of what is copied before a step returns."""
    copy_all = snapshot.copy_all

    def timed(*arguments: Any) -> None:
        started = time.perf_counter()
        copy_all(*arguments)
        guard.copy_seconds += time.perf_counter() - started

    snapshot.copy_all = timed


def wait_for_copies(guard: Timed) -> None:
    """Let the thread come to its end: what the fence waits for is not the guard's work."""
    if guard._background is not None:
        guard._background._standby.snapshots.fence()
    time.sleep(IDLE_SECONDS)


def new_engine(stage: int) -> Any:
    """Many small layers in fp32 with Adam."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


main()
