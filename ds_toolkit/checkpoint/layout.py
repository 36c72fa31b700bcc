"""Names of DeepSpeed's checkpoint files, and the folder that a tag means."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from ds_toolkit.errors import ToolkitError

LATEST = "latest"
# DeepSpeed's converter to universal checkpoints writes this one, beside `latest` or in a folder of its own.
LATEST_UNIVERSAL = "latest_universal"
# In a universal checkpoint, which keeps each parameter in a folder of its own.
UNIVERSAL_FOLDER = "zero"


class ShardKind(Enum):
    """What a checkpoint file holds."""

    MODEL = "model states"
    OPTIMIZER = "optimizer states"
    LAYER = "pipeline layer"
    EXPERT = "experts"
    PARAMETER = "universal parameter"


# DeepSpeed's engine makes these names in `_get_ckpt_name`, `_get_optimizer_ckpt_name` and
# `_get_expert_ckpt_name`, its pipeline module in `ckpt_layer_path`. `bf16_` stands before optimizer
# states only.
_PATTERNS = (
    (ShardKind.MODEL, r"mp_rank_(?P<mp>\d+)_model_states\.pt"),
    (ShardKind.MODEL, r"zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt"),
    # Version 0.4 wrote no underscore before `optim`.
    (ShardKind.OPTIMIZER, r"(?P<bf16>bf16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_?optim_states\.pt"),
    (ShardKind.EXPERT, r"(?:layer_\d+_)?expert_\d+_mp_rank_(?P<mp>\d+)_model_states\.pt"),
    (ShardKind.EXPERT, r"expp_rank_\d+_mp_rank_(?P<mp>\d+)_optim_states\.pt"),
    (ShardKind.LAYER, r"layer_\d+(?:-model_(?P<mp>\d+))?-model_states\.pt"),
)
_COMPILED = tuple((kind, re.compile(pattern, re.ASCII)) for kind, pattern in _PATTERNS)


@dataclass(frozen=True)
class ShardFile:
    """A file of a tag and what its name says; `dp_rank` is None where the name has none."""

    path: Path
    kind: ShardKind
    mp_rank: int
    dp_rank: int | None = None
    bf16: bool = False

    @property
    def order(self) -> tuple[int, int, str]:
        """Sort key: ranks as numbers (rank 10 comes after rank 9), then the name."""
        return (self.mp_rank, -1 if self.dp_rank is None else self.dp_rank, self.path.name)


def parse_shard_name(path: Path) -> ShardFile | None:
    """What DeepSpeed keeps in a file of this name; None if DeepSpeed gives no file such a name."""
    for kind, pattern in _COMPILED:
        match = pattern.fullmatch(path.name)
        if match is not None:
            parts = match.groupdict()
            return ShardFile(
                path=path,
                kind=kind,
                mp_rank=int(parts["mp"] or 0),
                dp_rank=int(parts["dp"]) if parts.get("dp") else None,
                bf16=parts.get("bf16") is not None,
            )
    return None


def shard_files(tag_folder: Path) -> list[ShardFile]:
    """DeepSpeed's own files of a tag, by rank; whatever else lies there (manifest, scripts) is left out."""
    parsed = (parse_shard_name(path) for path in tag_folder.iterdir() if path.is_file())
    return sorted((file for file in parsed if file is not None), key=lambda file: file.order)


def parameter_files(tag_folder: Path) -> list[ShardFile]:
    """The files of a universal checkpoint that hold a parameter or a state of its optimizer each."""
    paths = sorted((tag_folder / UNIVERSAL_FOLDER).rglob("*.pt"))
    return [ShardFile(path, ShardKind.PARAMETER, 0) for path in paths if path.is_file()]


def is_tag_folder(folder: Path) -> bool:
    """Whether this folder itself holds a checkpoint. Hidden folders never do: they are not committed."""
    return not folder.name.startswith(".") and folder.is_dir() and bool(shard_files(folder))


def tag_folders(directory: Path) -> list[Path]:
    """Folders of a save directory that hold a checkpoint; numbers in their names sort as numbers."""
    if not directory.is_dir():
        return []
    return sorted(filter(is_tag_folder, directory.iterdir()), key=lambda folder: natural_order(folder.name))


def list_tags(directory: Path) -> list[str]:
    """The names of `tag_folders`."""
    return [folder.name for folder in tag_folders(directory)]


