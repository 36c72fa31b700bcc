"""A small training run with everything that a resume can get wrong, for the distributed tests.

The model has BatchNorm (buffers), dropout (random states), a tied weight and a frozen one; the config has
gradient accumulation and a scheduler; the data come from a sampler whose state is tracked.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import coverage
import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

from ds_toolkit import skip_cpu_extension_builds

WIDTH = 13
ACCUMULATION_STEPS = 2
MICRO_BATCH = 4


class SmallNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        # Running statistics stay fp32 in bf16 runs; without weights of its own it can work in fp32.
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.frozen(inputs).float()).to(inputs.dtype)
        return self.second(self.dropout(torch.tanh(self.first(hidden)))).float()


class Sampler:
    """Draws inputs and targets; its generator is apart from torch's own."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(MICRO_BATCH, WIDTH, generator=self.generator)
        return inputs.to(dtype), inputs.roll(1, dims=1)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.generator.set_state(state["generator"])


def ds_config(stage: int, precision: str, **more: object) -> dict[str, object]:
    config: dict[str, object] = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": ACCUMULATION_STEPS,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_num_steps": 4,
                "total_num_steps": 20,
                "warmup_min_lr": 0,
                "warmup_max_lr": 1e-2,
            },
        },
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
        **more,
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    return config


def start() -> None:
    """Join the process group of the launcher, on the CPU, without building anything."""
    torch.set_num_threads(1)
    skip_cpu_extension_builds()
    deepspeed.init_distributed(verbose=False)


def finish() -> None:
    """Leave with everybody, past the interpreter's own end, which may abort a run that is done."""
    deepspeed.comm.barrier()
    deepspeed.comm.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    measuring = coverage.Coverage.current()
    if measuring is not None:
        measuring.stop()
        measuring.save()
    os._exit(0)


def new_engine(config: dict[str, object], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = SmallNet()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
    # Not the same dropout on every rank.
    torch.manual_seed(100 + engine.global_rank)
    return engine


def new_sampler(engine: Any) -> Sampler:
    return Sampler(seed=1000 + engine.global_rank)


def train_until(engine: Any, sampler: Sampler, step: int) -> list[str]:
    """Train to a step; the loss of every micro-step in hexadecimal, so that not a bit is lost."""
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    losses = []
    while engine.global_steps < step:
        for _ in range(ACCUMULATION_STEPS):
            inputs, targets = sampler.draw(dtype)
            loss = nn.functional.mse_loss(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item().hex())
    return losses


def fingerprint(engine: Any, *, moments: bool = True) -> str:
    """SHA-256 over fp32 weights, Adam's moments, buffers, learning rate and counters. Collective.

    DeepSpeed can name the moments only after a step in this process.
    """
    digest = hashlib.sha256()
    for name, parameter in engine.module.named_parameters():
        values = [safe_get_full_fp32_param(parameter)] if parameter.requires_grad else []
        if not values or values[0] is None:
            with deepspeed.zero.GatheredParameters([parameter]):
                values = [parameter.detach().clone()]
        if moments and parameter.requires_grad and engine.zero_optimization():
            values += [safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq")]
        digest.update(name.encode())
        for value in values:
            digest.update(value.float().contiguous().numpy().tobytes())
    for name, buffer in engine.module.named_buffers():
        digest.update(name.encode() + buffer.float().numpy().tobytes())
    counters = (engine.global_steps, engine.global_samples, engine.skipped_steps, engine.get_lr())
    digest.update(repr(counters).encode())
    return digest.hexdigest()


def checkpoint_directory(root: Path, stage: int, precision: str) -> Path:
    return root / f"stage{stage}_{precision}"
