"""All that one rank puts into a checkpoint, as it is now: pickles, and the live storages they refer to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ds_toolkit.guardian.pieces import PieceKind
from ds_toolkit.resilience.following import Follower
from ds_toolkit.resilience.rank_state import (
    Stateful,
    persistent_buffers,
    random_states,
    rank_state_name,
    tracked_states,
)
from ds_toolkit.resilience.recording import kind_of, record
from ds_toolkit.resilience.save import checked_client_state
from ds_toolkit.resilience.state_pickle import Pickled, StatePickler


class RankFiles:
    """The files of one rank, collected again and again."""

    def __init__(
        self,
        engine: Any,
        rank: int,
        *,
        keeps_model: bool,
        shared_params: Mapping[str, str] | None,
        scripts_folder: Path,
        tracked: Mapping[str, Stateful],
        client_state: Callable[[], Mapping[str, object]] | None,
    ) -> None:
        self._engine = engine
        self._rank_state_name = rank_state_name(rank)
        self._keeps_model = keeps_model
        self._shared_params = shared_params
        self.scripts_folder = scripts_folder
        self._tracked = tracked
        self._client_state = client_state
        self._picklers: dict[str, StatePickler] = {}
        self._generators: dict[str, torch.Tensor] = {}
        self._buffers: dict[str, torch.Tensor] | None = None
        self._follower = Follower(engine, self._record)

    def learn(self) -> dict[str, Pickled]:
        """As `collect`, for the first time: what was learned is compared at once with a second recording.

        Raises:
            ToolkitError: as `collect`.
        """
        self.collect()
        return self.collect(must_prove=True)

    def collect(self, *, must_prove: bool = False) -> dict[str, Pickled]:
        """By file name. Not collective; between two steps.

        Args:
            must_prove: compare with all that DeepSpeed's writers give, whatever that costs.

        Raises:
            ToolkitError: something cannot be pickled, or a tracked object's state is not plain data.
        """
        # First of all: nothing below may draw from a generator unnoticed.
        random = self._steady_places(random_states())
        tracked = tracked_states(self._tracked)
        followed = self._follower.states(checked_client_state(self._client_state), must_prove=must_prove)
        unchanged = dict(followed.unchanged)
        if followed.has_same_module and self._buffers is not None:
            unchanged[self._rank_state_name] = frozenset({"buffers"})
        else:
            self._buffers = self._own_buffers()
        rank_state = {"random": random, "tracked": tracked, "buffers": self._buffers}
        states = {**followed.states, self._rank_state_name: rank_state}
        self._picklers = {name: self._picklers.get(name) or StatePickler() for name in states}
        return {
            name: self._picklers[name].pickle(state, unchanged=unchanged.get(name, ()))
            for name, state in states.items()
        }

    def kind_of(self, name: str) -> PieceKind:
        """What a file holds."""
        return PieceKind.RANK_STATE if name == self._rank_state_name else kind_of(name)

    def _record(self, client_state: Mapping[str, object]) -> dict[str, dict[str, Any]]:
        return record(
            self._engine,
            client_state,
            keeps_model=self._keeps_model,
            shared_params=self._shared_params,
            scripts_folder=self.scripts_folder,
        )

    def _own_buffers(self) -> dict[str, torch.Tensor]:
        # Any rank's model file may be the one that is loaded, so each keeps all its own buffers. At stage 3
        # each has a model file of its own.
        if self._engine.zero_optimization_partition_weights():
            return {}
        buffers = persistent_buffers(self._engine.module)
        return {name: buffer.detach() for name, buffer in buffers.items()}

    def _steady_places(self, random: dict[str, Any]) -> dict[str, Any]:
        """The same states, each in the tensor that held the last one: what moves is pickled again."""
        for name, value in random.items():
            if isinstance(value, torch.Tensor):
                kept = self._generators.setdefault(name, value)
                if kept is not value and kept.shape == value.shape:
                    kept.copy_(value)
                    random[name] = kept
        return random
