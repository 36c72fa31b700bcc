"""How the checkpoints of a directory stand: which there are, how old, and which are whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from ds_toolkit.checkpoint.manifest import WEIGHTS_ONLY, Manifest
from ds_toolkit.checkpoint.newest import Candidate, survey
from ds_toolkit.errors import ToolkitError


@dataclass(frozen=True)
class TagStanding:
    """One tag, as far as names, sizes and headers tell; no tensor data is read.

    Attributes:
        tag: its name.
        step: optimizer steps that it holds; None if that cannot be known.
        kind: why it was written, `deepspeed` if DeepSpeed alone wrote it; None if that cannot be known.
        created_at: when, by its manifest, else by its folder; None if it is not there at all.
        num_bytes: size of its files.
        has_manifest: whether a manifest says what it consists of.
        why_broken: what is wrong with it; None of a whole one.
    """

    tag: str
    step: int | None
    kind: str | None
    created_at: datetime | None
    num_bytes: int
    has_manifest: bool
    why_broken: str | None

    @property
    def is_whole(self) -> bool:
        """Whether training can go on from it, by its manifest or by what its shards say."""
        return self.why_broken is None

    def age_seconds(self, now: datetime) -> float | None:
        """How old it is; never negative, whatever the clocks of two machines say."""
        return None if self.created_at is None else max(0.0, (now - self.created_at).total_seconds())


def standing_of_tags(directory: Path) -> list[TagStanding]:
    """The tags of a directory: the whole ones, newest step first, then those that are broken."""
    candidates, passed_over = survey(directory)
    whole = [_whole(candidate) for candidate in candidates]
    return whole + [
        TagStanding(
            tag=broken.tag,
            step=None,
            kind=_kind(directory / broken.tag),
            created_at=_changed_at(directory / broken.tag),
            num_bytes=_size_bytes(directory / broken.tag),
            has_manifest=False,
            why_broken=str(broken).removeprefix(f"{broken.tag}: "),
        )
        for broken in passed_over
    ]


def problems_of_tags(tags: Sequence[TagStanding]) -> Iterator[str]:
    """What somebody should look into, in sentences."""
    if not any(tag.is_whole for tag in tags):
        yield "there is no whole checkpoint: a failure would cost all of the training"
    for tag in tags:
        # Weights without optimizer states are kept on purpose; that nothing resumes from them is no fault.
        if not tag.is_whole and tag.kind != WEIGHTS_ONLY:
            yield f"{tag.tag} is not whole: {tag.why_broken}"


def _kind(folder: Path) -> str | None:
    try:
        return Manifest.read(folder).kind
    except ToolkitError:
        return None


def _whole(candidate: Candidate) -> TagStanding:
    manifest = candidate.manifest
    created_at = _moment(manifest.created_at) if manifest else None
    return TagStanding(
        tag=candidate.tag,
        step=candidate.step,
        kind=candidate.kind,
        created_at=created_at or _changed_at(candidate.folder),
        num_bytes=manifest.total_bytes if manifest else _size_bytes(candidate.folder),
        has_manifest=manifest is not None,
        why_broken=None,
    )


def _moment(text: str) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)


def _changed_at(folder: Path) -> datetime | None:
    try:
        return datetime.fromtimestamp(folder.stat().st_mtime, timezone.utc)
    except OSError:
        return None


def _size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0
