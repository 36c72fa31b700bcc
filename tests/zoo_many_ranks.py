"""The models of tests/zoo.py on more ranks than are worth a process each that starts from nothing.

    python tests/zoo_many_ranks.py FOLDER

The ranks are forked after DeepSpeed was imported once.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import deepspeed
import torch.distributed as dist
import zoo

CASES = {
    5: [zoo.Case("stage1-bf16-5ranks", 1, bf16=True)],
    12: [zoo.Case("stage3-bf16-12ranks", 3, bf16=True)],
}


def be_rank(rank: int, world_size: int, port: int, folder: Path) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for case in CASES[world_size]:
        if rank == 0:
            (folder / case.name).mkdir(parents=True)
        dist.barrier()
        zoo.make(case, folder / case.name)
    dist.barrier()
    dist.destroy_process_group()


def run(world_size: int, folder: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                be_rank(rank, world_size, port, folder)
                code = 0
            except Exception as error:
                print(f"rank {rank}: {error!r}", file=sys.stderr)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    if any(os.waitpid(child, 0)[1] for child in children):
        raise SystemExit(f"a rank of {world_size} failed")


if __name__ == "__main__":
    for num_ranks in CASES:
        run(num_ranks, Path(sys.argv[1]))
