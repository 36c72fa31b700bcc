"""A run whose every step DeepSpeed saves as well, and the slots of its snapshots beside that."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import torch
from training import ACCUMULATION_STEPS, ds_config, new_engine, new_sampler

from ds_toolkit import CheckpointGuard
from ds_toolkit.guardian.arena import Arena
from ds_toolkit.guardian.arenas import arenas_into
from ds_toolkit.guardian.control import ControlBlock, SlotState

PATIENCE_SECONDS = 20.0


def until(condition: Callable[[], object], what: str) -> None:
    """Wait for something that another process does."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {PATIENCE_SECONDS} s"
        time.sleep(0.002)


def arena_of(directory: Path) -> Arena:
    """That of the run that saves into a directory."""
    (found,) = arenas_into(directory)
    return found


class Watched:
    """A run with a guard; of each step it keeps what DeepSpeed would have saved, and what it would not."""

    def __init__(self, directory: Path, stage: int, precision: str, **arguments: Any) -> None:
        self.directory, self.elsewhere = directory, directory.with_name(f"{directory.name}_elsewhere")
        self.stage = stage
        self.engine = arguments.pop("engine", None) or new_engine(
            ds_config(stage, precision, **arguments.pop("config", {}))
        )
        self.sampler = new_sampler(self.engine)
        self.guard = CheckpointGuard(self.engine, directory, **{"save_every": 1000, **arguments})
        self.guard.track("sampler", self.sampler)
        self.resumed = self.guard.resume()
        self.own: dict[int, dict[str, Any]] = {}

    def train(self, steps: int, before_step: Callable[[], None] = lambda: None) -> None:
        """Go on for so many steps; `before_step` is called in front of each `engine.step` that is one."""
        for _ in range(steps):
            for micro_step in range(ACCUMULATION_STEPS):
                inputs, targets = self.sampler.draw(self.engine.get_data_types()[0])
                loss = torch.nn.functional.mse_loss(self.engine(inputs), targets)
                self.engine.backward(loss)
                if micro_step == ACCUMULATION_STEPS - 1:
                    before_step()
                self.engine.step()
            step = int(self.engine.global_steps)
            self.engine.save_checkpoint(str(self.elsewhere), tag=str(step))
            self.own[step] = {
                "buffers": {name: value.clone() for name, value in self.engine.module.named_buffers()},
                "random": torch.get_rng_state(),
                "tracked": {"sampler": self.sampler.state_dict()},
            }

    def settle(self) -> None:
        """Wait for the checkpoint that is being written, if there is one."""
        assert self.guard._background is not None
        self.guard._background.settle()
        dist.barrier()

    @property
    def page(self) -> ControlBlock:
        return ControlBlock(arena_of(self.directory).rank_folder(dist.get_rank()), writable=False)

    def whole_slots(self) -> list[SlotState]:
        """Once nothing is copied any more, so that they stay what they are."""
        until(lambda: not any(slot.sequence % 2 for slot in self.page.slots()), "the end of the copy")
        return [slot for slot in self.page.slots() if slot.is_whole and slot.kinds]

    def files(self, slot: SlotState) -> dict[str, Any]:
        """The content of a slot's files, by name."""
        folder = arena_of(self.directory).slot_folder(dist.get_rank(), slot.index)
        return {path.name: torch.load(path, weights_only=False) for path in folder.glob("*.pt")}

    def check_slots(self) -> list[int]:
        """Every whole slot is the checkpoint of its step; returns these steps."""
        dist.barrier()
        slots = self.whole_slots()
        with on_all_ranks():
            self.compare(slots)
        return sorted(slot.step for slot in slots)

    def compare(self, slots: list[SlotState]) -> None:
        for slot in slots:
            files = self.files(slot)
            own = files.pop(f"ds_toolkit_rank_{dist.get_rank():05d}.pt")
            expected = self.own[slot.step]
            same(own["random"]["torch"], expected["random"], f"step {slot.step}, random state")
            same(own["tracked"], expected["tracked"], f"step {slot.step}, tracked")
            for name, buffer in own["buffers"].items():
                same(buffer, expected["buffers"][name], f"step {slot.step}, buffer {name}")
            for name, content in files.items():
                path = self.elsewhere / str(slot.step) / name
                same(content, torch.load(path, weights_only=False), f"step {slot.step}, {name}")
            # At stage 0 one rank of a node keeps what all have alike.
            assert files or (self.stage == 0 and dist.get_rank() > 0)


@contextlib.contextmanager
def on_all_ranks() -> Iterator[None]:
    """What fails on one rank fails on all, so that none waits for another."""
    failure = None
    try:
        yield
    except AssertionError:
        # The whole story: an assertion that says nothing has an empty text.
        failure = traceback.format_exc()
    failures: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    assert not any(failures), "\n".join(filter(None, failures))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes: what is no number is equal to nothing, itself included."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same(one: Any, other: Any, place: str) -> None:
    """Nothing differs between two contents of a checkpoint file, not a bit and not a type."""
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, place
        assert one.shape == other.shape, place
        differs = bits(one) != bits(other)
        where = differs.nonzero().flatten().tolist()
        assert not where, (
            f"{place}: {len(where)} bytes of {len(differs)} differ, from {where[0]} to {where[-1]}"
        )
    elif isinstance(one, dict):
        assert type(one) is type(other), place
        assert list(one) == list(other), f"{place}: {list(one)}, and not {list(other)}"
        for key in one:
            same(one[key], other[key], f"{place}[{key!r}]")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), place
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            same(left, right, f"{place}[{index}]")
    elif type(one).__module__.startswith("deepspeed"):
        assert type(one) is type(other), place
        same(vars(one), vars(other), place)
    else:
        assert type(one) is type(other), place
        assert one == other, f"{place}: {one!r}, and not {other!r}"
