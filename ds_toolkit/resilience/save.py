"""One checkpoint, written by all ranks and committed by rank 0; it succeeds for all or fails for all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.runtime.pipe.module import PipelineModule

from ds_toolkit.checkpoint import commit
from ds_toolkit.checkpoint.expiry import delete_expired
from ds_toolkit.checkpoint.manifest import Manifest, check_tag
from ds_toolkit.config.guard_settings import GuardSettings
from ds_toolkit.errors import ToolkitError
from ds_toolkit.resilience import agreement
from ds_toolkit.resilience.capture import (
    DEEPSPEED_STATE_KEYS,
    RECOVERY_SCRIPTS,
    run_shape,
    software_versions,
    write_shards,
)
from ds_toolkit.resilience.rank_state import (
    Stateful,
    buffer_digests,
    own_buffers,
    random_states,
    save_rank_state,
    tracked_states,
)
from ds_toolkit.resilience.reporting import logger

PERIODIC = "periodic"


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that this run has committed.

    Attributes:
        tag: its name.
        step: optimizer steps that it holds.
        total_bytes: size of all its files.
        stall_seconds: how long the training loop waited for it on this rank.
        in_background: whether the guardian wrote it, while training went on.
    """

    tag: str
    step: int
    total_bytes: int
    stall_seconds: float
    in_background: bool = False


def save(
    engine: Any,
    directory: Path,
    tag: str,
    *,
    protect: bool,
    micro_steps: int,
    tracked: Mapping[str, Stateful],
    client_state: Callable[[], Mapping[str, object]] | None,
) -> Manifest:
    """Write and commit a checkpoint of the engine's present step. Collective.

    Args:
        engine: a DeepSpeed engine between two steps.
        directory: shared by all ranks.
        tag: name of the checkpoint; one of that name is replaced in one instant.
        protect: whether it is kept for ever.
        micro_steps: taken of an unfinished gradient accumulation.
        tracked: objects whose state each rank saves.
        client_state: gives what goes into DeepSpeed's client state.

    Raises:
        ToolkitError: on all ranks alike. What was written is removed; earlier checkpoints and `latest` are
            as they were.
    """
    partial = _agreed(directory, tag, int(engine.global_steps), protect)
    # Random states first: nothing below may draw from a generator unnoticed.
    rank_state = agreement.together("collect the state of this rank", lambda: _rank_state(tracked))
    rank_state["buffers"] = _own_buffers(engine)
    values = agreement.together("collect the client state", lambda: checked_client_state(client_state))
    try:
        agreement.only_on_rank_0(f"begin the checkpoint `{tag}`", lambda: commit.begin(partial))
        agreement.together(
            f"write the checkpoint `{tag}`", lambda: _write(engine, partial, values, rank_state)
        )
        return agreement.only_on_rank_0(
            f"commit the checkpoint `{tag}`", lambda: _commit(partial, protect, micro_steps)
        )
    except ToolkitError:
        # All ranks have stopped writing: `together` has heard from each of them.
        if agreement.rank() == 0:
            commit.abandon(partial)
        raise


def delete_old_tags(
    directory: Path, settings: GuardSettings, *, newest: Manifest, broken: Collection[str]
) -> None:
    """Delete the tags that `keep_last` and `keep_every` no longer cover after a commit; for rank 0 alone.

    A failure is logged and ends no training: the new checkpoint is safe, an old one still takes space.
    """
    for line in delete_expired(
        directory,
        newest=newest,
        keep_last=settings.keep_last,
        keep_every=settings.keep_every,
        broken=broken,
    ):
        logger.warning("%s", line)


def _agreed(directory: Path, tag: str, step: int, protect: bool) -> commit.PartialTag:
    agreement.same("the checkpoint they ask for", (str(directory), tag, step, protect))
    # After the exchange: a rank that raised before it would leave the others waiting.
    check_tag(tag)
    return commit.PartialTag(directory, tag, agreement.broadcast(commit.new_save_id()))


def _rank_state(tracked: Mapping[str, Stateful]) -> dict[str, Any]:
    return {"random": random_states(), "tracked": tracked_states(tracked)}


def _own_buffers(engine: Any) -> dict[str, torch.Tensor]:
    """The buffers in which this rank differs from the rank that writes its model file. Collective."""
    cell = int(engine.checkpoint_mp_rank)
    writes = dist.get_rank(group=engine.data_parallel_group) == 0
    digests = agreement.together("look at the buffers", lambda: buffer_digests(engine))
    written = {
        other_cell: other_digests
        for other_cell, other_writes, other_digests in agreement.gather((cell, writes, digests))
        if other_writes
    }
    # Layer files of a pipeline may be written by any data-parallel rank (parallel_write).
    in_model_file = {} if isinstance(engine.module, PipelineModule) else written[cell]
    return own_buffers(engine, digests, in_model_file)


def checked_client_state(client_state: Callable[[], Mapping[str, object]] | None) -> Mapping[str, object]:
    """What the user's function gives.

    Raises:
        ToolkitError: it uses a key of DeepSpeed's own.
    """
    values = {} if client_state is None else client_state()
    for key in sorted(DEEPSPEED_STATE_KEYS & values.keys()):
        # It would overwrite a part of the checkpoint itself.
        raise ToolkitError(
            f"client_state uses the key `{key}`, which is DeepSpeed's own", fix="rename the key"
        )
    return values


def _write(
    engine: Any,
    partial: commit.PartialTag,
    client_state: Mapping[str, object],
    rank_state: Mapping[str, Any],
) -> None:
    """Write, flush and seal this rank's files under the hidden name."""
    names = write_shards(engine, partial.folder, client_state)
    names.append(save_rank_state(partial.folder, agreement.rank(), rank_state))
    if agreement.rank() == 0:
        for script in RECOVERY_SCRIPTS:
            # To where people look for it; by rename, so that a full disk cannot leave it cut.
            if (partial.folder / script).exists():
                (partial.folder / script).replace(partial.directory / script)
    commit.seal(partial, agreement.rank(), int(engine.global_steps), run_shape(engine), names)


def _commit(partial: commit.PartialTag, protect: bool, micro_steps: int) -> Manifest:
    return commit.commit(
        partial, kind=PERIODIC, protected=protect, micro_steps=micro_steps, versions=software_versions()
    )
