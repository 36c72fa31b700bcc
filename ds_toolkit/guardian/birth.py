"""When a job's arena was made, by a clock that nobody sets, and which checkpoints there were by then.

The clock on the wall may be set forward or back while a job runs; nothing here goes by it, unless the host
was started anew since.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from ds_toolkit.checkpoint.manifest import Manifest
from ds_toolkit.checkpoint.tag_folders import committed

_NAME = "birth.json"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Birth:
    """The moment at which an arena was made.

    Attributes:
        boot_id: of the kernel.
        monotonic_seconds: by `time.monotonic`, which all processes of a boot share.
        earlier: tags that were committed in the checkpoint directory, each with when.
    """

    boot_id: str
    monotonic_seconds: float
    earlier: frozenset[tuple[str, str]]

    @classmethod
    def now(cls, directory: Path) -> Birth:
        """That of an arena of a run that saves into this directory."""
        earlier = frozenset((manifest.tag, manifest.created_at) for manifest in committed(directory))
        return cls(boot_id(), time.monotonic(), earlier)

    def write(self, folder: Path) -> None:
        """Into the folder of the arena, before anybody knows of it.

        Raises:
            OSError: it cannot be written.
        """
        data = {
            "boot_id": self.boot_id,
            "monotonic_seconds": self.monotonic_seconds,
            "earlier": sorted(self.earlier),
        }
        (folder / _NAME).write_text(json.dumps(data))

    @classmethod
    def read(cls, folder: Path) -> Birth:
        """Of an arena; one that says nothing of its birth was made by an earlier version.

        Raises:
            OSError: the folder is gone.
        """
        try:
            data = json.loads((folder / _NAME).read_text())
            earlier = frozenset((str(tag), str(created_at)) for tag, created_at in data["earlier"])
            return cls(str(data["boot_id"]), float(data["monotonic_seconds"]), earlier)
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            age_seconds = time.time() - folder.stat().st_mtime
            return cls(boot_id(), time.monotonic() - age_seconds, frozenset())

    def age_seconds(self, folder: Path) -> float:
        """How long ago it was; of another boot as the files of the arena's folder say.

        Raises:
            OSError: the folder is gone.
        """
        if self.boot_id == boot_id():
            return time.monotonic() - self.monotonic_seconds
        return time.time() - (folder / _NAME).stat().st_mtime

    def is_earlier(self, manifest: Manifest) -> bool:
        """Whether a checkpoint was there before: it is of another past, even if it has the same step."""
        return (manifest.tag, manifest.created_at) in self.earlier


def boot_id() -> str:
    """Of the kernel: another one each time that the host is started."""
    return _BOOT_ID.read_text().strip()
