"""What a tag is, in one row: taken from names, headers and the map of its weights; no tensor data is read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_toolkit.checkpoint.examination import findings_of
from ds_toolkit.checkpoint.examining.examined import ExaminedFile, ExaminedTag, examine, num_parameters_of
from ds_toolkit.checkpoint.examining.headers import STAGE_OF_CONFIG, base_state
from ds_toolkit.checkpoint.layout import ShardKind, UnsupportedLayoutError
from ds_toolkit.checkpoint.layouts.states import expert_groups
from ds_toolkit.checkpoint.tensors import CheckpointMap, Role, StoredTensor
from ds_toolkit.errors import ToolkitError
from ds_toolkit.findings import Severity

DEEPSPEED = "DeepSpeed"
TOOLKIT = "ds_toolkit"


@dataclass(frozen=True)
class TagSummary:
    """One row; None is what nothing in the tag tells.

    Attributes:
        ep_world_size: data-parallel ranks that share out the experts of a layer, of all layers the largest
            number; 1 without experts.
        is_whole: False if something is wrong (`problems`), None if DeepSpeed alone wrote it, so that there
            is no proof, True if its manifest's files are there.
        committed_by: `ds_toolkit` if it has a manifest, else `DeepSpeed`.
        kind: why it was written, as the manifest says.
        num_parameters: elements of trained and frozen weights, each tied one once.
        num_frozen: those of frozen weights.
        num_tied: further names of weights that are there already.
        num_buffers: buffers, not their elements.
        files: name and size in bytes.
        problems: why it is not whole, a sentence each.
        notes: what a reader should know besides.
        weights: the map of the weights, if they can be put together.
    """

    folder: Path
    tag: str
    step: int | None
    stage: int | None
    dp_world_size: int | None
    tp_world_size: int | None
    pp_world_size: int | None
    ep_world_size: int | None
    precision: str | None
    ds_version: str | None
    is_whole: bool | None
    committed_by: str
    kind: str | None
    created_at: str | None
    num_parameters: int | None
    num_frozen: int | None
    num_tied: int | None
    num_buffers: int | None
    files: tuple[tuple[str, int], ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    weights: CheckpointMap | None

    @property
    def num_bytes(self) -> int:
        """Sum of the sizes of the files."""
        return sum(size_bytes for _, size_bytes in self.files)


def summarize(folder: Path) -> TagSummary:
    """Read names, headers and the map of a tag.

    Raises:
        ToolkitError: the folder cannot be listed.
    """
    tag = examine(folder)
    findings = findings_of(tag)
    problems = tuple(
        f"{Path(finding.where.file or folder).name}: {finding.message}"
        for finding in findings
        if finding.severity is Severity.ERROR
    )
    weights = tag.weights if isinstance(tag.weights, CheckpointMap) else None
    notes = [*weights.notes] if weights is not None else []
    if isinstance(tag.weights, UnsupportedLayoutError):
        error = tag.weights
        notes.append(f"{error.what}: {error.why}" if error.why else error.what)
    tp_world_size, pp_world_size = _degrees(tag, weights)
    manifest = tag.manifest
    committed = TOOLKIT if manifest is not None or tag.manifest_error is not None else DEEPSPEED
    return TagSummary(
        folder=folder,
        tag=folder.resolve().name,
        step=tag.step,
        stage=_stage(tag, weights),
        dp_world_size=tag.dp_world_size,
        tp_world_size=tp_world_size,
        pp_world_size=pp_world_size,
        ep_world_size=_ep_world_size(tag),
        precision=_precision(tag),
        ds_version=_first(tag, "DeepSpeed version"),
        is_whole=False if problems else (True if manifest is not None else None),
        committed_by=committed,
        kind=manifest.kind if manifest is not None else None,
        created_at=manifest.created_at if manifest is not None else None,
        num_parameters=_num_parameters(tag, weights),
        num_frozen=_num_elements(weights, Role.FROZEN),
        num_tied=len(weights.aliases) if weights is not None else None,
        num_buffers=len(_of_role(weights, Role.BUFFER)) if weights is not None else None,
        files=tuple(_all_files(folder)),
        problems=problems,
        notes=tuple(notes),
        weights=weights,
    )


def unreadable(folder: Path, error: ToolkitError | OSError) -> TagSummary:
    """The row of a tag that cannot even be listed."""
    why = error.what if isinstance(error, ToolkitError) else f"it cannot be read: {error.strerror}"
    degrees = ("dp_world_size", "tp_world_size", "pp_world_size", "ep_world_size")
    numbers = dict.fromkeys(("step", "stage", *degrees))
    counts = dict.fromkeys(("num_parameters", "num_frozen", "num_tied", "num_buffers"))
    return TagSummary(
        folder=folder,
        tag=folder.resolve().name,
        precision=None,
        ds_version=None,
        is_whole=False,
        committed_by=DEEPSPEED,
        kind=None,
        created_at=None,
        files=(),
        problems=(why,),
        notes=(),
        weights=None,
        **numbers,
        **counts,
    )


def _all_files(folder: Path) -> list[tuple[str, int]]:
    """Whatever lies in the tag, the manifest and the files of other tools included."""
    return sorted(
        (path.relative_to(folder).as_posix(), path.stat().st_size)
        for path in folder.rglob("*")
        if path.is_file()
    )


def _degrees(tag: ExaminedTag, weights: CheckpointMap | None) -> tuple[int | None, int | None]:
    """Tensor- and pipeline-parallel world size."""
    if weights is not None:
        return weights.tp_world_size, weights.pp_world_size
    layout = next((file.header.of_kind.get("parallel layout") for file in tag.of_kind(ShardKind.MODEL)), None)
    if not isinstance(layout, dict):
        return None, None
    return layout.get("tp_degree"), layout.get("pp_degree")


def _ep_world_size(tag: ExaminedTag) -> int | None:
    """Groups of experts' parameters are called after it (deepspeed/moe/layer.py, `expert_group_name`)."""
    sizes = []
    for file in tag.files:
        for key in ("optimizer_state_dict", "optimizer"):
            state = file.root.get(key)
            state = state if isinstance(state, dict) else {}
            for group in expert_groups(base_state(state) or state):
                match = re.fullmatch(r"ep_size_(\d{1,9})", group or "", re.ASCII)
                sizes += [int(match[1])] if match else []
    if tag.of_kind(ShardKind.EXPERT) or not any(file.root for file in tag.of_kind(ShardKind.MODEL)):
        return max(sizes, default=None)
    return max(sizes, default=1)


