"""Run under torchrun: scenarios of snapshots and of the guardian (tests/resilience/scenario.py).

What a slot must hold is not asked of the toolkit: DeepSpeed's own `save_checkpoint` writes the same step into
another directory, and the files are compared leaf by leaf.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from scenario import on_rank_0, run_all, said, scenario
from training import (
    ACCUMULATION_STEPS,
    ds_config,
    fingerprint,
    new_engine,
    new_sampler,
    train_until,
)
from watched import PATIENCE_SECONDS, Watched, arena_of, on_all_ranks, same, until

from ds_toolkit.checkpoint.manifest import Manifest
from ds_toolkit.checkpoint.verify import verify_crcs
from ds_toolkit.guardian.arenas import arenas_into
from ds_toolkit.guardian.processes import is_alive
from ds_toolkit.resilience import copying_thread

LAYOUTS = [(stage, precision) for stage in (0, 1, 2, 3) for precision in ("fp32", "bf16")]


@contextlib.contextmanager
def held_copies() -> Iterator[threading.Event]:
    """Copies of the thread begin when the event is set, once for each time."""
    gate, original = threading.Event(), copying_thread.copy_all

    def copy_all(batches: Any) -> None:
        assert gate.wait(PATIENCE_SECONDS), "nobody opened the gate"
        gate.clear()
        original(batches)

    copying_thread.copy_all = copy_all  # type: ignore[assignment]
    try:
        yield gate
    finally:
        copying_thread.copy_all = original
        gate.set()


def open_soon(gate: threading.Event) -> None:
    """Later than an optimizer step that waits for nothing takes."""
    timer = threading.Timer(0.25, gate.set)
    timer.daemon = True
    timer.start()


@scenario
def slots_hold_what_deepspeed_would_have_saved(directory: Path) -> None:
    for stage, precision in LAYOUTS:
        run = Watched(directory / f"stage{stage}_{precision}", stage, precision)
        for step in range(1, 6):
            run.train(1)
            assert step in run.check_slots(), f"stage {stage}, {precision}: no slot of step {step}"
        run.guard.close()


@scenario
def slots_of_the_state_before_a_load_are_void(directory: Path) -> None:
    """A rank that dies after going back must not be continued from where it came from."""
    run = Watched(directory, 2, "fp32", save_every=2)
    run.train(5)
    assert max(run.check_slots()) == 5
    run.engine.load_checkpoint(str(run.elsewhere), tag="3")
    assert run.whole_slots() == []
    run.train(1)
    assert run.check_slots() == [4]
    run.guard.close()


@scenario
def micro_steps_are_not_counted_as_steps(directory: Path) -> None:
    run = Watched(directory, 2, "fp32", save_every=2)
    run.train(3)
    run.settle()
    inputs, targets = run.sampler.draw(torch.float32)
    run.engine.backward(torch.nn.functional.mse_loss(run.engine(inputs), targets))
    run.engine.step()
    slots = run.whole_slots()
    # One snapshot a step, and none of the micro-step: the sequence changes twice for each.
    assert sorted(slot.step for slot in slots) == [1, 2, 3]
    assert sum(slot.sequence for slot in slots) == 2 * 3
    assert run.page.step == 3
    run.settle()
    assert Manifest.read(directory / "global_step2").step == 2
    inputs, targets = run.sampler.draw(torch.float32)
    run.engine.backward(torch.nn.functional.mse_loss(run.engine(inputs), targets))
    run.engine.step()
    run.guard.close()


@scenario
def the_learning_rate_after_a_resume(directory: Path) -> None:
    for stage in (0, 1, 2, 3):
        place = directory / str(stage)
        straight = new_engine(ds_config(stage, "bf16"))
        losses = train_until(straight, new_sampler(straight), 5)
        run = Watched(place, stage, "bf16", save_every=3)
        run.train(3)
        rates = run.engine.get_lr()
        assert rates[0] > 0
        run.guard.close()
        assert [saved.in_background for saved in run.guard.saved] == [True]
        run = Watched(place, stage, "bf16")
        assert run.resumed is not None
        assert run.engine.get_lr() == rates
        assert [group["lr"] for group in run.engine.optimizer.param_groups] == rates
        assert train_until(run.engine, run.sampler, 5) == losses[-2 * ACCUMULATION_STEPS :]
        assert fingerprint(run.engine) == fingerprint(straight)
        run.guard.close()


@scenario
def counters_and_the_loss_scaler_come_back(directory: Path) -> None:
    accelerator = get_accelerator()
    fp16 = {"enabled": True, "initial_scale_power": 17, "loss_scale_window": 2, "hysteresis": 1}
    accelerator.is_fp16_supported = lambda: True
    try:
        for stage in (1, 2, 3):
            place = directory / str(stage)
            run = Watched(place, stage, "fp32", save_every=1, config={"fp16": fp16})
            # The first scale is too large: steps are skipped, then the scale grows again.
            run.train(7)
            run.settle()
            run.train(1)
            engine = run.engine
            assert 0 < engine.skipped_steps < 6
            counted = (engine.global_steps, engine.global_samples, engine.skipped_steps)
            scaler = dict(vars(engine.optimizer.loss_scaler))
            run.guard.close()
            assert run.guard.saved[-1].in_background
            resumed = Watched(place, stage, "fp32", config={"fp16": {**fp16, "initial_scale_power": 4}})
            assert resumed.resumed is not None
            engine = resumed.engine
            assert counted == (engine.global_steps, engine.global_samples, engine.skipped_steps)
            assert dict(vars(engine.optimizer.loss_scaler)) == scaler
            resumed.guard.close()
    finally:
        del accelerator.is_fp16_supported


@scenario
def adams_step_is_not_aliased_by_the_snapshot(directory: Path) -> None:
    """Adam counts in a tensor that it changes in place: a slot of step 2 must say 2 when the run is at 4."""
    for stage in (0, 1, 2, 3):
        run = Watched(directory / str(stage), stage, "fp32")
        run.train(4)
        seen = {}
        for slot in run.whole_slots():
            for name, content in run.files(slot).items():
                state = content.get("optimizer_state_dict") or content.get("optimizer")
                if state is not None and "ds_toolkit" not in name:
                    inner = state.get("base_optimizer_state", state)
                    inner = inner.get("optimizer_state_dict", inner) if stage == 3 else inner
                    inner = state["optimizer_state_dict"] if stage == 3 else inner
                    states = inner["state"] if isinstance(inner, dict) else dict(enumerate(inner))
                    seen[slot.step] = {float(value["step"]) for value in states.values() if "step" in value}
        if stage != 0 or dist.get_rank() == 0:
            assert seen == {step: {float(step)} for step in seen}, f"stage {stage}: {seen}"
            assert len(seen) >= 3, f"stage {stage}: {seen}"
        run.guard.close()


@scenario
def no_snapshot_repeats_the_first_weights(directory: Path) -> None:
    """A structure that is learned once is filled anew at every step."""
    for stage, precision in LAYOUTS:
        run = Watched(directory / f"stage{stage}_{precision}", stage, precision, save_every=2, keep_last=9)
        weights = []
        for _ in range(3):
            run.train(2)
            run.settle()
            weights.append(fingerprint(run.engine, moments=False))
        run.guard.close()
        assert len(set(weights)) == 3
        assert [saved.step for saved in run.guard.saved if saved.in_background] == [2, 4, 6]
        for saved in run.guard.saved:
            for path in (directory / f"stage{stage}_{precision}" / saved.tag).glob("*_states.pt"):
                expected = torch.load(run.elsewhere / str(saved.step) / path.name, weights_only=False)
                same(torch.load(path, weights_only=False), expected, f"{saved.tag}/{path.name}")


@scenario
def latest_never_moves_to_what_was_not_written(directory: Path) -> None:
    run = Watched(directory, 2, "fp32", save_every=1, keep_last=99)

    def latest_is_whole() -> int:
        path = directory / "latest"
        if not path.exists():
            return 0
        manifest = Manifest.read(directory / path.read_text())
        assert verify_crcs(directory / manifest.tag, manifest.files) == []
        return manifest.step

    run.train(2)
    run.settle()
    guardian = arena_of(directory).guardian()
    assert guardian is not None
    on_rank_0(lambda: os.kill(guardian[0], signal.SIGSTOP))
    with said() as lines:
        for _ in range(4):
            run.train(1)
            with on_all_ranks():
                assert latest_is_whole() <= 3
    on_rank_0(lambda: os.kill(guardian[0], signal.SIGCONT))
    if dist.get_rank() == 0:
        assert sum("waits: the last one is being written" in line for line in lines) == 1, lines
    # Nothing was skipped for good: the checkpoint that waited is made of the next step that can be.
    run.settle()
    assert latest_is_whole() == 3
    run.train(1)
    run.settle()
    assert latest_is_whole() == 7
    run.guard.close()
    assert [saved.step for saved in run.guard.saved if saved.in_background][-2:] == [3, 7]


@scenario
def stage_0_is_snapshotted_and_resumed(directory: Path) -> None:
    for precision in ("fp32", "bf16"):
        straight = new_engine(ds_config(0, precision))
        losses = train_until(straight, new_sampler(straight), 6)
        run = Watched(directory / precision, 0, precision, save_every=3)
        run.train(3)
        assert run.check_slots() == [1, 2, 3]
        run.guard.close()
        assert run.guard.saved[-1].in_background
        run = Watched(directory / precision, 0, precision)
        assert run.resumed is not None
        assert train_until(run.engine, run.sampler, 6) == losses[-3 * ACCUMULATION_STEPS :]
        assert fingerprint(run.engine) == fingerprint(straight)
        run.guard.close()


@scenario
def the_fence_keeps_a_step_from_tearing_a_slot(directory: Path) -> None:
    """A copy that begins late is still one of the step before: the optimizer waits for it."""
    for stage, precision in LAYOUTS:
        run = Watched(directory / f"stage{stage}_{precision}", stage, precision)
        run.train(1)
        run.check_slots()
        with held_copies() as gate:
            run.train(3, before_step=lambda gate=gate: open_soon(gate))
            gate.set()
            assert run.check_slots()[-2:] == [3, 4]
        run.guard.close()


@scenario
def weights_are_copied_beside_the_training_loop(directory: Path) -> None:
    """What changes in the optimizer alone is not waited for; what is frozen is not copied again."""
    for stage, precision in LAYOUTS:
        run = Watched(directory / f"stage{stage}_{precision}", stage, precision)
        run.train(1)
        run.check_slots()
        copied: list[int] = []
        original = copying_thread.copy_all

        def copy_all(batches: Any, copied: list[int] = copied, original: Any = original) -> None:
            copied += [source.nbytes for batch in batches for source in batch.sources]
            original(batches)

        copying_thread.copy_all = copy_all  # type: ignore[assignment]
        try:
            run.train(1)
            run.check_slots()
        finally:
            copying_thread.copy_all = original
        # The first rank has all that is trained, or its part: a matrix and two biases, with their moments.
        if dist.get_rank() == 0:
            assert sum(copied) > 500, f"stage {stage}, {precision}: {copied}"
        run.guard.close()


@scenario
def buffers_are_copied_before_the_next_forward(directory: Path) -> None:
    """What forward changes is in the slot, although the copy of the rest begins only after it."""
    for stage in (0, 1, 2, 3):
        run = Watched(directory / str(stage), stage, "fp32")
        run.train(1)
        run.check_slots()
        with held_copies() as gate:
            run.train(1)
            assert [slot.step for slot in run.page.slots() if slot.sequence % 2] == [2]
            inputs, _ = run.sampler.draw(torch.float32)
            before = {name: value.clone() for name, value in run.engine.module.named_buffers()}
            run.engine(inputs)
            changed = dict(run.engine.module.named_buffers())
            assert not torch.equal(before["norm.running_mean"], changed["norm.running_mean"])
            gate.set()
            assert run.check_slots()[-1] == 2
        run.guard.close()


def killed(directory: Path) -> tuple[int, int]:
    """Rank 0 kills the guardian; process id and start of it."""
    guardian = arena_of(directory).guardian()
    assert guardian is not None

    def kill() -> None:
        os.kill(guardian[0], signal.SIGKILL)
        until(lambda: not is_alive(*guardian), "the end of the guardian")

    on_rank_0(kill)
    return guardian


def train_until_there_is_another(run: Watched, old: tuple[int, int]) -> None:
    """Training goes on meanwhile, and every rank is heard by the new guardian in the end."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    heard = torch.zeros(1)
    while not heard.item():
        assert time.monotonic() < deadline, "no guardian stands by again"
        run.train(1)
        time.sleep(0.1)
        background = run.guard._background
        assert background is not None
        # A rank may not know yet that the old one is gone.
        is_new = arena_of(run.directory).guardian() != old
        heard[0] = float(is_new and background._standby.is_heard)
        dist.all_reduce(heard, op=dist.ReduceOp.MIN)


