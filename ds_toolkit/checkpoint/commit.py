"""How a tag comes to be: written under a hidden name, sealed by every rank, committed by one rename.

    <dir>/.<tag>.<id>.partial/  every rank writes and flushes its files, then its own manifest (`seal`)
    manifest.json               the committer has found all ranks' manifests and they agree (`commit`)
    <dir>/<tag>/                rename; from here on a reader sees a whole checkpoint
    <dir>/latest                replaced by rename

A process that dies at any instruction leaves the previous checkpoint and `latest` valid; what it leaves
besides begins with a dot, is never taken for a tag, and is swept away by the next run (`sweeping`).

Standard library only: the process that outlives the ranks commits too.
"""

from __future__ import annotations

import datetime
import secrets
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ds_toolkit.checkpoint.layout import LATEST, is_tag_folder
from ds_toolkit.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    ManifestFile,
    RankManifest,
    RunShape,
    check_tag,
)
from ds_toolkit.errors import ToolkitError
from ds_toolkit.files import (
    crc32_of,
    exchange,
    fsync_directory,
    fsync_file,
    make_directory,
    remove,
    write_whole,
)

PARTIAL_SUFFIX = ".partial"
REPLACED_SUFFIX = ".replaced"
DELETED_SUFFIX = ".deleted"


@dataclass(frozen=True)
class PartialTag:
    """A tag that is being written.

    Attributes:
        directory: the save directory.
        tag: the name that it will have.
        save_id: eight hexadecimal digits that no other save has (`new_save_id`), the same on every rank. Two
            runs in one directory, or two attempts at one tag, never write into one folder.
    """

    directory: Path
    tag: str
    save_id: str

    @property
    def folder(self) -> Path:
        """The hidden folder that becomes `<directory>/<tag>` when it is committed."""
        return self.directory / f".{self.tag}.{self.save_id}{PARTIAL_SUFFIX}"

    @property
    def target(self) -> Path:
        """Where it will be seen."""
        return self.directory / self.tag


def new_save_id() -> str:
    """A name for one save; one rank makes it for all."""
    return secrets.token_hex(4)


def begin(partial: PartialTag) -> None:
    """Make the empty hidden folder to write into.

    Raises:
        ToolkitError: the tag cannot be one, or its place is taken by something that is not a checkpoint.
    """
    check_tag(partial.tag)
    _check_replaceable(partial.target)
    make_directory(partial.directory)
    partial.folder.mkdir()


def seal(partial: PartialTag, rank: int, step: int, shape: RunShape, names: Iterable[str]) -> RankManifest:
    """Flush the files that this rank wrote and put their sizes and CRCs beside them.

    Args:
        partial: the tag that is being written.
        rank: global rank of the caller.
        step: optimizer steps done (DeepSpeed's `global_steps`).
        shape: of the run that writes.
        names: paths of the files inside the folder.
    """
    return seal_flushed(
        partial, rank, step, shape, [_flushed(partial.folder, name, rank) for name in sorted(names)]
    )


def seal_flushed(
    partial: PartialTag, rank: int, step: int, shape: RunShape, files: Iterable[ManifestFile]
) -> RankManifest:
    """`seal` for whoever has flushed the files and knows their CRCs, having computed them while it wrote."""
    manifest = RankManifest(rank, step, shape, tuple(sorted(files, key=lambda file: file.name)))
    manifest.write(partial.folder)
    return manifest


def commit(
    partial: PartialTag,
    *,
    kind: str,
    protected: bool = False,
    micro_steps: int = 0,
    versions: Mapping[str, str] | None = None,
    patience_seconds: float = 30.0,
    point_latest: bool = True,
) -> Manifest:
    """Make a sealed tag visible and point `latest` at it.

    Args:
        partial: the tag; every rank has sealed it.
        kind: why it was written (`periodic`).
        protected: whether it is kept for ever; a tag that takes the place of a protected one is, too.
        micro_steps: taken of an unfinished gradient accumulation.
        versions: name -> version of the software that wrote it.
        patience_seconds: how long to wait for the manifests of other ranks to become visible.
        point_latest: whether `latest` is to name it; not if nothing can resume from it.

    Raises:
        ToolkitError: a rank's manifest is missing, ranks disagree on the step or the run's shape, or the
            checkpoint is whole and in its place but `latest` could not be written.
    """
    folder = partial.folder
    ranks = _rank_manifests(folder, patience_seconds)
    claimed = [file for manifest in ranks for file in manifest.files]
    manifest = Manifest(
        tag=partial.tag,
        step=ranks[0].step,
        kind=kind,
        shape=ranks[0].shape,
        files=(*claimed, *_unclaimed(folder, {file.name for file in claimed})),
        protected=protected or _is_protected(partial.target),
        micro_steps=micro_steps,
        created_at=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds"),
        versions=dict(versions or {}),
    )
    # Written when all else is there and flushed: whoever finds it may rely on the rest.
    manifest.write(folder)
    for rank_manifest in ranks:
        RankManifest.path(folder, rank_manifest.rank).unlink()
    _flush_directories(folder)
    _publish(folder, partial.target)
    if point_latest:
        _point_latest(partial)
    return manifest


