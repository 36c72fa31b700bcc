"""What DeepSpeed's writers would give, without calling them at every step.

Of what they write, most of the time goes into what never changes: names and shapes of all parameters. That is
learned from a recording, and looked up again as soon as the module is another one. All the rest is asked of
the engine each time, by the calls that the writers make. From time to time a recording is made as well and
compared; where they differ, and where DeepSpeed writes what is not known here, each step is recorded.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import is_
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from ds_toolkit.guardian.pieces import PieceKind
from ds_toolkit.resilience.leaves import leaves
from ds_toolkit.resilience.module_watch import ModuleWatch, Moved
from ds_toolkit.resilience.recording import kind_of, put_placeholders
from ds_toolkit.resilience.reporting import logger

_PROVE_EVERY = 100
STATIC = frozenset(
    {
        "buffer_names",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "ds_version",
    }
)
# Asked of the module and of the optimizer.
ASKED = frozenset({"module", "optimizer", "frozen_param_fragments"})
ABSENT = frozenset({"data_sampler", "random_ltd"})
LOOKED_UP: Mapping[str, Callable[[Any], object]] = {
    "lr_scheduler": lambda engine: None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict(),
    "skipped_steps": lambda engine: engine.skipped_steps,
    "global_steps": lambda engine: engine.global_steps,
    "global_samples": lambda engine: engine.global_samples,
    "ds_config": lambda engine: engine.config,
}
OF_THE_OPTIMIZER = frozenset({"optimizer_state_dict", "ds_config", "ds_version"})
# Where ZeRO's optimizers keep which parameters they train, in the order of `param_shapes`.
GROUPS = ("round_robin_bit16_groups", "bf16_groups", "bit16_groups", "fp16_groups")

States = dict[str, dict[str, Any]]


@dataclass
class Followed:
    """The content of the files, and what of it is known to be as the last time.

    Attributes:
        states: by the file's name.
        unchanged: by the file's name, the keys under which nothing is other than the last time.
        has_same_module: whether no parameter or buffer of the module is another one, or elsewhere.
    """

    states: States
    unchanged: dict[str, frozenset[str]] = field(default_factory=dict)
    has_same_module: bool = False


class Follower:
    """Gives the state of one engine, again and again."""

    def __init__(self, engine: Any, record: Callable[[Mapping[str, object]], States]) -> None:
        """Nothing is learned yet.

        Args:
            engine: a DeepSpeed engine.
            record: gives the files as DeepSpeed's writers do, of a client state.
        """
        self._engine = engine
        self._record = record
        self._learned: _Learned | None = None
        self._records_only = False
        self._num_followed = 0

    def states(self, client_state: Mapping[str, object], *, must_prove: bool) -> Followed:
        """The files as they are now.

        Args:
            client_state: goes into DeepSpeed's model file.
            must_prove: compare with a recording, whenever that was done last.
        """
        learned = self._learned
        moved = Moved.STRUCTURE if learned is None else learned.look()
        if learned is None or moved is Moved.STRUCTURE:
            return Followed(self._learn(client_state))
        followed = learned.follow(client_state, moved)
        must_prove = must_prove or self._num_followed % _PROVE_EVERY == 0
        self._num_followed += 1
        if must_prove:
            recorded = self._record(client_state)
            place = difference(followed.states, recorded)
            if place is not None:
                logger.warning("snapshots take longer: %s changed where nothing was to change", place)
                self._stop()
                return Followed(recorded)
        return followed

    def _learn(self, client_state: Mapping[str, object]) -> States:
        recorded = self._record(client_state)
        if self._records_only:
            return recorded
        unknown = _unknown(self._engine, recorded, client_state)
        if unknown is None:
            self._learned = _Learned(self._engine, recorded, client_state)
            self._num_followed = 0
            if self._learned.look() is not Moved.NOTHING:
                unknown = "the module holds tensors of a kind that cannot be watched"
        if unknown is not None:
            logger.info("each snapshot asks DeepSpeed for its whole state: %s", unknown)
            self._stop()
        return recorded

    def _stop(self) -> None:
        self._records_only = True
        self._learned = None


class _Learned:
    """A recording, and what tells whether it still holds."""

    def __init__(self, engine: Any, recorded: States, client_state: Mapping[str, object]) -> None:
        self._engine = engine
        self._states = {
            name: {key: value for key, value in state.items() if key not in client_state}
            for name, state in recorded.items()
        }
        self._watch = ModuleWatch(engine.module)
        self._module, self._optimizer = engine.module, engine.optimizer
        self._groups = self._groups_now()
        fragments = next((state["frozen_param_fragments"] for state in self._models()), None)
        self._frozen = (
            None
            if fragments is None
            else [
                (engine.param_names[parameter], parameter)
                for parameter in self._watch.parameters
                if engine.param_names.get(parameter) in fragments
            ]
        )

    def look(self) -> Moved:
        engine = self._engine
        groups = self._groups_now()
        if (
            engine.module is not self._module
            or engine.optimizer is not self._optimizer
            or len(groups) != len(self._groups)
            or not all(map(is_, groups, self._groups))
        ):
            return Moved.STRUCTURE
        return self._watch.look()

    def follow(self, client_state: Mapping[str, object], moved: Moved) -> Followed:
        is_same = moved is Moved.NOTHING and self._watch.is_plain
        if not is_same:
            for state in self._models():
                module = self._engine.module_state_dict()
                put_placeholders(self._engine, module)
                state["module"] = module
        states, unchanged = {}, {}
        for name, learned in self._states.items():
            state = {key: self._value(key, value) for key, value in learned.items()}
            if kind_of(name) is PieceKind.MODEL:
                state.update(client_state)
            states[name] = state
            unchanged[name] = STATIC | {"module"} if is_same else STATIC
        return Followed(states, unchanged, has_same_module=moved is Moved.NOTHING)

    def _value(self, key: str, learned: Any) -> Any:
        if key in LOOKED_UP:
            return LOOKED_UP[key](self._engine)
        if key in {"optimizer", "optimizer_state_dict"} and learned is not None:
            return self._engine.optimizer.state_dict()
        if key == "frozen_param_fragments" and self._frozen is not None:
            fragment_of = self._engine._get_param_fragment_func
            return type(learned)((name, fragment_of(parameter)) for name, parameter in self._frozen)
        return learned

    def _models(self) -> list[dict[str, Any]]:
        return [state for name, state in self._states.items() if kind_of(name) is PieceKind.MODEL]

    def _groups_now(self) -> list[object]:
        groups = (getattr(self._engine.optimizer, name, None) or () for name in GROUPS)
        return list(chain.from_iterable(chain.from_iterable(groups)))


def _unknown(engine: Any, recorded: States, client_state: Mapping[str, object]) -> str | None:
    """What of a recording is not known to be learned or looked up; None if all is."""
    if type(engine) is not DeepSpeedEngine or engine.has_moe_layers:
        return f"{type(engine).__name__} is another engine or has experts"
    known = STATIC | ABSENT | LOOKED_UP.keys() | ASKED
    kinds = [kind_of(name) for name in recorded]
    for (name, state), kind in zip(recorded.items(), kinds, strict=True):
        if kind not in {PieceKind.MODEL, PieceKind.OPTIMIZER} or kinds.count(kind) > 1:
            return name
        known_here = known if kind is PieceKind.MODEL else OF_THE_OPTIMIZER
        for key in state.keys() - client_state.keys() - known_here:
            return f"{name}: {key}"
        for key in ABSENT & state.keys():
            if state[key] is not None:
                return f"{name}: {key}"
    return None


def difference(mine: Any, theirs: Any, place: str = "") -> str | None:
    """Where two states differ, or cannot be compared; None if they are alike."""
    if mine is theirs:
        return None
    seen = leaves(mine)
    if seen is not None and seen == leaves(theirs):
        return None
    if isinstance(mine, dict) and isinstance(theirs, dict) and list(mine) == list(theirs):
        for key, value in mine.items():
            found = difference(value, theirs[key], f"{place}.{key}" if place else str(key))
            if found is not None:
                return found
        return None if type(mine) is type(theirs) else place
    if seen is None:
        try:
            return None if pickle.dumps(mine) == pickle.dumps(theirs) else place
        except Exception:
            return place
    return place or "the files"
