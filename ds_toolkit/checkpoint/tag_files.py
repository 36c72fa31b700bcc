"""The files of a tag, found by their names and opened one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from ds_toolkit.checkpoint.layout import ShardFile, ShardKind, parse_shard_name, shard_files
from ds_toolkit.checkpoint.manifest import MANIFEST_NAME, Manifest
from ds_toolkit.checkpoint.shards import Shard, open_shard
from ds_toolkit.errors import ToolkitError


@dataclass
class TagFiles:
    """The files of a tag, opened one by one; `opened` remembers which."""

    folder: Path
    files: tuple[ShardFile, ...]
    manifest: Manifest | None
    # Of thousands of files only the last one's structure is kept: what tells the layout is read next, too.
    _last: Shard | None = None
    _opened: dict[Path, None] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> TagFiles:
        """Those that lie in a tag's folder, and its manifest if it has one."""
        manifest = Manifest.read(folder) if (folder / MANIFEST_NAME).exists() else None
        return cls(folder, tuple(shard_files(folder)), manifest)

    def open(self, name: str) -> Shard:
        """Read the structure of one file.

        Raises:
            ToolkitError: it is missing, damaged, or not of the size that the manifest says.
        """
        path = self.folder / name
        if self._last is not None and self._last.path == path:
            return self._last
        if not path.exists():
            raise ToolkitError(
                "a checkpoint file is missing",
                where=path,
                why="the checkpoint was not saved completely, or a file was lost",
                fix="take another tag, or bring the file back",
            )
        self._last = open_shard(path, self._sizes_bytes.get(name))
        self._opened[path] = None
        return self._last

    @property
    def opened(self) -> tuple[Path, ...]:
        """Those that were opened, in that order."""
        return tuple(self._opened)

    @cached_property
    def _sizes_bytes(self) -> Mapping[str, int]:
        return {file.name: file.size_bytes for file in self.manifest.files} if self.manifest else {}

    def names_of(self, kind: ShardKind) -> list[ShardFile]:
        """The files of one kind, those among them that the manifest lists and that are missing."""
        listed = [self.folder / file.name for file in self.manifest.files] if self.manifest else []
        parsed = [parse_shard_name(path) for path in listed]
        found = {file.path.name: file for file in (*parsed, *self.files) if file is not None}
        return sorted((file for file in found.values() if file.kind is kind), key=lambda file: file.order)

    def of_cell(self, mp_rank: int) -> list[ShardFile]:
        """The model and optimizer states of one cell."""
        kinds = (ShardKind.MODEL, ShardKind.OPTIMIZER)
        return [file for file in self.files if file.mp_rank == mp_rank and file.kind in kinds]