def abandon(partial: PartialTag) -> None:
    """Remove what was written of a tag that will not be committed."""
    shutil.rmtree(partial.folder, ignore_errors=True)


def delete(folder: Path) -> None:
    """Remove a committed tag; it stops being a tag at once, even if removing its files is cut short.

    Where the tag is a symbolic link, the link goes and what it points to stays.
    """
    hidden = folder.with_name(f".{folder.name}{DELETED_SUFFIX}")
    if hidden.exists() or hidden.is_symlink():
        remove(hidden)
    folder.rename(hidden)
    fsync_directory(folder.parent)
    remove(hidden)


def _flushed(folder: Path, name: str, rank: int | None) -> ManifestFile:
    path = folder / name
    crc32 = crc32_of(path)
    fsync_file(path)
    return ManifestFile(name, path.stat().st_size, crc32, rank)


def _check_replaceable(target: Path) -> None:
    if not target.exists():
        return
    is_tag = target.is_dir() and (
        (target / MANIFEST_NAME).exists() or is_tag_folder(target) or not any(target.iterdir())
    )
    if not is_tag:
        # Committing would delete it.
        raise ToolkitError(
            "the place of the checkpoint is taken by something that is not a checkpoint",
            where=target,
            fix="choose another tag or another directory",
        )


def _rank_manifests(folder: Path, patience_seconds: float) -> list[RankManifest]:
    deadline = time.monotonic() + patience_seconds
    first = _rank_manifest(folder, 0, deadline)
    ranks = [first]
    for rank in range(1, first.shape.world_size):
        other = _rank_manifest(folder, rank, deadline)
        if (other.step, other.shape) != (first.step, first.shape):
            steps = [f"step is {first.step} on rank 0 and {other.step} on rank {rank}"]
            shapes = first.shape.differences(other.shape, "on rank 0", f"on rank {rank}")
            raise ToolkitError(
                f"rank {rank} and rank 0 wrote different checkpoints",
                where=folder,
                why="; ".join(steps * (other.step != first.step) + shapes),
            )
        ranks.append(other)
    return ranks


def _rank_manifest(folder: Path, rank: int, deadline: float) -> RankManifest:
    # A network file system may show another node's file only after its directory cache has expired.
    while not RankManifest.path(folder, rank).exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    try:
        return RankManifest.read(folder, rank)
    except ToolkitError as error:
        raise ToolkitError(
            f"rank {rank} has not sealed the checkpoint",
            where=error.where,
            why=error.why or "its manifest is not visible to the rank that commits",
            fix="the checkpoint directory must be on storage that all nodes share",
        ) from error


def _unclaimed(folder: Path, claimed: set[str]) -> list[ManifestFile]:
    # DeepSpeed copies some files itself (swapped-out optimizer state); a manifest covers the whole folder.
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    sealed = {path.name for path in folder.glob("manifest_rank_*.json")}
    return [_flushed(folder, name, None) for name in sorted(names - claimed - sealed)]


def _flush_directories(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_dir():
            fsync_directory(path)
    fsync_directory(folder)


def _publish(folder: Path, target: Path) -> None:
    """Give the hidden folder its visible name; an older tag of that name gives way."""
    if not target.exists():
        folder.rename(target)
    elif exchange(folder, target):
        # One instant, both whole: the old checkpoint now has the hidden name.
        fsync_directory(target.parent)
        remove(folder)
    else:
        _replace(folder, target)
    fsync_directory(target.parent)


def _replace(folder: Path, target: Path) -> None:
    # For file systems without an atomic exchange. Between the two renames the tag is absent; `sweep` puts
    # the old one back if the process dies there.
    old = target.with_name(f".{target.name}{REPLACED_SUFFIX}")
    if old.exists() or old.is_symlink():
        remove(old)
    target.rename(old)
    folder.rename(target)
    fsync_directory(target.parent)
    remove(old)


def _is_protected(target: Path) -> bool:
    try:
        return Manifest.read(target).protected
    except ToolkitError:
        return False


def _point_latest(partial: PartialTag) -> None:
    latest = partial.directory / LATEST
    try:
        write_whole(latest, partial.tag.encode())
    except OSError as error:
        raise ToolkitError(
            f"the checkpoint `{partial.tag}` is whole and in its place, but `latest` cannot be written",
            where=latest,
            why=error.strerror,
        ) from error
