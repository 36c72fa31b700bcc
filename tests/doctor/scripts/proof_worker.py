"""What DeepSpeed does in scripts that the rules warn of: `proof_worker.py CASE FOLDER STAGE`, two ranks.

The rules find the cases in this very file.
"""

from __future__ import annotations

import os
import sys
import time

import deepspeed
import torch
import torch.distributed as dist

case, folder, stage = sys.argv[1], sys.argv[2], int(sys.argv[3])
deepspeed.init_distributed()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
adam = torch.optim.AdamW(model.parameters(), lr=0.1)
config = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    "checkpoint": {"tag_validation": "Fail"},
}
engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=config)
rank = dist.get_rank()


def say(*words: object) -> None:
    # In one write and on a line of its own, whatever the other rank is just printing.
    os.write(1, f"\nSAID {rank} {' '.join(map(str, words))}\n".encode())


def first_weights() -> list[float]:
    return next(model.parameters()).flatten().tolist()


def save_on_one() -> None:
    say("begins")
    if rank == 0:
        engine.save_checkpoint(folder)
        say("saved")
    # Rank 1 does nothing else meanwhile, and lives.
    time.sleep(60)


def tag_by_rank() -> None:
    engine.save_checkpoint(folder, tag=f"rank{rank}")


def optimizer_beside() -> None:
    before = first_weights()
    engine.backward(engine(torch.ones(2, 8)).mean())
    adam.step()
    say("unchanged", before == first_weights(), "steps", engine.global_steps)
    engine.backward(engine(torch.ones(2, 8)).mean())
    engine.step()
    say("unchanged", before == first_weights(), "steps", engine.global_steps)


def uneven() -> None:
    mine = list(range(5))[rank::2]
    for step, _ in enumerate(torch.utils.data.DataLoader(mine, batch_size=1)):
        say("begins", step)
        engine.backward(engine(torch.ones(2, 8)).mean())
        engine.step()
        say("ended", step)
    say("left")
    time.sleep(60)


def early_leave() -> None:
    say("begins")
    if rank != 0:
        time.sleep(60)
        return
    dist.all_reduce(torch.ones(1))
    say("reduced")


def empty_state_dict() -> None:
    torch.save(engine.module.state_dict(), f"{folder}/{rank}.pt")
    say(*(tensor.numel() for tensor in torch.load(f"{folder}/{rank}.pt", map_location="cpu").values()))


def backward_beside() -> None:
    loss = engine(torch.ones(2, 8)).mean()
    loss.backward()


def clipping() -> None:
    engine.backward(engine(torch.ones(2, 8)).mean())
    say("norm", float(torch.nn.utils.clip_grad_norm_(engine.parameters(), 1.0)))


def thrown_away() -> None:
    engine.backward(engine(torch.ones(2, 8)).mean())
    engine.zero_grad()
    engine.step()


def begun_twice() -> None:
    dist.init_process_group("gloo")


globals()[case]()
