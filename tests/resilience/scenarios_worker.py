"""Run under torchrun: the guard's scenarios with synchronous saves (tests/resilience/scenario.py)."""

from __future__ import annotations

import collections
import http
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import deepspeed.comm as dist
import torch
import training
from scenario import on_rank_0, refused, run_all, said, scenario
from training import fingerprint, new_engine, new_sampler, train_until

from ds_toolkit import CheckpointGuard, GuardSettings
from ds_toolkit.checkpoint.manifest import Manifest
from ds_toolkit.resilience.cadence import AutoInterval
from ds_toolkit.resilience.rank_state import random_states, restore_random_states


def ds_config(stage: int, precision: str, **more: Any) -> dict[str, object]:
    """Saves are synchronous here; those that the guardian writes have a worker of their own."""
    section = {"snapshot_every": 0, **more.pop("ds_toolkit", {})}
    return training.ds_config(stage, precision, ds_toolkit=section, **more)


def tags(directory: Path) -> list[str]:
    """Tags there, once rank 0 has deleted what it had to delete. Collective."""
    dist.barrier()
    return sorted(path.name for path in directory.glob("*") if path.is_dir())


def trained(directory: Path, until: int, **arguments: Any) -> tuple[Any, CheckpointGuard]:
    """An engine with a guard, trained to a step."""
    engine = new_engine(ds_config(arguments.pop("stage", 1), arguments.pop("precision", "fp32")))
    guard = CheckpointGuard(engine, directory, **arguments)
    guard.resume()
    train_until(engine, new_sampler(engine), until)
    return engine, guard


@scenario
def keep_last_and_protected_tags(directory: Path) -> None:
    engine, guard = trained(directory, 3, save_every=1, keep_last=2)
    assert tags(directory) == ["global_step2", "global_step3"]
    guard.save("best", protect=True)
    train_until(engine, new_sampler(engine), 6)
    assert tags(directory) == ["best", "global_step5", "global_step6"]
    assert (directory / "latest").read_text() == "global_step6"
    assert Manifest.read(directory / "best").protected
    guard.close()
    assert tags(directory) == ["best", "global_step5", "global_step6"], "closing saved the same step twice"


@scenario
def a_tag_of_the_same_name_is_replaced(directory: Path) -> None:
    engine, guard = trained(directory, 1, save_every=100)
    guard.save("best")
    train_until(engine, new_sampler(engine), 2)
    guard.save("best")
    assert tags(directory) == ["best"]
    assert Manifest.read(directory / "best").step == 2
    guard.close()


@scenario
def micro_steps_are_not_steps(directory: Path) -> None:
    engine = new_engine(ds_config(2, "fp32"))
    with CheckpointGuard(engine, directory, save_every=2, keep_last=9) as guard:
        guard.resume()
        losses = train_until(engine, new_sampler(engine), 4)
        assert len(losses) == 8
        assert [saved.step for saved in guard.saved] == [2, 4]


@scenario
def time_between_checkpoints(directory: Path) -> None:
    engine = new_engine(ds_config(1, "fp32"))
    with CheckpointGuard(engine, directory, save_every="0.5s", keep_last=99) as guard:
        guard.resume()
        started, sampler = time.monotonic(), new_sampler(engine)
        # The ranks' clocks and speeds differ; what they decide must not. Rank 0 alone ends the loop.
        going = torch.ones(1)
        while going.item():
            train_until(engine, sampler, engine.global_steps + 1)
            time.sleep(0.01 * dist.get_rank())
            going[0] = float(time.monotonic() - started < 2.8)
            dist.broadcast(going, src=0)
        num_saved = len(guard.saved)
    everybody: list[Any] = [None] * 2
    dist.all_gather_object(everybody, [saved.step for saved in guard.saved])
    assert everybody[0] == everybody[1]
    assert 3 <= num_saved <= 5, f"{num_saved} checkpoints in 2.8 s at one every 0.5 s"


