"""Which folders of a directory are tags, and what those that were committed say of themselves."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ds_toolkit.checkpoint.layout import is_tag_folder, natural_order
from ds_toolkit.checkpoint.manifest import MANIFEST_NAME, Manifest
from ds_toolkit.errors import ToolkitError


def committed(directory: Path) -> list[Manifest]:
    """Manifests of the tags that ds_toolkit committed and that still have their names; their files are not
    looked at. A tag under another name is somebody's copy, and nobody's to delete."""
    manifests = []
    for folder in every_tag_folder(directory):
        # What cannot be read is no manifest; one that DeepSpeed alone wrote has none.
        with contextlib.suppress(ToolkitError):
            manifest = Manifest.read(folder)
            if manifest.tag == folder.name:
                manifests.append(manifest)
    return manifests


def every_tag_folder(directory: Path) -> list[Path]:
    """Folders that are tags, whole or broken; numbers in their names sort as numbers."""
    if not directory.is_dir():
        return []
    return sorted(filter(may_be_tag, directory.iterdir()), key=lambda folder: natural_order(folder.name))


def may_be_tag(folder: Path) -> bool:
    """Whether a folder is a tag, be it a broken one."""
    # A manifest counts too: a tag whose shards were deleted is a broken tag and not none.
    try:
        return is_tag_folder(folder) or (
            not folder.name.startswith(".") and (folder / MANIFEST_NAME).is_file()
        )
    except OSError:
        # Not ours to read, such as lost+found.
        return False
