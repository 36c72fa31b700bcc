"""DeepSpeed's own files, written by DeepSpeed's own code into a folder of our choice.

`engine.save_checkpoint` is not used: its barriers and its write of `latest` stand between the writers, so a
rank whose disk is full would leave all others waiting, with `latest` moved. What it calls is called here one
by one; tests/contract lists these names.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

import ds_toolkit
from ds_toolkit.checkpoint.manifest import RunShape
from ds_toolkit.errors import ToolkitError
from ds_toolkit.resilience.writing import written

RECOVERY_SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")
"""Scripts that DeepSpeed lays beside its checkpoints."""

DEEPSPEED_STATE_KEYS = frozenset(
    {
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "ds_config",
        "ds_version",
        "num_experts",
        "ds_autoep_layers",
        "autoep_layers",
        "universal_checkpoint_info",
        "folding",
    }
)
"""Keys of DeepSpeed's client state that are DeepSpeed's own."""


class ShardWriter(TorchCheckpointEngine):  # type: ignore[misc]
    """Writes as DeepSpeed does, remembers the files, and explains a failure."""

    def __init__(self, config: object) -> None:
        super().__init__(config)
        self.paths: list[Path] = []

    def save(self, state_dict: object, path: str) -> None:
        """Write one file (DeepSpeed calls this by position and by these names)."""
        with written(Path(path)):
            super().save(state_dict, path)
        self.paths.append(Path(path))


def write_shards(engine: Any, folder: Path, client_state: Mapping[str, object]) -> list[str]:
    """Write this rank's files of a DeepSpeed checkpoint. Collective at stage 3; local otherwise.

    Args:
        engine: a DeepSpeedEngine or PipelineEngine between two steps.
        folder: where to write; it exists.
        client_state: goes into DeepSpeed's model file.

    Returns:
        Names of the files inside the folder.

    Raises:
        ToolkitError: a file could not be written (disk full, unwritable); this rank has taken part in the
            collectives all the same.
    """
    writer = ShardWriter(engine._config)
    with _written_by(engine, writer), _partitioned(engine.optimizer):
        # An empty tag puts the files into the folder itself.
        if engine.has_moe_layers:
            engine._save_moe_checkpoint(os.fspath(folder), "", client_state=dict(client_state))
        else:
            engine._save_checkpoint(os.fspath(folder), "", client_state=dict(client_state))
        if engine.save_zero_checkpoint:
            engine._save_zero_checkpoint(os.fspath(folder), "")
    names = [path.relative_to(folder).as_posix() for path in writer.paths]
    return names + _copy_swapped_state(engine, folder)


def read_shards(engine: Any, directory: Path, tag: str) -> dict[str, Any]:
    """Load a tag into the engine and return DeepSpeed's client state. Collective.

    Raises:
        ToolkitError: DeepSpeed did not find the tag.
    """
    # A config with `checkpoint.writer` selects an engine that cannot load what it saved.
    with _written_by(engine, ShardWriter(engine._config)):
        path, client_state = engine.load_checkpoint(os.fspath(directory), tag=tag)
    if path is None:
        raise ToolkitError("DeepSpeed could not load the checkpoint", where=directory / tag)
    return dict(client_state)


def software_versions() -> dict[str, str]:
    """Of what writes a checkpoint, for its manifest."""
    return {
        "ds_toolkit": ds_toolkit.__version__,
        "deepspeed": str(deepspeed.__version__),
        "torch": torch.__version__,
    }


def run_shape(engine: Any) -> RunShape:
    """What a checkpoint of this engine has in common with the runs that can load it."""
    return RunShape(
        world_size=int(dist.get_world_size()),
        dp_world_size=int(engine.dp_world_size),
        mp_world_size=int(engine.mp_world_size),
        zero_stage=int(engine.zero_optimization_stage()),
        precision="bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32",
    )


@contextlib.contextmanager
def _written_by(engine: Any, writer: ShardWriter) -> Iterator[None]:
    configured = engine.checkpoint_engine
    engine.checkpoint_engine = writer
    try:
        yield
    finally:
        engine.checkpoint_engine = configured


@contextlib.contextmanager
def _partitioned(optimizer: Any) -> Iterator[None]:
    if hasattr(optimizer, "checkpoint_event_prologue"):
        optimizer.checkpoint_event_prologue()
    try:
        yield
    finally:
        # Stage 3 gathers its persistent parameters here: a collective that no rank may miss.
        if hasattr(optimizer, "checkpoint_event_epilogue"):
            optimizer.checkpoint_event_epilogue()


def _copy_swapped_state(engine: Any, folder: Path) -> list[str]:
    """Copy optimizer state that lies on NVMe to where `engine.load_checkpoint` looks for it."""
    if not engine.zero_nvme_offload_optimizer():
        return []
    target = folder / "offloaded_tensors" / f"rank{dist.get_rank():02d}"
    source = engine.optimizer.optimizer_swapper.swap_folder
    shutil.copytree(source, target, ignore=lambda _, names: [name for name in names if "gradient" in name])
    return [path.relative_to(folder).as_posix() for path in target.rglob("*") if path.is_file()]