@scenario
def an_interval_by_what_is_measured(directory: Path) -> None:
    engine = new_engine(ds_config(1, "fp32"))
    settings = {"save_every": "auto", "mttf": "2s", "overhead_budget": 0.9, "keep_last": 99}
    with (
        patch.object(AutoInterval, "FIRST_SECONDS", 0.3),
        said() as lines,
        CheckpointGuard(engine, directory, settings=settings) as guard,
    ):
        guard.resume()
        sampler = new_sampler(engine)
        for step in range(1, 61):
            train_until(engine, sampler, step)
            time.sleep(0.02 * (1 + dist.get_rank()))
        num_saved = len(guard.saved)
    everybody: list[Any] = [None] * 2
    dist.all_gather_object(everybody, [saved.step for saved in guard.saved])
    assert everybody[0] == everybody[1]
    assert num_saved >= 2
    changes = [line for line in lines if "from now on" in line]
    assert bool(changes) == (dist.get_rank() == 0)
    assert all("a failure every 2.0 s (as given)" in line for line in changes)


@scenario
def a_cut_shard_is_passed_over(directory: Path) -> None:
    _, guard = trained(directory, 6, save_every=3)
    guard.close()
    shard = directory / "global_step6" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    size_bytes = shard.stat().st_size
    on_rank_0(lambda: shard.write_bytes(shard.read_bytes()[:-100]))
    engine = new_engine(ds_config(1, "fp32"))
    with said() as lines, CheckpointGuard(engine, directory) as guard:
        resumed = guard.resume()
    assert resumed is not None
    assert resumed.tag == "global_step3"
    if dist.get_rank() == 0:
        told = next(line for line in lines if "passed over" in line)
        for part in ("global_step6", shard.name, f"{size_bytes:,}", f"{size_bytes - 100:,}"):
            assert part in told, (part, told)


@scenario
def a_flipped_bit_is_found_by_crc_and_by_nothing_else(directory: Path) -> None:
    _, guard = trained(directory, 6, save_every=3)
    guard.close()
    shard = directory / "global_step6" / "mp_rank_00_model_states.pt"

    def flip() -> None:
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)

    on_rank_0(flip)
    engine = new_engine(ds_config(1, "fp32"))
    with CheckpointGuard(engine, directory) as guard:
        resumed = guard.resume()
    assert resumed is not None
    assert resumed.step == 3
    engine = new_engine(ds_config(1, "fp32"))
    with CheckpointGuard(engine, directory, settings={"verify_on_resume": "sizes"}) as guard:
        resumed = guard.resume()
    assert resumed is not None
    assert resumed.step == 6


@scenario
def a_broken_tag_does_not_count_as_kept(directory: Path) -> None:
    _, guard = trained(directory, 6, save_every=3)
    guard.close()
    shard = directory / "global_step6" / "mp_rank_00_model_states.pt"
    on_rank_0(lambda: shard.write_bytes(shard.read_bytes()[:-1] + b"?"))
    _, guard = trained(directory, 8, save_every=4, keep_last=2)
    guard.close()
    assert tags(directory) == ["global_step4", "global_step6", "global_step8"]


@scenario
def none_is_whole(directory: Path) -> None:
    _, guard = trained(directory, 2, save_every=1, keep_last=2)
    guard.close()

    def damage() -> None:
        (directory / "global_step1" / "ds_toolkit_rank_00001.pt").unlink()
        (directory / "global_step2" / "manifest.json").write_text("{")

    on_rank_0(damage)
    engine = new_engine(ds_config(1, "fp32"))
    guard = CheckpointGuard(engine, directory, save_every=2)
    with refused(
        "none of them is whole", "global_step1", "ds_toolkit_rank_00001.pt", "missing", "global_step2"
    ):
        guard.resume()
    assert guard.resume(allow_fresh=True) is None
    # The broken tags give way to the new ones of their names.
    train_until(engine, new_sampler(engine), 2)
    assert Manifest.read(directory / "global_step2").step == 2
    guard.close()


@scenario
def latest_names_a_tag_that_is_gone(directory: Path) -> None:
    _, guard = trained(directory, 1, save_every=1)
    guard.close()
    on_rank_0(lambda: shutil.rmtree(directory / "global_step1"))
    with refused("global_step1", "latest"):
        CheckpointGuard(new_engine(ds_config(1, "fp32")), directory).resume()


