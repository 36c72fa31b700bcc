"""Deleting the tags that have had their time (`retention` says which). Standard library only."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from ds_toolkit.checkpoint.commit import delete
from ds_toolkit.checkpoint.manifest import Manifest
from ds_toolkit.checkpoint.retention import expired
from ds_toolkit.checkpoint.tag_folders import committed


def delete_expired(
    directory: Path,
    *,
    newest: Manifest,
    keep_last: int,
    keep_every: int | None,
    broken: Collection[str],
) -> list[str]:
    """Delete what `retention.expired` names after a commit; a line for each that could not be deleted."""
    try:
        tags = expired(
            committed(directory), keep_last=keep_last, keep_every=keep_every, newest=newest, broken=broken
        )
    except OSError as error:
        return [f"old checkpoints cannot be looked for: {error}"]
    lines = []
    for tag in tags:
        try:
            delete(directory / tag)
        except OSError as error:
            lines.append(f"the old checkpoint {tag} could not be deleted: {error}")
    return lines
