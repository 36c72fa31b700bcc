"""All that one rank puts into a checkpoint, as it is now: pickles, and the live storages they refer to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deepspeed.runtime.pipe.module import PipelineModule

from ds_toolkit.guardian.pieces import PieceKind
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

    def collect(self) -> dict[str, Pickled]:
        """By file name. Not collective; between two steps.

        Raises:
            ToolkitError: something cannot be pickled, or a tracked object's state is not plain data.
        """
        # First of all: nothing below may draw from a generator unnoticed.
        rank_state = self._rank_state()
        states = record(
            self._engine,
            checked_client_state(self._client_state),
            keeps_model=self._keeps_model,
            shared_params=self._shared_params,
            scripts_folder=self.scripts_folder,
        )
        states[self._rank_state_name] = rank_state
        self._picklers = {name: self._picklers.get(name) or StatePickler() for name in states}
        return {name: self._picklers[name].pickle(state) for name, state in states.items()}

    def kind_of(self, name: str) -> PieceKind:
        """What a file holds."""
        return PieceKind.RANK_STATE if name == self._rank_state_name else kind_of(name)

    def _rank_state(self) -> dict[str, Any]:
        states = {"random": random_states(), "tracked": tracked_states(self._tracked)}
        # Any rank's model file may be the one that is loaded, so each keeps all its own buffers. At stage 3
        # each has a model file of its own.
        if self._engine.zero_optimization_partition_weights():
            return {**states, "buffers": {}}
        buffers = persistent_buffers(self._engine.module)
        return {**states, "buffers": {name: buffer.detach() for name, buffer in buffers.items()}}


def is_pipeline(engine: Any) -> bool:
    """Whether DeepSpeed writes a file for each layer."""
    return isinstance(engine.module, PipelineModule)