@scenario
def a_directory_that_is_empty_or_not_there_is_a_fresh_start(directory: Path) -> None:
    engine = new_engine(ds_config(1, "fp32"))
    with CheckpointGuard(engine, directory / "deep" / "down", save_every=1) as guard:
        assert guard.resume() is None
        train_until(engine, new_sampler(engine), 1)
    assert tags(directory / "deep" / "down") == ["global_step1"]


@scenario
def another_kind_of_run_is_refused(directory: Path) -> None:
    _, guard = trained(directory, 1, save_every=1, stage=2)
    guard.close()
    engine = new_engine(ds_config(1, "fp32"))
    weights = fingerprint(engine, moments=False)
    with refused("another kind of run", "zero_stage is 2 in the checkpoint and 1 in this run"):
        CheckpointGuard(engine, directory).resume()
    assert fingerprint(engine, moments=False) == weights, "something was loaded before it was refused"
    engine = new_engine(ds_config(2, "bf16"))
    with refused("precision is fp32 in the checkpoint and bf16 in this run"):
        CheckpointGuard(engine, directory).resume()


@scenario
def what_deepspeed_saved_alone(directory: Path) -> None:
    engine = new_engine(ds_config(2, "fp32"))
    sampler = new_sampler(engine)
    train_until(engine, sampler, 2)
    engine.save_checkpoint(str(directory), client_state={"mine": 1})
    weights = fingerprint(engine, moments=False)
    train_until(engine, sampler, 3)
    engine.save_checkpoint(str(directory))
    # As after a crash in the middle of DeepSpeed's save: `latest` names it, a shard is missing.
    on_rank_0((directory / "global_step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink)
    engine = new_engine(ds_config(2, "fp32"), seed=5)
    with said() as lines, CheckpointGuard(engine, directory) as guard:
        guard.track("sampler", new_sampler(engine))
        resumed = guard.resume()
    assert resumed is not None
    assert (resumed.tag, resumed.kind, resumed.client_state) == ("global_step2", "deepspeed", {"mine": 1})
    # DeepSpeed alone saves the BatchNorm statistics of rank 0 only.
    assert (fingerprint(engine, moments=False) == weights) == (dist.get_rank() == 0)
    assert any("without ds_toolkit" in line for line in lines), lines


@scenario
def deepspeed_alone_reads_what_the_guard_saved(directory: Path) -> None:
    for stage in (1, 3):
        engine, guard = trained(directory / str(stage), 2, save_every=2, stage=stage)
        weights = fingerprint(engine, moments=False)
        guard.close()
        engine = new_engine(ds_config(stage, "fp32"), seed=5)
        path, _ = engine.load_checkpoint(str(directory / str(stage)))
        assert path is not None
        if stage == 3 or dist.get_rank() == 0:
            assert fingerprint(engine, moments=False) == weights
        else:
            # DeepSpeed gives this rank the BatchNorm statistics of rank 0.
            assert fingerprint(engine, moments=False) != weights
        assert (directory / str(stage) / "zero_to_fp32.py").exists()
        assert not (directory / str(stage) / "global_step2" / "zero_to_fp32.py").exists()


@scenario
def the_files_are_those_of_deepspeed(directory: Path) -> None:
    for stage, precision in ((0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "bf16")):
        engine = new_engine(ds_config(stage, precision))
        ours, theirs = directory / f"ours{stage}", directory / f"theirs{stage}"
        with CheckpointGuard(engine, ours, save_every=100) as guard:
            guard.resume()
            train_until(engine, new_sampler(engine), 2)
            guard.save("tag")
            engine.save_checkpoint(str(theirs), tag="tag", client_state={})
        dist.barrier()
        names = {path.name for path in (theirs / "tag").iterdir()}
        added = {"manifest.json", "ds_toolkit_rank_00000.pt", "ds_toolkit_rank_00001.pt"}
        assert {path.name for path in (ours / "tag").iterdir()} == names | added
        assert {path.name for path in ours.iterdir()} == {path.name for path in theirs.iterdir()}
        for name in names:
            assert (ours / "tag" / name).read_bytes() == (theirs / "tag" / name).read_bytes(), (stage, name)


@scenario
def settings_stand_in_the_config_and_arguments_beat_them(directory: Path) -> None:
    config = ds_config(1, "fp32", ds_toolkit={"save_every": 7, "keep_last": 5})
    guard = CheckpointGuard(new_engine(config), directory, keep_last=2)
    assert (guard.settings.save_every, guard.settings.keep_last) == (7, 2)
    guard = CheckpointGuard(new_engine(config), directory, settings=GuardSettings(save_every="1h"))
    assert (guard.settings.save_every, guard.settings.keep_last) == ("1h", 5)
    assert CheckpointGuard(new_engine(ds_config(1, "fp32")), directory).settings.save_every == "10min"
    with refused("save_evry", "did you mean `save_every`"):
        CheckpointGuard(new_engine(ds_config(1, "fp32", ds_toolkit={"save_evry": 7})), directory)
    with refused("keep_last"):
        CheckpointGuard(new_engine(ds_config(1, "fp32")), directory, keep_last=0)


@scenario
def one_guard_an_engine(directory: Path) -> None:
    engine = new_engine(ds_config(1, "fp32"))
    guard = CheckpointGuard(engine, directory, save_every=1)
    with refused("has a CheckpointGuard already"):
        CheckpointGuard(engine, directory)
    guard.close()
    assert "step" not in engine.__dict__, "the hook is still there"
    # A hook that was there before is there afterwards.
    engine.step = mine = lambda: type(engine).step(engine)
    CheckpointGuard(engine, directory).close()
    assert engine.step is mine
    del engine.step
    CheckpointGuard(engine, directory).close()
    assert tags(directory) == []


@scenario
def ranks_that_ask_for_different_checkpoints(directory: Path) -> None:
    engine, guard = trained(directory, 1, save_every=100)
    with refused("differ in the checkpoint they ask for", "rank 1"):
        guard.save(f"mine_{dist.get_rank()}")
    with refused("differ in the checkpoint they ask for"):
        guard.save("good" if dist.get_rank() == 0 else "not/good")
    with refused("cannot be a tag"):
        guard.save("not/good")
    assert tags(directory) == []
    guard.save("ours")
    assert tags(directory) == ["ours"]
    assert engine.global_steps == 1


@scenario
def a_failure_on_one_rank_is_everybodys(directory: Path) -> None:
    class Stubborn:
        asked = 0

        def state_dict(self) -> dict[str, int]:
            self.asked += 1
            if self.asked > 1 and dist.get_rank() == 1:
                raise OSError(5, "the loader's worker is gone", "/data/part-7")
            return {}

        def load_state_dict(self, state: object) -> None: ...

    engine = new_engine(ds_config(3, "fp32"))
    guard = CheckpointGuard(engine, directory, save_every=1)
    guard.resume()
    guard.track("stubborn", Stubborn())
    with refused("rank 1: the loader's worker is gone", "/data/part-7"):
        train_until(engine, new_sampler(engine), 1)
    # It goes on training, and on saving once the cause is gone.
    guard._tracked.clear()
    train_until(engine, new_sampler(engine), 2)
    assert tags(directory) == ["global_step2"]


@scenario
def training_goes_on_if_it_is_told_to(directory: Path) -> None:
    def take_the_place() -> None:
        (directory / "global_step1").mkdir(parents=True)
        (directory / "global_step1" / "thesis.tex").write_text("three years of work")

    on_rank_0(take_the_place)
    engine = new_engine(ds_config(1, "fp32"))
    guard = CheckpointGuard(engine, directory, save_every=1, settings={"on_save_failure": "continue"})
    with said() as lines:
        train_until(engine, new_sampler(engine), 2)
    guard.close()
    assert engine.global_steps == 2
    if dist.get_rank() == 0:
        assert sum("is missing; training goes on" in line for line in lines) == 1, lines
    assert [saved.step for saved in guard.saved] == [2]
    guard = CheckpointGuard(new_engine(ds_config(1, "fp32")), directory / "latest" / "inside", save_every=1)
    with refused("cannot take the checkpoint directory", "Not a directory"):
        train_until(guard.engine, new_sampler(guard.engine), 1)


@scenario
def a_run_that_never_asked_to_resume(directory: Path) -> None:
    _, guard = trained(directory, 3, save_every=3)
    guard.close()
    engine = new_engine(ds_config(1, "fp32"))
    CheckpointGuard(engine, directory, save_every=1)
    with refused("checkpoint of step 3, and this run is at 1", "call guard.resume()"):
        train_until(engine, new_sampler(engine), 1)
    assert tags(directory) == ["global_step3"]


@scenario
def leaving_by_an_exception(directory: Path) -> None:
    engine = new_engine(ds_config(1, "fp32"))
    if dist.get_rank() == 1:
        # The other rank does not take part in anything: a collective here would never end.
        try:
            with CheckpointGuard(engine, directory, save_every=1):
                raise KeyError("a mistake in the loop")
        except KeyError:
            pass
        assert "step" not in engine.__dict__
    dist.barrier()
    assert not directory.exists()


@scenario
def guards_that_differ_between_ranks(directory: Path) -> None:
    engine = new_engine(ds_config(1, "fp32"))
    guard = CheckpointGuard(engine, directory, save_every=2 + dist.get_rank())
    with refused("differ in the directory and the settings", "'save_every': 3"):
        guard.resume()
    guard.close()
    CheckpointGuard(engine, directory / str(dist.get_rank()), save_every=2)
    with refused("differ in the directory"):
        train_until(engine, new_sampler(engine), 1)


@scenario
def two_guards_in_one_directory(directory: Path) -> None:
    first = CheckpointGuard(new_engine(ds_config(1, "fp32")), directory, save_every=1)
    assert first.resume() is None
    second = CheckpointGuard(
        new_engine(ds_config(1, "fp32")), directory / ".." / directory.name, save_every=1
    )
    with refused("another run writes into this checkpoint directory", "close it first"):
        second.resume()
    with refused("another run writes"):
        train_until(second.engine, new_sampler(second.engine), 1)
    first.close()
    assert second.resume() is None
    second.close()
    assert tags(directory) == ["global_step1"]
    assert not list(directory.glob(".*"))


@scenario
def in_the_middle_of_an_accumulation(directory: Path) -> None:
    engine, guard = trained(directory, 2, save_every=100)
    inputs, targets = new_sampler(engine).draw(torch.float32)
    engine.backward(torch.nn.functional.mse_loss(engine(inputs), targets))
    engine.step()
    with refused("save() stands in the middle of a gradient accumulation"):
        guard.save()
    with refused("resume() stands in the middle of a gradient accumulation"):
        guard.resume()
    with said() as lines:
        guard.close()
    if dist.get_rank() == 0:
        assert any("the last 1 micro-steps end with no optimizer step" in line for line in lines), lines
    assert Manifest.read(directory / "global_step2").micro_steps == 1
    with said() as lines, CheckpointGuard(new_engine(ds_config(1, "fp32")), directory) as guard:
        assert guard.resume() is not None
    assert any("1 micro-steps after an optimizer step" in line for line in lines), lines


@scenario
def deepspeeds_own_save_into_our_directory(directory: Path) -> None:
    engine, guard = trained(directory, 1, save_every=1)
    with refused("would write over the files of committed checkpoints", "guard.save(tag)"):
        engine.save_checkpoint(str(directory / "."))
    assert engine.save_checkpoint(str(directory.with_name("elsewhere")))
    guard.close()
    assert engine.save_checkpoint(str(directory), tag="afterwards")


@scenario
def a_disk_that_fails_one_rank_only(directory: Path) -> None:
    engine, guard = trained(directory, 1, save_every=100, stage=3)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    with refused("a checkpoint file cannot be written", "rank 1: ", "zero_pp_rank_1", "bytes are free"):
        guard.save()
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert tags(directory) == []
    # The ranks are in step with each other, and the parameters whole.
    train_until(engine, new_sampler(engine), 2)
    guard.save()
    guard.close()
    assert tags(directory) == ["global_step2"]


@scenario
def a_broken_shard_that_has_its_size(directory: Path) -> None:
    """Without CRCs a broken structure is still found before DeepSpeed's loader, in which ranks wait."""
    _, guard = trained(directory, 1, save_every=1, stage=3)
    guard.close()
    shard = directory / "global_step1" / "zero_pp_rank_0_mp_rank_00_model_states.pt"

    def wipe_the_pickle() -> None:
        data = shard.read_bytes()
        at = data.index(b"data.pkl")
        shard.write_bytes(data[: at + 200] + bytes(300) + data[at + 500 :])

    on_rank_0(wipe_the_pickle)
    engine = new_engine(ds_config(3, "fp32"))
    guard = CheckpointGuard(engine, directory, settings={"verify_on_resume": "sizes"})
    with refused(shard.name, "rank 0: "):
        guard.resume()


@scenario
def a_universal_checkpoint_is_not_ours(directory: Path) -> None:
    engine = new_engine(ds_config(1, "fp32", checkpoint={"load_universal": True}))
    with refused("asks for universal ones", "checkpoint.load_universal"):
        CheckpointGuard(engine, directory).resume()


@scenario
def experts_are_saved_and_resumed(directory: Path) -> None:
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    class Mixture(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = torch.nn.Linear(8, 8)
            self.moe = MoE(8, torch.nn.Linear(8, 8), num_experts=2, ep_size=2, k=1, min_capacity=0)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.moe(self.before(inputs))[0]

    def mixture(seed: int) -> Any:
        torch.manual_seed(seed)
        model = Mixture()
        groups = split({"params": list(model.parameters()), "name": "parameters"})
        config = ds_config(1, "fp32", gradient_accumulation_steps=1)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
        return engine

    def losses(engine: Any, until: int) -> list[float]:
        seen = []
        while engine.global_steps < until:
            inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(engine.global_steps))
            loss = (engine(inputs) - inputs).pow(2).mean()
            engine.backward(loss)
            engine.step()
            seen.append(loss.item())
        return seen

    straight = losses(mixture(0), 4)
    engine = mixture(0)
    with CheckpointGuard(engine, directory, save_every=2) as guard:
        assert guard.resume() is None
        first = losses(engine, 2)
    assert list((directory / "global_step2").glob("layer_*_expert_*"))
    engine = mixture(9)
    with CheckpointGuard(engine, directory, save_every=2) as guard:
        assert guard.resume() is not None
        assert first + losses(engine, 4) == straight


@scenario
def keys_of_deepspeed_are_refused_in_client_state(directory: Path) -> None:
    engine = new_engine(ds_config(1, "fp32"))
    guard = CheckpointGuard(engine, directory, client_state=lambda: {"module": 1})
    with refused("uses the key `module`"):
        guard.save()
    assert tags(directory) == []


@scenario
def what_cannot_be_tracked(directory: Path) -> None:
    class Pickled:
        def __init__(self, inner: object) -> None:
            self.inner = inner

        def state_dict(self) -> dict[str, object]:
            return {"inner": [1, {"deep": self.inner}]}

        def load_state_dict(self, state: object) -> None: ...

    guard = CheckpointGuard(new_engine(ds_config(1, "fp32")), directory)
    for inner in (Path("x"), collections.defaultdict(int), http.HTTPStatus.OK, time.struct_time([0] * 9)):
        with refused(type(inner).__name__, "loader['inner'][1]['deep']"):
            guard.track("loader", Pickled(inner))
    with refused("has no state_dict()"):
        guard.track("number", 3)  # type: ignore[arg-type]
    guard.track("sampler", new_sampler(guard.engine))
    with refused("tracked as `sampler` already"):
        guard.track("sampler", new_sampler(guard.engine))


@scenario
def tracking_after_the_resume_is_too_late(directory: Path) -> None:
    _, guard = trained(directory, 1, save_every=1)
    guard.close()
    guard = CheckpointGuard(new_engine(ds_config(1, "fp32")), directory)
    guard.resume()
    with refused("too late", "before resume()"):
        guard.track("sampler", new_sampler(guard.engine))


@scenario
def all_random_states_come_back(directory: Path) -> None:
    import random

    import numpy
    from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

    get_cuda_rng_tracker().add("model-parallel-rng", 7)

    def draws() -> list[object]:
        drawn: list[object] = [random.random(), numpy.random.rand(), torch.rand(1).item()]
        with get_cuda_rng_tracker().fork():
            drawn.append(torch.rand(1).item())
        return drawn

    _, guard = trained(directory, 1, save_every=1)
    expected = draws()
    assert draws() != expected
    guard.close()
    guard = CheckpointGuard(new_engine(ds_config(1, "fp32")), directory)
    guard.resume()
    assert draws() == expected
    states = random_states()
    expected = draws()
    restore_random_states(states)
    assert draws() == expected
    get_cuda_rng_tracker().reset()


@scenario
def numpy_states_of_tracked_objects_load_safely(directory: Path) -> None:
    import numpy

    class Shuffler:
        def __init__(self, seed: int) -> None:
            self.generator = numpy.random.default_rng(seed)
            self.order = self.generator.permutation(10)

        def state_dict(self) -> dict[str, object]:
            return {"generator": self.generator.bit_generator.state, "order": self.order, "n": self.order[0]}

        def load_state_dict(self, state: Any) -> None:
            self.generator.bit_generator.state = state["generator"]
            self.order = state["order"]

    engine = new_engine(ds_config(1, "fp32"))
    shuffler = Shuffler(dist.get_rank())
    with CheckpointGuard(engine, directory, save_every=1) as guard:
        guard.track("shuffler", shuffler)
        train_until(engine, new_sampler(engine), 1)
    expected = (shuffler.order.tolist(), shuffler.generator.random())
    other = Shuffler(55)
    guard = CheckpointGuard(new_engine(ds_config(1, "fp32")), directory)
    guard.track("shuffler", other)
    assert guard.resume() is not None
    assert (other.order.tolist(), other.generator.random()) == expected


@scenario
def a_config_with_a_writer_that_cannot_load(directory: Path) -> None:
    engine = new_engine(ds_config(0, "fp32", checkpoint={"checkpoint_serialization": False}))
    with CheckpointGuard(engine, directory, save_every=1) as guard:
        guard.resume()
        train_until(engine, new_sampler(engine), 1)
    weights = fingerprint(engine, moments=False)
    engine = new_engine(ds_config(0, "fp32", checkpoint={"checkpoint_serialization": False}), seed=3)
    with CheckpointGuard(engine, directory) as guard:
        assert guard.resume() is not None
    assert fingerprint(engine, moments=False) == weights


@scenario
def the_directory_is_moved(directory: Path) -> None:
    engine, guard = trained(directory / "here", 1, save_every=1)
    weights = fingerprint(engine, moments=False)
    guard.close()
    on_rank_0(lambda: (directory / "here").rename(directory / "there"))
    engine = new_engine(ds_config(1, "fp32"), seed=4)
    with CheckpointGuard(engine, directory / "there") as guard:
        assert guard.resume() is not None
    assert fingerprint(engine, moments=False) == weights


@scenario
def a_pipeline_is_saved_and_resumed(directory: Path) -> None:
    def pipeline(seed: int) -> Any:
        torch.manual_seed(seed)
        layers = [torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8)]
        module = deepspeed.pipe.PipelineModule(layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss)
        engine, *_ = deepspeed.initialize(model=module, config=config)
        return engine

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(3)
        while True:
            yield torch.randn(4, 8, generator=generator), torch.randn(4, 8, generator=generator)

    config = ds_config(1, "fp32")
    engine = pipeline(0)
    straight = [engine.train_batch(batches()).item() for _ in range(4)]
    engine = pipeline(0)
    with CheckpointGuard(engine, directory, save_every=2) as guard:
        assert guard.resume() is None
        first = [engine.train_batch(batches()).item() for _ in range(2)]
        assert [saved.step for saved in guard.saved] == [2]
    engine = pipeline(9)
    with CheckpointGuard(engine, directory, save_every=2) as guard:
        resumed = guard.resume()
        assert resumed is not None
        assert resumed.step == 2
        rest = [engine.train_batch(batches()).item() for _ in range(2)]
    assert first + rest == straight


if __name__ == "__main__":
    run_all()
