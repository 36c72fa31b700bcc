"""Which checkpoint a run continues from, decided once for all ranks, and how it is brought back."""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ds_toolkit.checkpoint.manifest import RunShape
from ds_toolkit.checkpoint.newest import Candidate, PassedOver, survey
from ds_toolkit.checkpoint.shards import open_shard
from ds_toolkit.checkpoint.sweeping import sweep
from ds_toolkit.checkpoint.verify import verify_crcs
from ds_toolkit.errors import ToolkitError
from ds_toolkit.findings import Finding
from ds_toolkit.resilience import agreement
from ds_toolkit.resilience.capture import DEEPSPEED_STATE_KEYS, read_shards
from ds_toolkit.resilience.rank_state import (
    Stateful,
    load_rank_state,
    restore_buffers,
    restore_newest_random_states,
)
from ds_toolkit.resilience.reporting import logger, on_rank_0


@dataclass(frozen=True)
class Resumed:
    """What a run continues from.

    Attributes:
        tag: name of the checkpoint.
        step: optimizer steps that it holds.
        kind: why it was written: `periodic`; `last-words` because a rank died; `memory` out of the snapshots
            of a run that died together with its guardian; `final` at an end without `close`; or `deepspeed`
            if `engine.save_checkpoint` wrote it.
        client_state: what the `client_state` callable gave when it was saved.
    """

    tag: str
    step: int
    kind: str
    client_state: dict[str, object] = field(default_factory=dict)


def choose(
    directory: Path, verify: Literal["crc32", "sizes"], *, allow_fresh: bool
) -> tuple[Candidate | None, list[str]]:
    """The newest checkpoint that verifies, and the tags that were passed over on the way to it. Collective.

    Every rank reads its part of the files, so that the time to verify shrinks with their number.

    Raises:
        ToolkitError: there are checkpoints, none of them is whole, and `allow_fresh` is not set.
    """
    candidates, passed_over = agreement.only_on_rank_0(
        "look for checkpoints", lambda: _tidy_survey(directory)
    )
    chosen = None
    for candidate in candidates:
        findings = _verify(candidate, verify)
        if not findings:
            chosen = candidate
            break
        passed_over.append(PassedOver(candidate.tag, tuple(findings)))
    for broken in passed_over:
        on_rank_0(logging.WARNING, "checkpoint passed over: %s", broken)
    if chosen is None and passed_over and not allow_fresh:
        raise ToolkitError(
            "there are checkpoints, and none of them is whole",
            where=directory,
            why="\n".join(str(broken) for broken in passed_over),
            fix="restore one of them, give another directory, or start from nothing with "
            "resume(allow_fresh=True)",
        )
    return chosen, [broken.tag for broken in passed_over]


def refuse_later_steps(directory: Path, step: int) -> None:
    """Keep a run that never asked to resume from writing among checkpoints of a longer one; for rank 0 alone.

    Raises:
        ToolkitError: the directory holds a checkpoint of this step or a later one.
    """
    candidates, _ = _tidy_survey(directory)
    if candidates and candidates[0].step >= step:
        raise ToolkitError(
            f"the directory holds a checkpoint of step {candidates[0].step}, and this run is at {step}",
            where=candidates[0].folder,
            why="a later resume() would choose it, and keep_last would count it",
            fix="call guard.resume() before the training loop, or give an empty directory",
        )


def check_shape(candidate: Candidate, shape: RunShape) -> None:
    """Refuse, before anything is loaded, a checkpoint that DeepSpeed cannot load into this run.

    Raises:
        ToolkitError: world size, ZeRO stage or precision differ.
    """
    if candidate.manifest is None:
        return
    differences = candidate.manifest.shape.differences(shape, "in the checkpoint", "in this run")
    if differences:
        raise ToolkitError(
            f"the checkpoint `{candidate.tag}` is of another kind of run",
            where=candidate.folder,
            why="; ".join(differences),
            fix="start with the same number of ranks and the same ZeRO stage and precision, or give "
            "another directory; to take only the weights, consolidate them and load them into the model",
        )


def load(engine: Any, candidate: Candidate, tracked: Mapping[str, Stateful]) -> Resumed:
    """Bring an engine, tracked objects and random states back to a checkpoint. Collective.

    Raises:
        ToolkitError: a file cannot be loaded, or DeepSpeed ends at another step than the tag promises.
    """
    # Whatever can be found out alone is found out before DeepSpeed's loader, which waits for all ranks.
    agreement.together("open the shards of this rank", lambda: _open_own_shards(candidate))
    client_state = agreement.together(
        "load the checkpoint", lambda: read_shards(engine, candidate.folder.parent, candidate.tag)
    )
    if engine.global_steps != candidate.step:
        raise ToolkitError(
            f"the checkpoint `{candidate.tag}` is not of the step that it promises",
            where=candidate.folder,
            why=f"the engine is at step {engine.global_steps} after loading it, and not at {candidate.step}",
        )
    if candidate.manifest is not None and candidate.manifest.micro_steps:
        logger.warning(
            "checkpoint %s was written %d micro-steps after an optimizer step: tracked objects are ahead",
            candidate.tag,
            candidate.manifest.micro_steps,
        )
    agreement.together("restore the state of this rank", lambda: _restore_rank(engine, candidate, tracked))
    return Resumed(
        tag=candidate.tag,
        step=candidate.step,
        kind=candidate.kind,
        client_state={key: value for key, value in client_state.items() if key not in DEEPSPEED_STATE_KEYS},
    )


def _tidy_survey(directory: Path) -> tuple[list[Candidate], list[PassedOver]]:
    if directory.exists():
        for line in sweep(directory):
            logger.warning("%s", line)
    return survey(directory)


def _verify(candidate: Candidate, verify: Literal["crc32", "sizes"]) -> list[Finding]:
    manifest = candidate.manifest
    if manifest is None or verify == "sizes":
        # `survey` has compared the sizes, or has read the layout where there is no manifest.
        return []
    part = manifest.files[agreement.rank() :: agreement.world_size()]
    found = agreement.gather(
        agreement.together("verify a checkpoint", lambda: verify_crcs(candidate.folder, part))
    )
    return [finding for findings in found for finding in findings]


def _open_own_shards(candidate: Candidate) -> None:
    for file in candidate.manifest.files if candidate.manifest else ():
        path = candidate.folder / file.name
        if file.rank == agreement.rank() and path.suffix == ".pt" and zipfile.is_zipfile(path):
            open_shard(path, file.size_bytes)


def _restore_rank(engine: Any, candidate: Candidate, tracked: Mapping[str, Stateful]) -> None:
    state = load_rank_state(candidate.folder, agreement.rank())
    if state is None:
        logger.warning(
            "checkpoint %s was written without ds_toolkit: random states and tracked objects start afresh",
            candidate.tag,
        )
        return
    restore_buffers(engine, state["buffers"])
    for name, tracked_object in tracked.items():
        if name in state["tracked"]:
            tracked_object.load_state_dict(state["tracked"][name])
        else:
            logger.warning("checkpoint %s has no state of `%s`: it starts afresh", candidate.tag, name)
    for name in state["tracked"].keys() - tracked.keys():
        logger.warning("checkpoint %s has a state of `%s`, which is not tracked now", candidate.tag, name)
    # Last of all: loading itself may have drawn random numbers.
    restore_newest_random_states(engine, state["random"])