def find_tag_folder(checkpoint: Path, tag: str | None = None) -> Path:
    """The folder that holds the shards.

    `checkpoint` is the save directory (then `tag` decides, else the file `latest`, else `latest_universal`,
    else that there is but one tag) or the tag folder itself.

    Raises:
        ToolkitError: there is no such directory or tag, or `latest` names a tag that is gone.
    """
    if not checkpoint.exists():
        raise ToolkitError("the checkpoint directory does not exist", where=checkpoint)
    if not checkpoint.is_dir():
        raise ToolkitError(
            "the checkpoint is a file, not a directory",
            where=checkpoint,
            fix="name the directory that was given to save_checkpoint, or one tag in it",
        )
    if tag is not None:
        return _named_tag(checkpoint, tag)
    if is_tag_folder(checkpoint.resolve()):
        return checkpoint
    for latest in (checkpoint / LATEST, checkpoint / LATEST_UNIVERSAL):
        if latest.is_file():
            return _latest_tag(checkpoint, latest)
    tags = list_tags(checkpoint)
    if len(tags) == 1:
        return checkpoint / tags[0]
    if tags:
        raise ToolkitError(
            "which tag is meant is not known: there is no file `latest`",
            where=checkpoint,
            fix=f"name one of {', '.join(tags)} with --tag",
        )
    raise ToolkitError(
        "there is no checkpoint in this directory",
        where=checkpoint,
        why=_what_else(checkpoint),
        fix="name the directory that was given to save_checkpoint, or one tag in it",
    )


def refuse_unsupported(tag_folder: Path, files: Sequence[ShardFile]) -> None:
    """Stop at a layout whose weights cannot be read, judging by its files.

    Raises:
        ToolkitError: it says which layout it is.
    """
    kinds = {file.kind for file in files}
    if ShardKind.EXPERT in kinds and (ShardKind.LAYER in kinds or any(file.mp_rank for file in files)):
        raise unsupported(
            tag_folder, "a mixture of experts that a pipeline or tensor parallelism has split as well"
        )
    if not any(file.kind is ShardKind.MODEL for file in files):
        raise ToolkitError(
            "a checkpoint has no model states", where=tag_folder, why="no *_model_states.pt is there"
        )


class UnsupportedLayoutError(ToolkitError):
    """Nothing is wrong with the checkpoint as far as is known; its weights cannot be read."""


def unsupported(where: Path, what: str) -> UnsupportedLayoutError:
    """An error that says what a checkpoint holds, when this is known and cannot be read."""
    return UnsupportedLayoutError(f"this checkpoint holds {what}; it cannot be read yet", where=where)


def _named_tag(checkpoint: Path, tag: str) -> Path:
    # A user who names the tag folder and the tag means the same thing twice.
    if checkpoint.name == tag and is_tag_folder(checkpoint):
        return checkpoint
    folder = checkpoint / tag
    if not _leads_outside(tag) and is_tag_folder(folder):
        return folder
    raise ToolkitError(f"there is no tag `{tag}`", where=checkpoint, why=_tags_there(checkpoint))


def _latest_tag(checkpoint: Path, latest: Path) -> Path:
    tag = latest.read_bytes()[:4096].decode(errors="replace").strip()
    if tag and not _leads_outside(tag) and is_tag_folder(checkpoint / tag):
        return checkpoint / tag
    raise ToolkitError(
        f"`{latest.name}` names the tag `{tag}`, which is not there",
        where=latest,
        why=_tags_there(checkpoint),
        fix="name a tag with --tag" if list_tags(checkpoint) else None,
    )


def _leads_outside(tag: str) -> bool:
    return "\0" in tag or Path(tag).is_absolute() or ".." in Path(tag).parts


def _tags_there(directory: Path) -> str:
    tags = list_tags(directory)
    return f"there are {', '.join(tags)}" if tags else "there is no tag in this directory"


def _what_else(directory: Path) -> str | None:
    """What else the folder may be, for people who took one kind of checkpoint for another."""
    names = {path.name for path in directory.iterdir()}
    if any(name.endswith(".distcp") for name in names):
        return "it is a torch.distributed.checkpoint (DCP) folder"
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return "it holds weights that are consolidated already (safetensors)"
    if any(name.startswith("pytorch_model") for name in names):
        return "it holds weights that are consolidated already (pytorch_model)"
    if any(name.startswith(".") and name.endswith(".partial") for name in names):
        return "only a tag that was never committed lies there"
    return None


def natural_order(name: str) -> list[tuple[int, int, str]]:
    """Sort key under which `step10` comes after `step9`."""
    parts = re.split(r"(\d+)", name, flags=re.ASCII)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts if part]
