"""`verify`: all that is wrong with the tags of a checkpoint, each finding from a rule with a manual."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# Importing the rules registers them.
from ds_toolkit.checkpoint.examining import content_rules as content_rules
from ds_toolkit.checkpoint.examining import tag_rules as tag_rules
from ds_toolkit.checkpoint.examining.directory_rules import DIRECTORY_RULES, ExaminedDirectory, read_latest
from ds_toolkit.checkpoint.examining.examined import TAG_RULES, ExaminedTag, examine
from ds_toolkit.checkpoint.layout import find_tag_folder
from ds_toolkit.checkpoint.tag_folders import every_tag_folder, may_be_tag
from ds_toolkit.checkpoint.verify import UNREADABLE_FILE
from ds_toolkit.errors import ToolkitError
from ds_toolkit.findings import Finding, Severity, Where, has_errors

TagProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class VerifiedTag:
    """What was looked at, and what was found.

    Attributes:
        step: optimizer steps done; None if no file says.
        has_manifest: whether ds_toolkit committed it; if not, nobody says which files there should be.
        is_deep: whether its data was read.
    """

    folder: Path
    step: int | None
    num_files: int
    num_bytes: int
    has_manifest: bool
    is_deep: bool
    findings: tuple[Finding, ...]

    @property
    def is_whole(self) -> bool:
        """Whether nothing was found that makes it unusable."""
        return not has_errors(self.findings)


@dataclass(frozen=True)
class Verified:
    """The tags in their order, and what was found about the directory around them."""

    tags: tuple[VerifiedTag, ...]
    around: tuple[Finding, ...]

    @property
    def findings(self) -> list[Finding]:
        """All of them, tag by tag."""
        return [*(finding for tag in self.tags for finding in tag.findings), *self.around]


def verify(
    checkpoint: Path, *, tag: str | None = None, deep: bool = False, progress: TagProgress | None = None
) -> Verified:
    """Examine one tag, or all tags of a save directory.

    Args:
        checkpoint: the save directory, or the folder of a tag.
        tag: the only one to look at.
        deep: read the data too: CRCs, and values that are no numbers.
        progress: called while data is read, with the tag, bytes read so far and bytes in all.

    Raises:
        ToolkitError: there is no checkpoint, or not this tag.
    """
    folders, directory = tags_of(checkpoint, tag)
    tags = tuple(_verified(folder, deep, progress) for folder in folders)
    if directory is None:
        return Verified(tags, ())
    whole = [(one.step, one.folder.name) for one in tags if one.is_whole and one.step is not None]
    subject = ExaminedDirectory(directory, whole)
    return Verified(tags, tuple(DIRECTORY_RULES.findings(subject, lambda name: _place(directory, name))))


def verify_checkpoint(checkpoint: str | Path, *, tag: str | None = None, deep: bool = False) -> list[Finding]:
    """What is wrong with a checkpoint: missing, cut, stale and foreign shards, tensors not covered, `latest`.

    Args:
        checkpoint: the save directory (all its tags), or the folder of one tag.
        tag: the only one to look at.
        deep: read all data too: CRCs, NaN and infinite values, weights that contradict each other.

    Raises:
        ToolkitError: there is no checkpoint, or not this tag.
    """
    return verify(Path(checkpoint), tag=tag, deep=deep).findings


def tags_of(checkpoint: Path, tag: str | None = None) -> tuple[list[Path], Path | None]:
    """The folders that are meant, and the save directory if all of its tags are.

    Raises:
        ToolkitError: there is no checkpoint, or not this tag.
    """
    if tag is not None:
        named = checkpoint / tag
        # A tag of which only the manifest is left is there, too.
        is_plain = Path(tag).name == tag and "\0" not in tag
        return [named if is_plain and may_be_tag(named) else find_tag_folder(checkpoint, tag)], None
    # Resolved, so that `.` has a name.
    if checkpoint.is_dir() and may_be_tag(checkpoint.resolve()):
        return [checkpoint], None
    folders = every_tag_folder(checkpoint)
    if not folders and (not checkpoint.is_dir() or read_latest(checkpoint) is None):
        # It says what else the place may be.
        find_tag_folder(checkpoint)
    return folders, checkpoint


def findings_of(tag: ExaminedTag) -> list[Finding]:
    """What the rules say of a tag; of its data only if that was read."""
    return TAG_RULES.findings(tag, lambda name: _place(tag.folder, name))


def _verified(folder: Path, deep: bool, progress: TagProgress | None) -> VerifiedTag:
    try:
        tag = examine(folder)
        if deep:
            from ds_toolkit.checkpoint.examining.contents import read_contents

            tag.contents = read_contents(tag, progress=_for_tag(folder.resolve().name, progress))
        findings = findings_of(tag)
    except (ToolkitError, OSError) as error:
        # One tag that vanishes or cannot be listed must not hide the others.
        return VerifiedTag(folder, None, 0, 0, False, deep, (_unreadable(folder, error),))
    sizes = [file.size_bytes for file in tag.files]
    has_manifest = tag.manifest is not None
    return VerifiedTag(folder, tag.step, len(sizes), sum(sizes), has_manifest, deep, tuple(findings))


def _for_tag(name: str, progress: TagProgress | None) -> Callable[[int, int], None] | None:
    if progress is None:
        return None
    return lambda done_bytes, total_bytes: progress(name, done_bytes, total_bytes)


def _unreadable(folder: Path, error: ToolkitError | OSError) -> Finding:
    if isinstance(error, ToolkitError):
        message, place = (f"{error.what}: {error.why}" if error.why else error.what), error.where
    else:
        message, place = f"it cannot be read: {error.strerror}", error.filename
    return Finding(UNREADABLE_FILE, Severity.ERROR, message, Where(file=str(place or folder)))


def _place(folder: Path, name: str) -> Where:
    return Where(file=str(folder / name) if name else str(folder))
