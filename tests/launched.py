"""An unmodified training script (tests/integrations/plain_script.py) under `ds_toolkit.launch`."""

from __future__ import annotations

import json
import os
from typing import Any

import jobs
import psutil

PLAIN_SCRIPT = jobs.REPOSITORY / "tests" / "integrations" / "plain_script.py"
DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
    "ds_toolkit": {"save_every": 4},
}


def torchrun_launch(*arguments: str | os.PathLike[str], num_ranks: int = 2) -> list[str | os.PathLike[str]]:
    """`ds_toolkit.launch` under torchrun, with a free port."""
    launcher = [jobs.BIN / "torchrun", "--standalone", f"--nproc_per_node={num_ranks}"]
    return [*launcher, "-m", "ds_toolkit.launch", *arguments]


def deepspeed_launch(*arguments: str | os.PathLike[str], num_ranks: int = 2) -> list[str | os.PathLike[str]]:
    """`ds_toolkit.launch` under DeepSpeed's own launcher, with a free port."""
    launcher = [jobs.BIN / "deepspeed", f"--num_gpus={num_ranks}", f"--master_port={jobs.free_port()}"]
    return [*launcher, "--module", "ds_toolkit.launch", *arguments]


def seen_by(finished: jobs.Finished) -> list[dict[str, Any]]:
    """What the script printed of itself when its training loop had ended, once a start."""
    lines = [line.removeprefix("SEEN ") for line in finished.output.splitlines() if line.startswith("SEEN ")]
    return [json.loads(line) for line in lines]


def rank_process(launcher: int, rank: int) -> int:
    """Process id of a rank below a launcher."""
    found = [
        process.pid
        for process in psutil.Process(launcher).children(recursive=True)
        if process.environ().get("RANK") == str(rank) and PLAIN_SCRIPT.name in " ".join(process.cmdline())
    ]
    # A rank may have children (a shell of some library); it is the eldest.
    return min(found)
