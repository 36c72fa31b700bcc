"""What DeepSpeed would write for this rank, as objects: its own writers, called with a recorder for a disk.

Nothing here is collective, so a rank may do it alone, between any two steps. (Seen at stages 0 to 3; what the
writers ask of the other ranks stands around them, in `save_checkpoint`: decision 4.)
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import logger as deepspeed_logger

from ds_toolkit.checkpoint.layout import ShardKind, parse_shard_name
from ds_toolkit.errors import ToolkitError
from ds_toolkit.guardian.pieces import PieceKind


class Recorder(TorchCheckpointEngine):  # type: ignore[misc]
    """Takes what DeepSpeed wants to be written, and keeps it."""

    def __init__(self, config: object) -> None:
        super().__init__(config)
        self.files: dict[str, dict[str, Any]] = {}

    def save(self, state_dict: dict[str, Any], path: str) -> None:
        """Keep one file's content (DeepSpeed calls this by position and by these names)."""
        self.files[Path(path).name] = state_dict

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make nothing: nothing will be written."""

    def preserves_storage_sharing(self) -> bool:
        """No: DeepSpeed would copy tensors to spare the file what they share their storage with."""
        return False


def record(
    engine: Any,
    client_state: Mapping[str, object],
    *,
    keeps_model: bool,
    shared_params: Mapping[str, str] | None,
    scripts_folder: Path,
) -> dict[str, dict[str, Any]]:
    """The content of this rank's files of a checkpoint, by file name; tensors are those of the engine.

    Args:
        engine: a DeepSpeed engine between two steps.
        client_state: goes into DeepSpeed's model file.
        keeps_model: whether the model file is wanted of a rank that by itself writes none.
        shared_params: which names are further names of a weight, for a rank that stands in for rank 0, which
            alone finds out.
        scripts_folder: where rank 0 puts DeepSpeed's recovery scripts.
    """
    recorder = Recorder(engine._config)
    with _recorded_by(engine, recorder, keeps_model=keeps_model):
        # An empty tag puts the files into the folder itself.
        folder = os.fspath(scripts_folder)
        if engine.has_moe_layers:
            engine._save_moe_checkpoint(folder, "", client_state=dict(client_state))
        elif engine.save_non_zero_checkpoint or engine.zero_optimization_partition_weights():
            engine._save_checkpoint(folder, "", client_state=dict(client_state))
        if engine.save_zero_checkpoint:
            engine._save_zero_checkpoint(folder, "")
    for name, state in recorder.files.items():
        if kind_of(name) is PieceKind.MODEL and "module" in state:
            put_placeholders(engine, state["module"])
        # None at stage 0: DeepSpeed records them for ZeRO alone.
        if shared_params is not None and state.get("shared_params") is not None:
            state["shared_params"] = dict(shared_params)
    return recorder.files


@functools.lru_cache(maxsize=64)
def kind_of(name: str) -> PieceKind:
    """What a file of this name holds.

    Raises:
        ToolkitError: DeepSpeed has a kind of file that the toolkit does not know.
    """
    file = parse_shard_name(Path(name))
    if file is None:
        raise ToolkitError("DeepSpeed writes a file that is not known", where=name)
    if file.kind is ShardKind.OPTIMIZER:
        return PieceKind.OPTIMIZER
    if file.kind is ShardKind.EXPERT:
        return PieceKind.EXPERT_OPTIMIZER if name.startswith("expp_rank_") else PieceKind.EXPERTS
    return PieceKind.MODEL


def put_placeholders(engine: Any, module: dict[str, Any] | None) -> None:
    """At stage 3, leave out of the module what the optimizer's shards hold, as a save does.

    A save partitions all parameters first, and can undo that only with the other ranks.
    """
    if not module or not engine.zero_optimization_partition_weights():
        return
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        if name in module and hasattr(parameter, "ds_id"):
            module[name] = torch.empty(0, dtype=parameter.dtype, device=parameter.device)


@contextlib.contextmanager
def _recorded_by(engine: Any, recorder: Recorder, *, keeps_model: bool) -> Iterator[None]:
    configured, writes_model = engine.checkpoint_engine, engine.save_non_zero_checkpoint
    engine.checkpoint_engine = recorder
    engine.save_non_zero_checkpoint = writes_model or keeps_model
    # Of a pipeline the layers' files are written by the rank that its grid calls the first of the stage.
    grid = engine.grid if keeps_model and isinstance(engine, PipelineEngine) else None
    dp_rank = None if grid is None else grid.data_parallel_id
    if grid is not None:
        grid.data_parallel_id = 0
    # It would say at every step that it saves.
    was_disabled, deepspeed_logger.disabled = deepspeed_logger.disabled, True
    try:
        yield
    finally:
        deepspeed_logger.disabled = was_disabled
        if grid is not None:
            grid.data_parallel_id = dp_rank
        engine.checkpoint_engine = configured
        engine.save_non_zero_checkpoint = writes_model
