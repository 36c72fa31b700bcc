"""Runs configurations in real engines of one rank: JSON on standard input, JSON on standard output.

A case holds a `config`, how many `steps` to make, and whether a falling value is given as `metrics` at each.
The answer holds what stopped the engine, or the learning rate and the betas after each step.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from typing import Any

import deepspeed
import torch
from deepspeed.utils import logger


def outcome(case: dict[str, Any]) -> dict[str, Any]:
    model = torch.nn.Linear(4, 4)
    # The same that a script would pass where the configuration has no optimizer.
    own = None if "optimizer" in case["config"] else torch.optim.AdamW(model.parameters(), lr=0.1)
    rates: list[float] = []
    betas: list[Any] = []
    try:
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), optimizer=own, config=case["config"]
        )
        for step in range(case["steps"]):
            inputs = torch.ones(1, 4, dtype=next(engine.module.parameters()).dtype)
            engine.backward(engine(inputs).float().pow(2).sum())
            engine.step(lr_kwargs={"metrics": -float(step)} if case["metrics"] else None)
            rates.append(engine.get_lr()[0])
            betas.append(engine.basic_optimizer.param_groups[0].get("betas"))
    except Exception as error:
        return {"stopped": f"{type(error).__name__}: {error}", "rates": rates, "betas": betas}
    return {"stopped": None, "rates": rates, "betas": betas}


def main() -> None:
    warnings.simplefilter("ignore")
    logger.disabled = True
    # Compiled for every first run, and of no use to one rank.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    cases = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        deepspeed.init_distributed("gloo", verbose=False)
        outcomes = [outcome(case) for case in cases]
    print(json.dumps(outcomes), flush=True)
    torch.distributed.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
