"""Run under torchrun: scenarios of states that change where a snapshot might not look (scenario.py).

After each step DeepSpeed saves as well, and every slot is compared with that (watched.py).
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import deepspeed.comm as dist
import torch
from comparing import same
from deepspeed.pipe import PipelineModule
from scenario import run_all, said, scenario
from torch import nn
from training import ACCUMULATION_STEPS, WIDTH, SmallNet, ds_config
from watched import Watched, on_all_ranks

from ds_toolkit.resilience import enlisting, rank_files, recording

LAYOUTS = [(stage, precision) for stage in (0, 1, 2, 3) for precision in ("fp32", "bf16")]


@contextlib.contextmanager
def recordings() -> Iterator[list[int]]:
    """One entry for each time that DeepSpeed's writers are called for a snapshot."""
    original, calls = rank_files.record, []

    def record(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(calls))
        return original(*args, **kwargs)

    rank_files.record = record  # type: ignore[assignment]
    try:
        yield calls
    finally:
        rank_files.record = original


def engine_of(model: nn.Module, stage: int, precision: str = "fp32", **options: Any) -> Any:
    """Without a scheduler if `scheduler` is false."""
    config = ds_config(stage, precision, zero_allow_untested_optimizer=True)
    if not options.pop("scheduler", True):
        del config["scheduler"]
    if "optimizer" in options:
        del config["optimizer"]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config, **options)
    return engine


def follow(run: Watched, changes: dict[int, Callable[[], object]], steps: int = 6) -> None:
    """Train; in front of a step that `changes` names something is changed. Each slot is what is saved."""
    for step in range(1, steps + 1):
        changes.get(step, lambda: None)()
        run.train(1)
        assert step in run.check_slots(), f"no slot of step {step}"
    run.guard.close()


def keeps_model(stage: int) -> bool:
    """Whether this rank's slots hold a model file; below stage 3 one rank of a node has it."""
    return stage == 3 or dist.get_rank() == 0


def base_optimizer(run: Watched) -> Any:
    return getattr(run.engine.optimizer, "optimizer", run.engine.optimizer)


@scenario
def where_nothing_changes_nothing_is_recorded_twice(directory: Path) -> None:
    for stage, precision in LAYOUTS:
        run = Watched(directory / f"stage{stage}_{precision}", stage, precision)
        with recordings() as calls:
            follow(run, {})
        # The one that everything is learned from, and the one that proves it.
        assert len(calls) == 2, f"stage {stage}, {precision}: {len(calls)}"


@scenario
def rates_and_options_that_the_user_changes(directory: Path) -> None:
    for stage, precision in LAYOUTS:
        engine = engine_of(SmallNet(), stage, precision, scheduler=False)
        run = Watched(directory / f"stage{stage}_{precision}", stage, precision, engine=engine)
        group = base_optimizer(run).param_groups[0]
        follow(
            run,
            {
                3: lambda group=group: group.update(lr=0.5),
                4: lambda group=group: group.update(lr=1, betas=(0.5, 0.6)),
                5: lambda group=group: group.update(note=[1]),
                6: lambda group=group: group["note"].append(True),
            },
        )


@scenario
def a_group_of_parameters_that_is_added_later(directory: Path) -> None:
    model = SmallNet()
    run = Watched(directory, 0, "fp32", engine=engine_of(model, 0, scheduler=False))

    def add() -> None:
        model.frozen.bias.requires_grad_(True)
        run.engine.optimizer.add_param_group({"params": [model.frozen.bias], "lr": 0.1})

    follow(run, {4: add})


