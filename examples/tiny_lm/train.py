"""Train the tiny language model with DeepSpeed, with a CheckpointGuard attached.

    deepspeed --num_gpus 2 train.py --config ds_config.json --run-dir runs/tiny_lm --steps 120

Killed at any moment and started again with the same command, it continues from the newest whole checkpoint.
`--kill-at-step` plants such a death: one rank sends itself SIGKILL in the middle of a step, in a run that
began from nothing, so that the same command continues past it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
from model import CONTEXT, VOCABULARY, TinyLM
from torch.nn import functional

from ds_toolkit import CheckpointGuard, skip_cpu_extension_builds

TEXT = Path(__file__).with_name("text.txt")


class RandomWindows:
    """Endless batches of windows of a text, drawn by a generator whose state can be saved."""

    def __init__(self, text: bytes, batch_size: int, seed: int) -> None:
        self.data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.batch_size = batch_size
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self) -> torch.Tensor:
        """Tokens (batch, CONTEXT + 1): inputs and, one further, targets."""
        starts = torch.randint(len(self.data) - CONTEXT, (self.batch_size,), generator=self.generator)
        return torch.stack([self.data[start : start + CONTEXT + 1] for start in starts.tolist()])

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.generator.set_state(state["generator"])


def main() -> None:
    arguments = parse_arguments()
    skip_cpu_extension_builds()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = TinyLM(dropout=0.05)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=str(arguments.config)
    )
    windows = RandomWindows(
        TEXT.read_bytes(), engine.train_micro_batch_size_per_gpu(), seed=1 + engine.global_rank
    )
    with CheckpointGuard(engine, arguments.run_dir / "checkpoints", save_every=arguments.save_every) as guard:
        guard.track("windows", windows)
        resumed = guard.resume()
        train(engine, windows, guard, arguments, may_die=resumed is None)
    deepspeed.comm.barrier()
    deepspeed.comm.destroy_process_group()


def train(
    engine: Any, windows: RandomWindows, guard: CheckpointGuard, arguments: argparse.Namespace, may_die: bool
) -> None:
    """The usual loop; every step leaves a line in `steps.jsonl`."""
    run = {"started": time.time(), "resumed_at": engine.global_steps}
    with (arguments.run_dir / "steps.jsonl").open("a") as log:
        while engine.global_steps < arguments.steps:
            started_seconds = time.perf_counter()
            stalled_seconds = guard.stall_seconds
            tokens = windows.draw().to(engine.device)
            logits = engine(tokens[:, :-1])
            loss = functional.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))
            if may_die and (engine.global_rank, engine.global_steps) == (
                arguments.kill_rank,
                arguments.kill_at_step,
            ):
                os.kill(os.getpid(), signal.SIGKILL)
            engine.backward(loss)
            engine.step()
            if engine.global_rank == 0:
                line = {
                    "step": engine.global_steps,
                    "loss": round(loss.item(), 4),
                    "step_seconds": time.perf_counter() - started_seconds,
                    "stall_seconds": guard.stall_seconds - stalled_seconds,
                }
                log.write(json.dumps(run | line) + "\n")
                log.flush()
                if engine.global_steps % 10 == 0:
                    print(f"step {line['step']:4d}  loss {line['loss']:.3f}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="the ds_config")
    parser.add_argument("--run-dir", type=Path, required=True, help="where checkpoints and the log go")
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps in all")
    parser.add_argument("--save-every", type=int, default=20, help="steps between two checkpoints")
    parser.add_argument("--kill-at-step", type=int, help="after how many steps a rank dies")
    parser.add_argument("--kill-rank", type=int, default=1, help="the rank that dies")
    parser.add_argument("--local_rank", type=int, default=0, help="given by the launcher")
    return parser.parse_args()


if __name__ == "__main__":
    main()