def check_tags(directory: Path) -> list[int]:
    """All checkpoints that are there are whole; their steps."""
    dist.barrier()
    manifests = [Manifest.read(path.parent) for path in directory.glob("*/manifest.json")]
    for manifest in manifests:
        assert verify_crcs(directory / manifest.tag, manifest.files) == []
    return sorted(manifest.step for manifest in manifests)


@scenario
def a_guardian_that_is_killed_between_steps(directory: Path) -> None:
    run = Watched(directory, 2, "fp32", save_every=2, keep_last=99)
    run.train(2)
    for _ in range(2):
        old = killed(directory)
        with said() as lines:
            train_until_there_is_another(run, old)
        assert sum("the guardian of this node has ended; training goes on" in line for line in lines) == 1
        assert sum("a guardian stands by again" in line for line in lines) == 1, lines
    run.train(4)
    assert run.check_slots()
    run.guard.close()
    end = int(run.engine.global_steps)
    assert check_tags(directory)[-1] == end
    assert any(saved.in_background for saved in run.guard.saved[-3:]), "the new guardian has saved nothing"
    straight = new_engine(ds_config(2, "fp32"))
    train_until(straight, new_sampler(straight), end)
    assert fingerprint(run.engine) == fingerprint(straight)


@scenario
def a_guardian_that_is_killed_while_it_writes(directory: Path) -> None:
    run = Watched(directory, 2, "fp32", save_every=3, keep_last=99)
    # Writing takes a while.
    payload, of_its_own = torch.arange(10_000_000, dtype=torch.float32), run.sampler.state_dict
    run.sampler.state_dict = lambda: {**of_its_own(), "payload": payload}  # type: ignore[method-assign]
    run.train(3)
    run.settle()
    assert check_tags(directory) == [3]
    guardian = arena_of(directory).guardian()
    assert guardian is not None
    on_rank_0(lambda: os.kill(guardian[0], signal.SIGSTOP))
    run.train(3)
    run.whole_slots()

    def kill_it_writing() -> None:
        os.kill(guardian[0], signal.SIGCONT)
        while not any(directory.glob(".global_step6.*.partial/*")):
            assert not (directory / "global_step6").exists(), "too late"
        os.kill(guardian[0], signal.SIGKILL)
        until(lambda: not is_alive(*guardian), "the end of the guardian")

    on_rank_0(kill_it_writing)
    assert 6 not in check_tags(directory)
    train_until_there_is_another(run, guardian)
    # The slot that was kept for the lost checkpoint is free again.
    assert not any(slot.wanted for slot in run.whole_slots())
    run.train(3)
    run.guard.close()
    assert check_tags(directory)[-1] == run.engine.global_steps
    resumed = Watched(directory, 2, "fp32")
    assert resumed.resumed is not None
    assert resumed.resumed.step == run.engine.global_steps
    assert fingerprint(resumed.engine, moments=False) == fingerprint(run.engine, moments=False)
    resumed.guard.close()
    dist.barrier()
    assert not list(directory.glob(".*partial"))


@scenario
def a_guardian_that_is_killed_before_the_end(directory: Path) -> None:
    """Nobody is left to free the arena but the ranks."""
    run = Watched(directory, 1, "fp32")
    run.train(2)
    killed(directory)
    # Noticed or not.
    run.guard._background._standby.heard()  # type: ignore[union-attr]
    run.guard.close()
    dist.barrier()
    assert not list(arenas_into(directory))
    assert check_tags(directory) == [2]


logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
if __name__ == "__main__":
    run_all()
