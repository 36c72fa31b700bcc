"""A training run for tests that do something to it from outside.

    simple_worker.py DIRECTORY STEPS SAVE_EVERY [--big] [--no-close] [--no-skip] [--snapshots]
        [--arena=FOLDER] [--set-clock]

Prints a JSON line at the end: how it resumed, the losses, a fingerprint.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from training import ds_config, fingerprint, finish, new_engine, new_sampler, start, train_until

from ds_toolkit import CheckpointGuard
from ds_toolkit.guardian import client


def main() -> None:
    # DeepSpeed's launcher puts --local_rank first.
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    directory, steps = Path(words[0]), int(words[1])
    save_every: int | str = int(words[2]) if words[2].isdecimal() else words[2]
    if "--set-clock" in sys.argv:
        pass_the_clock_on()
    if "--no-skip" in sys.argv:
        torch.set_num_threads(1)
        deepspeed.init_distributed(verbose=False)
    else:
        start()
    section: dict[str, object] = {"snapshot_every": int("--snapshots" in sys.argv)}
    for word in sys.argv:
        if word.startswith("--arena="):
            section["arena"] = word.partition("=")[2]
    engine = new_engine(ds_config(2, "fp32", ds_toolkit=section))
    sampler = new_sampler(engine)
    if "--big" in sys.argv:
        track_something_big(engine, sampler)
    guard = CheckpointGuard(engine, directory, save_every=save_every)
    guard.track("sampler", sampler)
    resumed = guard.resume()
    losses = train_until(engine, sampler, steps)
    if "--no-close" in sys.argv:
        sys.exit(0)
    guard.close()
    report = {
        "resumed": resumed and resumed.step,
        "kind": resumed and resumed.kind,
        "losses": losses,
        "fingerprint": fingerprint(engine),
    }
    if deepspeed.comm.get_rank() == 0:
        print("\n" + json.dumps(report), flush=True)
    finish()


def pass_the_clock_on() -> None:
    """To the guardian, which otherwise inherits little."""
    client._PASSED_ON = (*client._PASSED_ON, "LD_PRELOAD", "SET_CLOCK_FILE")


def track_something_big(engine: Any, sampler: Any) -> None:
    """Make each checkpoint several megabytes a rank, so that writing one takes a while and some space."""
    payload = torch.arange(1_000_000, dtype=torch.float32)
    of_its_own = sampler.state_dict
    sampler.state_dict = lambda: {**of_its_own(), "payload": payload}


main()
