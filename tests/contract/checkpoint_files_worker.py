"""Saves and loads one small engine a case; prints which files each save wrote and each load opened.

    torchrun --nproc_per_node 4 tests/contract/checkpoint_files_worker.py FOLDER CASES

CASES is a JSON list of objects with `stage`, `hpz`, `ep` (0 for a model without experts) and `pp`; the
answers are in FOLDER/files.json. Groups of experts live as long as the process, and DeepSpeed goes by the
largest: `ep` must not fall.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.utils import logger
from torch import nn

WIDTH = 4


class OneExpertLayer(nn.Module):
    def __init__(self, ep: int) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.moe = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=2 * ep, ep_size=ep)


def model_of(case: dict[str, Any]) -> nn.Module:
    if case["pp"] > 1:
        layers = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(case["pp"])]
        return PipelineModule(layers, num_stages=case["pp"], loss_fn=nn.functional.mse_loss)
    return OneExpertLayer(case["ep"]) if case["ep"] else nn.Linear(WIDTH, WIDTH)


def engine_of(case: dict[str, Any]) -> Any:
    model = model_of(case)
    parameters: Any = list(model.parameters())
    if case["ep"]:
        parameters = split_params_into_different_moe_groups_for_optimizer(
            {"params": parameters, "name": "parameters"}
        )
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": case["stage"], "zero_hpz_partition_size": case["hpz"]},
    }
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(parameters),
        config={**config, "zero_allow_untested_optimizer": True},
    )
    return engine


def files_of(case: dict[str, Any], folder: Path) -> dict[str, list[str]]:
    engine = engine_of(case)
    engine.save_checkpoint(str(folder), tag="tag")
    opened: set[str] = set()
    load = engine.checkpoint_engine.load

    def recorded(path: str, *arguments: Any, **options: Any) -> Any:
        opened.add(Path(path).name)
        return load(path, *arguments, **options)

    engine.checkpoint_engine.load = recorded
    engine.load_checkpoint(str(folder), tag="tag")
    of_all_ranks: list[set[str]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_all_ranks, opened)
    written = [path.name for path in (folder / "tag").iterdir()]
    engine.destroy()
    return {"written": sorted(written), "opened": sorted(set.union(*of_all_ranks))}


def main() -> None:
    warnings.simplefilter("ignore")
    logger.disabled = True
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    folder = Path(sys.argv[1])
    deepspeed.init_distributed("gloo", verbose=False)
    files = [files_of(case, folder / str(number)) for number, case in enumerate(json.loads(sys.argv[2]))]
    if dist.get_rank() == 0:
        (folder / "files.json").write_text(json.dumps(files))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