class Reassigning(SmallNet):
    """Puts another buffer in the place of the last one at each forward, and a third one now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("absent", None)
        self.register_buffer("passing", torch.zeros(1), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.mean = self.mean * 0.9 + inputs.detach().float().mean(0)
        return super().forward(inputs)


@scenario
def buffers_that_are_made_anew(directory: Path) -> None:
    for stage, precision in LAYOUTS:
        model = Reassigning()
        engine = engine_of(model, stage, precision)
        run = Watched(directory / f"stage{stage}_{precision}", stage, precision, engine=engine)
        follow(
            run,
            {
                3: lambda model=model: setattr(model, "absent", torch.ones(2)),
                5: lambda model=model: model.register_buffer("new", torch.ones(3)),
                7: lambda model=model: model._non_persistent_buffers_set.clear(),
                9: lambda model=model: setattr(model.absent, "data", torch.zeros(2)),
            },
            steps=10,
        )


@scenario
def buffers_that_lie_elsewhere(directory: Path) -> None:
    for stage in (0, 2, 3):
        run = Watched(directory / str(stage), stage, "fp32")
        norm = run.engine.module.norm

        def move(norm: Any = norm) -> None:
            norm.running_mean.data = norm.running_mean.data + 1

        follow(run, {4: move, 6: move})


@scenario
def states_of_the_optimizer_that_are_replaced(directory: Path) -> None:
    for stage in (0, 1, 2):
        run = Watched(directory / str(stage), stage, "fp32")
        optimizer = base_optimizer(run)

        def replace(optimizer: Any = optimizer) -> None:
            for state in optimizer.state.values():
                state.update({key: value.clone() for key, value in state.items()})

        def load(optimizer: Any = optimizer) -> None:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

        def move(optimizer: Any = optimizer) -> None:
            for state in optimizer.state.values():
                state["exp_avg"].data = state["exp_avg"].data * 2

        follow(run, {3: load, 4: replace, 5: move, 6: load})


@scenario
def weights_that_lie_elsewhere(directory: Path) -> None:
    for precision in ("fp32", "bf16"):
        run = Watched(directory / precision, 0, precision)
        module = run.engine.module

        def move(module: Any = module) -> None:
            for parameter in module.frozen.parameters():
                parameter.data = parameter.data.clone() + 1

        def replace(module: Any = module) -> None:
            weight = module.frozen.weight
            module.frozen.weight = nn.Parameter(weight.detach() + 1, requires_grad=False)

        def untie(module: Any = module) -> None:
            module.second.bias.data = module.second.bias.data.clone()

        # Not one after the other: what follows a change is proved, whatever it is.
        follow(run, {3: move, 5: replace, 7: untie, 9: move}, steps=10)


@scenario
def weights_that_are_frozen_or_thawed(directory: Path) -> None:
    for stage in (0, 2, 3):
        run = Watched(directory / str(stage), stage, "fp32")
        thaw = run.engine.module.frozen.bias.requires_grad_
        follow(run, {3: lambda thaw=thaw: thaw(True), 5: lambda thaw=thaw: thaw(False)})


@scenario
def a_checkpoint_that_is_loaded_in_the_middle(directory: Path) -> None:
    for stage, precision in LAYOUTS:
        run = Watched(directory / f"stage{stage}_{precision}", stage, precision)
        for _ in range(3):
            run.train(1)
            run.check_slots()
        run.engine.load_checkpoint(str(run.elsewhere), tag="2")
        for step in (3, 4, 5):
            before = run.whole_slots()
            run.train(1)
            # There may be one of the same step from before the load.
            new = [slot for slot in run.whole_slots() if slot not in before]
            with on_all_ranks():
                assert [slot.step for slot in new] == [step]
                run.compare(new)
        run.guard.close()


class Rate(torch.optim.lr_scheduler.LambdaLR):
    """Says something in its state from step 5 on."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, lambda step: 1 / (1 + step))
        self.note: dict[str, Any] = {}


class Adam(torch.optim.AdamW):
    """Has a state of its own beside that of the parameters."""

    note = 0

    def state_dict(self) -> Any:
        return {**super().state_dict(), "note": self.note}


@scenario
def a_leaf_that_changes_at_the_fifth_step_alone(directory: Path) -> None:
    for stage in (0, 1, 2, 3):
        engine = engine_of(SmallNet(), stage, optimizer=Adam, scheduler=False, lr_scheduler=Rate)
        run = Watched(directory / str(stage), stage, "fp32", engine=engine)

        def change(run: Watched = run) -> None:
            run.engine.lr_scheduler.note["best"] = 3.5
            base_optimizer(run).note = -1

        follow(run, {5: change}, steps=7)


class Talking(SmallNet):
    """Has more to say in its state dict than parameters and buffers."""

    said = 1

    def get_extra_state(self) -> Any:
        return {"said": self.said}

    def set_extra_state(self, state: Any) -> None:
        self.said = state["said"]


@scenario
def what_modules_say_by_themselves(directory: Path) -> None:
    for stage in (0, 2):
        model = Talking()
        run = Watched(directory / f"extra{stage}", stage, "fp32", engine=engine_of(model, stage))
        follow(run, {5: lambda model=model: setattr(model, "said", 2)})
        run = Watched(directory / f"hook{stage}", stage, "fp32")
        register = run.engine.module.norm.register_state_dict_post_hook

        added = torch.ones(1)

        def hook(_: Any, state: Any, prefix: str, __: Any, added: torch.Tensor = added) -> None:
            state[f"{prefix}hooked"] = added

        with recordings() as calls:
            follow(run, {4: lambda register=register, hook=hook: register(hook)})
        # Learned and proved at first and after the hook, which is called at each step from then on.
        with on_all_ranks():
            assert len(calls) == 4, calls


@scenario
def client_states_of_any_shape(directory: Path) -> None:
    for stage in (0, 2, 3):
        states: list[dict[str, Any]] = [
            {},
            {"epoch": 1},
            {"epoch": 1.0},
            {"epoch": True, "seen": {"a": [1, (2, 3)]}},
            {"seen": {"a": [1, (2, 4)], "b": torch.ones(3)}, "epoch": -0.0},
            {"seen": [torch.zeros(2)]},
        ]
        run = Watched(directory / str(stage), stage, "fp32", client_state=lambda states=states: states[0])
        # DeepSpeed is asked to save the same.
        save = run.engine.save_checkpoint
        run.engine.save_checkpoint = lambda *args, save=save, states=states, **options: save(
            *args, client_state=states[0], **options
        )
        follow(run, dict.fromkeys(range(2, 7), lambda states=states: states.pop(0)))


