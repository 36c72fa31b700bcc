"""What a process that died while it saved has left in a checkpoint directory is finished or undone.

Standard library only.
"""

from __future__ import annotations

import re
from pathlib import Path

from ds_toolkit.checkpoint.commit import REPLACED_SUFFIX
from ds_toolkit.files import fsync_directory, remove

# Where the guardians of a job's nodes agree after a death, in a folder of the job's name.
AGREEMENT_FOLDER = ".last_words"
_LEFT_BEHIND = re.compile(
    r"\.(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.+=@-]*?)(?:\.[0-9a-f]{8}\.partial|\.replaced|\.deleted)|\.latest\.\d+\.partial"
)


def sweep(directory: Path) -> list[str]:
    """Finish or undo what a process that died had begun; returns a line for each thing done or not possible.

    Only for the process that owns the directory: another run's unfinished tag looks the same.
    """
    swept = []
    for entry in sorted(directory.iterdir()):
        match = _LEFT_BEHIND.fullmatch(entry.name)
        try:
            if entry.name == AGREEMENT_FOLDER:
                swept += _sweep_agreements(entry)
            if match is None:
                continue
            swept.append(_sweep_one(entry, directory / (match["tag"] or "")))
        except OSError as error:
            swept.append(f"could not remove {entry}: {error.strerror}")
    if swept:
        fsync_directory(directory)
    return swept


def _sweep_agreements(folder: Path) -> list[str]:
    # Of jobs that are over: whoever owns the directory has waited for the guardian of the one before.
    jobs = [job.name for job in sorted(folder.iterdir())]
    remove(folder)
    return [f"removed what the guardians of job {job} had agreed on" for job in jobs]


def _sweep_one(entry: Path, tag_folder: Path) -> str:
    if entry.name.endswith(REPLACED_SUFFIX) and not tag_folder.exists():
        # Died between the two renames of `_replace`: the old tag is whole, its name is free.
        entry.rename(tag_folder)
        return f"put back {tag_folder}"
    remove(entry)
    return f"removed what an unfinished save had left behind: {entry}"
