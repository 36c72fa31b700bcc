"""Run under torchrun: `straight` trains 12 steps and, apart, 6 with a save; `resumed` does the other 6."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import deepspeed
from training import (
    checkpoint_directory,
    ds_config,
    fingerprint,
    finish,
    new_engine,
    new_sampler,
    start,
    train_until,
)

from ds_toolkit import CheckpointGuard

LAYOUTS = [(stage, precision) for stage in (0, 1, 2, 3) for precision in ("fp32", "bf16")]


def main() -> None:
    mode, root = sys.argv[1], Path(sys.argv[2])
    start()
    results = {}
    for stage, precision in LAYOUTS:
        name = f"stage{stage}_{precision}"
        directory = checkpoint_directory(root, stage, precision)
        config = ds_config(stage, precision, ds_toolkit={"snapshot_every": 0})
        if mode == "straight":
            engine = new_engine(config)
            losses = train_until(engine, new_sampler(engine), 12)
            results[name] = {"losses": losses, "fingerprint": fingerprint(engine)}
            engine = new_engine(config)
            sampler = new_sampler(engine)
            with CheckpointGuard(
                engine,
                directory,
                save_every=3,
                client_state=lambda engine=engine: {"epoch": engine.global_steps},
            ) as guard:
                guard.track("sampler", sampler)
                assert guard.resume() is None
                results[name]["first_losses"] = train_until(engine, sampler, 6)
                # Saved on schedule, by the hook alone, and counted in optimizer steps.
                assert [saved.step for saved in guard.saved] == [3, 6], guard.saved
        else:
            # Another seed: everything that counts must come from the checkpoint.
            engine = new_engine(config, seed=99)
            sampler = new_sampler(engine)
            sampler.draw(engine.get_data_types()[0])
            with CheckpointGuard(engine, directory, save_every=3) as guard:
                guard.track("sampler", sampler)
                resumed = guard.resume()
                assert resumed is not None
                assert (resumed.tag, resumed.step, resumed.kind) == ("global_step6", 6, "periodic")
                assert resumed.client_state == {"epoch": 6}, resumed.client_state
                results[name] = {
                    "losses": train_until(engine, sampler, 12),
                    "fingerprint": fingerprint(engine),
                }
    path = root / f"{mode}_rank{deepspeed.comm.get_rank()}.json"
    path.write_text(json.dumps(results))
    finish()


main()