def _stage(tag: ExaminedTag, weights: CheckpointMap | None) -> int | None:
    if weights is not None:
        return weights.stage
    if tag.manifest is not None:
        return tag.manifest.shape.zero_stage
    stage = _first(tag, STAGE_OF_CONFIG)
    return stage if isinstance(stage, int) else None


def _precision(tag: ExaminedTag) -> str | None:
    if tag.manifest is not None:
        return tag.manifest.shape.precision
    configs = [file.root["ds_config"] for file in tag.files if isinstance(file.root.get("ds_config"), dict)]
    if not configs:
        return None
    for name in ("bf16", "fp16"):
        section = configs[0].get(name)
        if isinstance(section, dict) and section.get("enabled"):
            return name
    return "fp32"


def _num_parameters(tag: ExaminedTag, weights: CheckpointMap | None) -> int | None:
    if weights is not None:
        return sum(
            tensor.num_elements for tensor in weights.tensors.values() if tensor.role is not Role.BUFFER
        )
    # Of a model that is split in cells, nothing says which tensors are whole in each of them.
    models: list[ExaminedFile] = tag.of_kind(ShardKind.MODEL)
    return num_parameters_of(models[0]) if models and tag.num_cells == 1 else None


def _of_role(weights: CheckpointMap, role: Role) -> list[StoredTensor]:
    return [tensor for tensor in weights.tensors.values() if tensor.role is role]


def _num_elements(weights: CheckpointMap | None, role: Role) -> int | None:
    return None if weights is None else sum(tensor.num_elements for tensor in _of_role(weights, role))


def _first(tag: ExaminedTag, fact: str) -> Any:
    return next((file.header.of_tag[fact] for file in tag.files if fact in file.header.of_tag), None)
