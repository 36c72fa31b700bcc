"""A training script as people write it, which knows nothing of the toolkit.

    plain_script.py --deepspeed_config FILE --steps N [--engines N] [--end return|destroy|exit3]
                    [--step-seconds SECONDS]

Prints `SEEN {...}` on rank 0: its arguments, how it was run, and the loss of every step.
"""

import argparse
import json
import os
import pickle
import sys
import time

import plain_model  # lies beside it
import torch
from deepspeed import initialize
from torch import distributed


class OfThisScript:
    """Can be pickled only while `__main__` is the script."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=None)
    parser.add_argument("--deepspeed_config")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--end", default="return")
    parser.add_argument("--step-seconds", type=float, default=0.0)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = plain_model.PlainModel()
    engine, optimizer, _, _ = initialize(args=arguments, model=model, model_parameters=model.parameters())
    assert optimizer is engine.optimizer
    others = []
    for _ in range(1, arguments.engines):
        other_model = plain_model.PlainModel()
        other, *_ = initialize(args=arguments, model=other_model, model_parameters=other_model.parameters())
        others.append(other)
    generator = torch.Generator().manual_seed(engine.global_rank)
    first, losses = engine.global_steps, []
    while engine.global_steps < arguments.steps:
        inputs = torch.randn(4, plain_model.WIDTH, generator=generator)
        for trained in (engine, *others):
            loss = trained(inputs).square().mean()
            trained.backward(loss)
            trained.step()
        losses.append(loss.item())
        time.sleep(arguments.step_seconds)
    if engine.global_rank == 0:
        seen = {
            "argv": sys.argv,
            "file": __file__,
            "main": sys.modules["__main__"].__dict__ is globals(),
            "pickle": len(pickle.dumps(OfThisScript())) > 0,
            "path": sys.path[0],
            "from_file": os.environ.get("OF_THE_FILE"),
            "first": first,
            "last": engine.global_steps,
            "losses": losses,
        }
        print("\nSEEN " + json.dumps(seen), flush=True)
    if arguments.end == "destroy":
        distributed.destroy_process_group()
    elif arguments.end == "exit3":
        sys.exit(3)


if __name__ == "__main__":
    main()
