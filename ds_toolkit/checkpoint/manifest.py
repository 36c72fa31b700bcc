"""What a committed tag says of itself: its step, the run's shape, and every file with its size and CRC-32.

Standard library only: the process that outlives the ranks writes manifests too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ds_toolkit.checkpoint.layout import LATEST
from ds_toolkit.errors import ToolkitError
from ds_toolkit.files import write_whole

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 1
# Why a tag was written: its `kind`.
PERIODIC = "periodic"
LAST_WORDS = "last-words"
FINAL = "final"
# All weights and not all optimizer states. Nothing resumes from it, and it is never `latest`.
WEIGHTS_ONLY = "weights-only"
_TAG_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=@-]{0,199}")


@dataclass(frozen=True)
class ManifestFile:
    """One file of a tag: its path inside the tag (with `/`), size, CRC-32, and the rank that wrote it.

    `rank` is None for a file that no rank reported, such as swapped-out optimizer state copied by DeepSpeed.
    """

    name: str
    size_bytes: int
    crc32: int
    rank: int | None

    def as_json(self) -> dict[str, object]:
        """The form in the file; CRCs are eight hexadecimal digits, as zip tools print them."""
        return {
            "name": self.name,
            "size_bytes": self.size_bytes,
            "crc32": f"{self.crc32:08x}",
            "rank": self.rank,
        }


@dataclass(frozen=True)
class RunShape:
    """What a run and a checkpoint must have in common for DeepSpeed to load the one into the other."""

    world_size: int
    dp_world_size: int
    mp_world_size: int
    zero_stage: int
    precision: str

    def differences(self, other: RunShape, place: str, other_place: str) -> list[str]:
        """Sentences such as `zero_stage is 3 in the checkpoint and 2 in this run`, the places being given."""
        return [
            f"{name} is {value} {place} and {getattr(other, name)} {other_place}"
            for name, value in dataclasses.asdict(self).items()
            if value != getattr(other, name)
        ]


@dataclass(frozen=True)
class RankManifest:
    """What one rank wrote into a tag that is not committed yet."""

    rank: int
    step: int
    shape: RunShape
    files: tuple[ManifestFile, ...]

    @staticmethod
    def path(folder: Path, rank: int) -> Path:
        """Where this rank's manifest lies until the tag is committed."""
        return folder / f"manifest_rank_{rank:05d}.json"

    def write(self, folder: Path) -> None:
        """Put it into the folder, whole and flushed."""
        data = {
            "format": FORMAT_VERSION,
            "rank": self.rank,
            "step": self.step,
            "shape": dataclasses.asdict(self.shape),
            "files": [file.as_json() for file in self.files],
        }
        write_whole(self.path(folder, self.rank), _encoded(data))

    @classmethod
    def read(cls, folder: Path, rank: int) -> RankManifest:
        """Read it back.

        Raises:
            ToolkitError: it is not there or is not a rank manifest.
        """
        path = cls.path(folder, rank)
        data = _decoded(path)
        with _explaining(path):
            return cls(
                rank=int(data["rank"]),
                step=int(data["step"]),
                shape=RunShape(**data["shape"]),
                files=_files(data["files"]),
            )


