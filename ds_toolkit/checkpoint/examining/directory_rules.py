"""DS906, DS914 and DS915: what is wrong with a save directory, its tags being examined."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_toolkit.checkpoint.layout import LATEST
from ds_toolkit.checkpoint.tag_folders import may_be_tag
from ds_toolkit.findings import Severity
from ds_toolkit.rules import Problem, Registry

_PARTIAL_SUFFIX = ".partial"


@dataclass(frozen=True)
class ExaminedDirectory:
    """A save directory: `whole` are its tags without errors, step and name each."""

    directory: Path
    whole: Sequence[tuple[int, str]]

    @property
    def latest(self) -> str | None:
        """What the file `latest` names; None if it is not there."""
        return read_latest(self.directory)


DIRECTORY_RULES: Registry[ExaminedDirectory] = Registry()


def read_latest(directory: Path) -> str | None:
    """The tag that the file `latest` names, whether there is one or not; None without such a file."""
    try:
        return (directory / LATEST).read_bytes()[:4096].decode(errors="replace").strip()
    except OSError:
        return None


def unfinished(directory: Path) -> list[Path]:
    """Folders of saves that were never committed, or go on right now."""
    return sorted(
        path
        for path in directory.iterdir()
        if path.name.startswith(".") and path.name.endswith(_PARTIAL_SUFFIX) and path.is_dir()
    )


@DIRECTORY_RULES.rule("DS906", "latest-without-tag", Severity.ERROR)
def latest_without_tag(subject: ExaminedDirectory) -> Iterator[Problem]:
    """The file `latest` names a tag that is not there, or nothing.

    `engine.load_checkpoint` reads it when it is given no tag, finds no files, and training begins anew.

    Bad:
        `latest` says global_step100, and there is only global_step90
    Good:
        `latest` says global_step90, and global_step90 is there
    """
    tag = subject.latest
    if tag is None:
        return
    folder = subject.directory / tag
    if not tag or "\0" in tag or folder.parent != subject.directory or not may_be_tag(folder):
        message = f"it names the tag `{tag}`, which is not there" if tag else "it is empty"
        newest = max(subject.whole, default=None)
        yield Problem(LATEST, message, f"write {newest[1]} into it" if newest else None)


@DIRECTORY_RULES.rule("DS914", "latest-behind", Severity.WARNING)
def latest_behind(subject: ExaminedDirectory) -> Iterator[Problem]:
    """The file `latest` names a tag that is older than the newest one without errors.

    `engine.load_checkpoint` would load the older one. Somebody may have gone back on purpose.

    Bad:
        `latest` says global_step90, and global_step100 is whole
    Good:
        `latest` says global_step100
    """
    steps = {tag: step for step, tag in subject.whole}
    newest = max(subject.whole, default=None)
    if newest is not None and subject.latest in steps and steps[subject.latest] < newest[0]:
        message = f"it names {subject.latest} of step {steps[subject.latest]}, and {newest[1]} is whole"
        yield Problem(LATEST, message, f"write {newest[1]} into it, unless this is meant")


@DIRECTORY_RULES.rule("DS915", "unfinished-save", Severity.INFO)
def unfinished_save(subject: ExaminedDirectory) -> Iterator[Problem]:
    """A save was begun and never committed, or goes on right now; it is no checkpoint.

    The next run of a CheckpointGuard removes what a save that died has left.

    Bad:
        a folder .global_step80.1f0c92ab.partial
    Good:
        visible tags only
    """
    for folder in unfinished(subject.directory):
        yield Problem(folder.name, "this save was not committed")