@scenario
def what_is_not_looked_at_is_found_when_a_checkpoint_is_due(directory: Path) -> None:
    for stage in (1, 2, 3):
        run = Watched(directory / str(stage), stage, "fp32", save_every=4)
        with said() as lines, recordings() as calls:
            run.train(3)
            assert len(calls) == 2
            # Nobody does this; it stands for whatever is not known to change.
            parameter = run.engine.module.first.weight
            run.engine.param_names[parameter] = "renamed"
            run.train(1)
            assert 4 in run.check_slots()
            run.train(2)
        warnings = [line for line in lines if "snapshots take longer" in line]
        with on_all_ranks():
            if keeps_model(stage):
                # From there on each step is recorded.
                assert len(calls) == 5, calls
                assert len(warnings) == 1, warnings
                assert "param_shapes" in warnings[0], warnings
            else:
                assert len(calls) == 3, calls
                assert not warnings, warnings
        run.settle()
        run.guard.close()


class Odd(torch.Tensor):
    """Says nothing of what it holds."""


@scenario
def tensors_of_another_kind_are_recorded_each_time(directory: Path) -> None:
    model = SmallNet()
    model.register_buffer("odd", torch.ones(3).as_subclass(Odd))
    with said() as lines, recordings() as calls:
        run = Watched(directory, 0, "fp32", engine=engine_of(model, 0))
        for _ in range(4):
            run.train(1)
        run.guard.close()
    with on_all_ranks():
        # Two when the guard is attached, to learn and to compare.
        assert len(calls) == 6, calls
        assert sum("cannot be watched" in line for line in lines) == 1, lines


@scenario
def what_is_not_known_is_recorded_each_time(directory: Path) -> None:
    with said() as lines, recordings() as calls:
        run = Watched(directory, 2, "fp32")
        run.engine.module.universal_checkpoint_info = {"a": 1}
        follow(run, {4: lambda: run.engine.module.universal_checkpoint_info.update(a=2)})
    with on_all_ranks():
        assert len(calls) == (8 if keeps_model(2) else 2), calls
        assert any("universal_checkpoint_info" in line for line in lines) == keeps_model(2), lines


def pipeline_of_two_replicas(stage: int) -> Any:
    """One stage, which both ranks have; DeepSpeed lets rank 0 alone write its layers."""
    torch.manual_seed(1)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    model = PipelineModule(layers, num_stages=1, loss_fn=nn.functional.mse_loss)
    config = ds_config(stage, "fp32")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


@scenario
def on_a_node_of_its_own_a_replica_keeps_the_layers_of_a_pipeline(directory: Path) -> None:
    for stage in (0, 1):
        engine = pipeline_of_two_replicas(stage)
        rank = dist.get_rank()
        with mock.patch.object(enlisting, "_host", lambda rank=rank: (f"node{rank}", "")):
            berth = enlisting.find_berth(engine)
        generator = torch.Generator().manual_seed(rank)
        files = rank_files.RankFiles(
            engine,
            rank,
            keeps_model=berth.keeps_model,
            shared_params=berth.shared_params,
            scripts_folder=directory,
            tracked={},
            client_state=None,
        )
        for step in range(1, 4):
            batches = [torch.randn(2, WIDTH, generator=generator) for _ in range(ACCUMULATION_STEPS)]
            engine.train_batch(data_iter=iter([(batch, batch) for batch in batches]))
            # That what is followed is what is written is compared in here.
            files.collect(must_prove=step > 1)
        recorded = recording.record(
            engine,
            {},
            keeps_model=berth.keeps_model,
            shared_params=berth.shared_params,
            scripts_folder=directory,
        )
        saved = directory / f"stage{stage}"
        engine.save_checkpoint(str(saved), tag="tag")
        dist.barrier()
        layers = {"layer_00-model_states.pt", "layer_02-model_states.pt", "mp_rank_00_model_states.pt"}
        with on_all_ranks():
            assert berth.nodes == (0, 1)
            assert berth.keeps_model == (rank == 1)
            assert layers <= recorded.keys(), recorded.keys()
            assert engine.grid.data_parallel_id == rank
            theirs = {name: torch.load(saved / "tag" / name, weights_only=False) for name in recorded}
            num_tensors = {name: same(state, theirs[name], (name,), {}) for name, state in recorded.items()}
            assert num_tensors["layer_00-model_states.pt"] == num_tensors["layer_02-model_states.pt"] == 2


logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
assert ACCUMULATION_STEPS > 1
if __name__ == "__main__":
    run_all()