@dataclass(frozen=True)
class Manifest:
    """The file whose presence commits a tag.

    Attributes:
        tag: its name when it was committed.
        step: optimizer steps that it holds.
        kind: why it was written.
        shape: of the run that wrote it.
        files: everything else in the folder.
        protected: whether it is kept for ever.
        micro_steps: micro-steps of an unfinished gradient accumulation that had been taken when it was
            written; their gradients are not in it, while tracked objects have moved on by so many batches.
        created_at: UTC, ISO 8601.
        versions: of the software that wrote it.
    """

    tag: str
    step: int
    kind: str
    shape: RunShape
    files: tuple[ManifestFile, ...]
    protected: bool = False
    micro_steps: int = 0
    created_at: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """Sum of the sizes of all files, the manifest itself not counted."""
        return sum(file.size_bytes for file in self.files)

    def write(self, folder: Path) -> None:
        """Put it into the folder, whole and flushed."""
        data = {
            "format": FORMAT_VERSION,
            "tag": self.tag,
            "step": self.step,
            "kind": self.kind,
            "protected": self.protected,
            "micro_steps": self.micro_steps,
            "created_at": self.created_at,
            "versions": self.versions,
            "shape": dataclasses.asdict(self.shape),
            "files": [file.as_json() for file in self.files],
        }
        write_whole(folder / MANIFEST_NAME, _encoded(data))

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read a tag's manifest.

        Raises:
            ToolkitError: it is not there, is not a manifest, or is of a newer format.
        """
        path = folder / MANIFEST_NAME
        data = _decoded(path)
        with _explaining(path):
            return cls(
                tag=check_tag(str(data["tag"])),
                step=int(data["step"]),
                kind=str(data["kind"]),
                shape=RunShape(**data["shape"]),
                files=_files(data["files"]),
                protected=bool(data["protected"]),
                micro_steps=int(data["micro_steps"]),
                created_at=str(data["created_at"]),
                versions={str(name): str(version) for name, version in data["versions"].items()},
            )


def check_tag(tag: str) -> str:
    """The tag itself, if it can be a plain, visible folder name.

    Raises:
        ToolkitError: the tag is empty, hidden, has a slash or a blank, or is a name DeepSpeed uses itself.
    """
    if not isinstance(tag, str) or not _TAG_PATTERN.fullmatch(tag) or tag in (LATEST, "latest_universal"):
        raise ToolkitError(
            f"`{tag!s}` cannot be a tag",
            fix="use at most 200 letters, digits and _ . + = @ -, beginning with a letter, a digit or _",
        )
    return tag


def _encoded(data: dict[str, object]) -> bytes:
    return (json.dumps({**data, "crc32": _own_crc32(data)}, indent=1) + "\n").encode()


def _own_crc32(data: dict[str, object]) -> str:
    # Over the values and not the text, so that a manifest may be pretty-printed without harm.
    content = {name: value for name, value in data.items() if name != "crc32"}
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def _decoded(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ToolkitError("a manifest is missing", where=path) from None
    except (OSError, ValueError) as error:
        raise _unreadable(path, str(error)) from error
    if not isinstance(data, dict):
        raise _unreadable(path, "not a JSON object")
    if data.get("format") != FORMAT_VERSION:
        raise ToolkitError(
            f"a manifest has format {data.get('format')!r}, and only {FORMAT_VERSION} is known here",
            where=path,
            fix="use the version of ds_toolkit that wrote it, or a newer one",
        )
    if data.get("crc32") != _own_crc32(data):
        raise _unreadable(path, "its content has changed since it was written (CRC-32)")
    return data


@contextlib.contextmanager
def _explaining(path: Path) -> Iterator[None]:
    """Turns whatever is wrong inside a manifest into one error that names the file."""
    try:
        yield
    except KeyError as error:
        raise _unreadable(path, f"it has no {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise _unreadable(path, str(error)) from error


def _files(entries: Iterable[dict[str, Any]]) -> tuple[ManifestFile, ...]:
    return tuple(
        ManifestFile(
            name=_inside(str(entry["name"])),
            size_bytes=int(entry["size_bytes"]),
            crc32=int(str(entry["crc32"]), 16),
            rank=None if entry["rank"] is None else int(entry["rank"]),
        )
        for entry in entries
    )


def _inside(name: str) -> str:
    # A manifest may come from anywhere; it must not make us read or delete outside its tag.
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts:
        raise ValueError(f"the file name {name!r} leads out of the tag")
    return name


def _unreadable(path: Path, why: str) -> ToolkitError:
    return ToolkitError("a manifest cannot be read", where=path, why=why)
