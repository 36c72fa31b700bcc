"""Run under torchrun: in every layout of the checkpoint zoo, a snapshot against what DeepSpeed saves.

Each engine of the zoo gets a guard as soon as it is made, and trains. Where the zoo saves it, the files in
this rank's newest slot are compared with those that `engine.save_checkpoint` writes, bit by bit. Results are
in `<root>/results_rank<R>.json`: for each case what was compared, or a traceback.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.runtime.pipe.engine import PipelineEngine

sys.path.insert(0, str(Path(__file__).parents[1]))

import zoo
import zoo_layouts
from comparing import same
from training import finish, start

from ds_toolkit import CheckpointGuard
from ds_toolkit.guardian.arena import read_contents
from ds_toolkit.resilience.standby import Standby

SAVED_BY_HAND = {"note", "path", "settings"}


class ComparedError(Exception):
    """The zoo wanted to save; it has been compared instead."""


def guarded(root: Path, found: dict[str, Any]) -> Any:
    """`deepspeed.initialize`, whose engine has a guard and compares when it is told to save."""
    initialize = deepspeed.initialize

    def initialize_guarded(*args: Any, **kwargs: Any) -> Any:
        made = initialize(*args, **kwargs)
        engine = made[0]
        guard = CheckpointGuard(engine, root / "guarded", save_every="1h")
        save_checkpoint = type(engine).save_checkpoint

        def compare_instead(*_: object, **__: object) -> None:
            save_checkpoint(engine, str(root / "saved"))
            dist.barrier()
            found.update(compared(engine, guard, root / "saved"))
            raise ComparedError

        engine.save_checkpoint = compare_instead
        found["guard"] = guard
        return made

    return initialize_guarded


def compared(engine: Any, guard: CheckpointGuard, saved: Path) -> dict[str, Any]:
    standby = guard._background._standby  # type: ignore[union-attr]
    assert isinstance(standby, Standby)
    standby.snapshots.fence()
    control = standby._control
    newest = max((slot for slot in control.slots() if slot.is_whole), key=lambda slot: slot.step)
    assert newest.step == engine.global_steps
    folder = standby._arena.slot_folder(control.rank, newest.index)
    names = [file.name for file in read_contents(folder) if not file.name.startswith("ds_toolkit_")]
    tag = saved / (saved / "latest").read_text()
    num_tensors = 0
    for name in names:
        mine = torch.load(folder / name, weights_only=False)
        theirs = torch.load(tag / name, weights_only=False)
        num_tensors += same(mine, theirs, (name,), {} if dist.get_rank() == 0 else rank_specific(engine))
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, names)
    given = {name for of_rank in everybody for name in of_rank}
    assert given == {path.name for path in tag.iterdir()}, "the slots hold other files than DeepSpeed saves"
    return {"names": names, "num_tensors": num_tensors, "steps": newest.step}


def rank_specific(engine: Any) -> dict[str, torch.Tensor]:
    """Buffers of this rank, which a model file of another rank cannot hold."""
    return {} if isinstance(engine, PipelineEngine) else dict(engine.module.named_buffers())


def cases() -> list[tuple[str, Any]]:
    world_size = dist.get_world_size()
    plain = [
        (case.name, lambda folder, case=case: zoo.make(case, folder))
        for case in zoo.cases(world_size)
        # What a save leaves out on demand, a snapshot has; and another seed is no other layout.
        if not case.exclude_frozen and case.seed == 1
    ]
    pipelines_last = sorted(zoo_layouts.cases(world_size), key=lambda case: case.num_stages)
    return plain + [
        (
            case.name,
            lambda folder, case=case: (
                zoo_layouts.make_pipeline if case.num_stages else zoo_layouts.make_mixture
            )(case, folder),
        )
        for case in pipelines_last
    ]


def main() -> None:
    root = Path(sys.argv[1])
    start()
    results: dict[str, Any] = {}
    initialize = deepspeed.initialize
    for name, make in cases():
        found: dict[str, Any] = {}
        deepspeed.initialize = guarded(root / name, found)
        try:
            make(root / name)
        except ComparedError:
            found.pop("guard").close()
            results[name] = found
        except Exception:
            print(f"{name} failed on rank {dist.get_rank()}", traceback.format_exc(), flush=True)
            results[name] = {"failed": traceback.format_exc()}
        deepspeed.initialize = initialize
    (root / f"results_rank{dist.get_rank()}.json").write_text(json.dumps(results))
    finish()


main()
