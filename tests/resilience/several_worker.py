"""Run under torchrun: engines of several kinds in one process, a guard and a directory each, trained in turn.

    several_worker.py killed ROOT      begins, and waits a little before each step, to be killed
    several_worker.py resumed ROOT     trains all without guards, then resumes what was killed

Each rank writes `<ROOT>/resumed_rank<R>.json`: by kind the losses and a fingerprint of both runs.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from training import SmallNet, ds_config, fingerprint, finish, new_sampler, start, train_until

from ds_toolkit import CheckpointGuard

STEPS = 8
PAUSE_SECONDS = 0.05
# Of torch's own backends one that traces forward and backward, and needs no compiler.
BACKEND = "aot_eager"
# DeepSpeed's stage 3 takes no module that was compiled before (0.19.8).
STAGES = {"plain": 1, "file-backed": 2, "compiled-engine": 3, "compiled-module": 2}
_LINEAR = torch.nn.functional.linear


def new_engine(kind: str, root: Path, seed: int) -> Any:
    torch.manual_seed(seed)
    model: Any = SmallNet()
    if kind == "compiled-module":
        model = torch.compile(model, backend=BACKEND)
    section = {"arena": str(root / "arena")} if kind == "file-backed" else {}
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
        config=ds_config(STAGES[kind], "fp32", ds_toolkit=section),
    )
    if kind == "compiled-engine":
        engine.compile(backend=BACKEND)
    return engine


def num_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def run(root: Path, *, guarded: bool, seed: int, pause_seconds: float = 0.0) -> dict[str, dict[str, Any]]:
    """Train all kinds to the end, one step of each in turn."""
    # DeepSpeed's stage 3 puts its own in place for the rest of the process; the last bit differs.
    torch.nn.functional.linear = _LINEAR
    torch._dynamo.reset()
    engines = {kind: new_engine(kind, root, seed) for kind in STAGES}
    torch.manual_seed(100 + dist.get_rank())
    samplers = {kind: new_sampler(engine) for kind, engine in engines.items()}
    found: dict[str, dict[str, Any]] = {kind: {"losses": [], "graphs": 0} for kind in STAGES}
    guards = []
    for kind in STAGES if guarded else ():
        guard = CheckpointGuard(engines[kind], root / kind, save_every=1000)
        guard.track("sampler", samplers[kind])
        resumed = guard.resume()
        found[kind]["resumed"] = resumed and [resumed.kind, resumed.step]
        guards.append(guard)
    for step in range(1, STEPS + 1):
        for kind, engine in engines.items():
            time.sleep(pause_seconds)
            before = num_graphs()
            found[kind]["losses"] += train_until(engine, samplers[kind], step)
            found[kind]["graphs"] += num_graphs() - before
    for kind, engine in engines.items():
        found[kind]["fingerprint"] = fingerprint(engine)
    for guard in guards:
        guard.close()
    return found


def main() -> None:
    mode, root = sys.argv[1], Path(sys.argv[2])
    start()
    if mode == "killed":
        run(root, guarded=True, seed=0, pause_seconds=PAUSE_SECONDS)
    else:
        results = {"straight": run(root, guarded=False, seed=0)}
        # Another seed: everything that counts must come from the checkpoints.
        results["resumed"] = run(root, guarded=True, seed=99)
        (root / f"resumed_rank{dist.get_rank()}.json").write_text(json.dumps(results))
    finish()


main()
