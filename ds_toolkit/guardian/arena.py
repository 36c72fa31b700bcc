"""The arena: where the snapshots of one job lie on one node, and what its guardian has to know of the job.

<root>/<job id>/                 0700, on tmpfs
    job.json                     the job (`Job`): written once, by local rank 0, before the guardian starts
    birth.json                   when it was made (`Birth`)
    pid_namespace                in which the process ids hold
    guardian.json                process id of the guardian, and when it began
    guardian.sock, guardian.log
    scripts/                     what DeepSpeed lays beside its checkpoints
    rank_00003/control           `control`: the rank's page
    rank_00003/slot_0/           a snapshot: files of a checkpoint tag, complete with their names
    rank_00003/slot_0/contents.json   which files, and what each holds
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_toolkit.checkpoint.manifest import RunShape
from ds_toolkit.errors import ToolkitError
from ds_toolkit.guardian.birth import Birth
from ds_toolkit.guardian.control import ControlBlock
from ds_toolkit.guardian.pieces import Coordinates, PieceKind, Sharding
from ds_toolkit.guardian.processes import is_alive

CONTENTS_NAME = "contents.json"
JOB_NAME, _GUARDIAN_NAME = "job.json", "guardian.json"
_NAMESPACE_NAME = "pid_namespace"
# Within which the ranks of a job make their pages once its arena is there.
_UNBORN_SECONDS = 300.0
# Everybody may write there; a folder of our own within is made private, and checked to be ours.
_TMPFS = Path("/dev/shm")  # noqa: S108


def arena_root() -> Path:
    """Where this user's arenas lie: on tmpfs, so that they outlive processes and not the machine."""
    return _TMPFS / f"ds_toolkit-{os.getuid()}"


@dataclass(frozen=True)
class Job:
    """What the guardian of a node has to know.

    Attributes:
        job_id: eight hexadecimal digits, the same on all nodes.
        directory: the checkpoint directory, shared by all nodes.
        node: number of this node, from 0.
        nodes: the node of every rank.
        sharding: the coordinates of every rank.
        kinds: what the slots of every rank hold.
        shape: of the run.
        versions: name -> version of the software that writes the slots.
        deadline_seconds: within which last words must be committed.
        keep_last: how many periodic checkpoints are kept.
        keep_every: the multiples of so many steps are kept for ever.
        broken: tags that did not verify when the run began.
        hang_after_seconds: how long nothing may move before it is a hang; None: the steps seen decide.
        on_hang: `report`, or `last-words`.
    """

    job_id: str
    directory: Path
    node: int
    nodes: tuple[int, ...]
    sharding: Sharding
    kinds: tuple[frozenset[PieceKind], ...]
    shape: RunShape
    versions: Mapping[str, str]
    deadline_seconds: float
    keep_last: int
    keep_every: int | None = None
    broken: tuple[str, ...] = ()
    hang_after_seconds: float | None = None
    on_hang: str = "report"

    @property
    def local_ranks(self) -> list[int]:
        """Global ranks of this node."""
        return [rank for rank, node in enumerate(self.nodes) if node == self.node]

    @property
    def num_nodes(self) -> int:
        """How many nodes the job has."""
        return len(set(self.nodes))

    def as_json(self) -> dict[str, Any]:
        """The form in the file."""
        return {
            **dataclasses.asdict(self),
            "directory": os.fspath(self.directory),
            "kinds": [sorted(kind.name for kind in kinds) for kinds in self.kinds],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Job:
        """Back from `as_json`."""
        sharding = dict(data["sharding"])
        sharding["ranks"] = tuple(Coordinates(**at) for at in sharding["ranks"])
        return cls(
            **{
                **data,
                "directory": Path(data["directory"]),
                "nodes": tuple(data["nodes"]),
                "broken": tuple(data["broken"]),
                "sharding": Sharding(**sharding),
                "kinds": tuple(frozenset(PieceKind[name] for name in names) for names in data["kinds"]),
                "shape": RunShape(**data["shape"]),
            }
        )


@dataclass(frozen=True)
class SlotFile:
    """A file of a snapshot: its name in the tag, and what it holds."""

    name: str
    kind: PieceKind


@dataclass(frozen=True)
class Arena:
    """The folder of one job on this node."""

    folder: Path

    @classmethod
    def create(cls, job: Job, root: Path | None = None) -> Arena:
        """Make the folder of a job and describe the job in it; nobody else may look into it.

        Raises:
            ToolkitError: it cannot be made, or its root belongs to somebody else.
        """
        root = root or arena_root()
        folder = root / job.job_id
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if root.stat().st_uid != os.getuid() or root.is_symlink():
                raise ToolkitError("the place of snapshots belongs to somebody else", where=root)
            root.chmod(0o700)
            folder.mkdir(mode=0o700)
            (folder / _NAMESPACE_NAME).write_text(_pid_namespace())
            Birth.now(job.directory).write(folder)
            _write_json(folder / JOB_NAME, job.as_json())
        except OSError as error:
            raise ToolkitError("the arena cannot be made", where=folder, why=error.strerror) from error
        return cls(folder)

    @property
    def socket_path(self) -> Path:
        """Where the guardian listens."""
        return self.folder / "guardian.sock"

    @property
    def log_path(self) -> Path:
        """Where the guardian speaks when nobody listens to its standard error."""
        return self.folder / "guardian.log"

    @property
    def scripts_folder(self) -> Path:
        """What is to lie beside the tags, such as DeepSpeed's own recovery scripts."""
        return self.folder / "scripts"

    def rank_folder(self, rank: int) -> Path:
        """Where a rank's page and slots lie."""
        return self.folder / f"rank_{rank:05d}"

    def slot_folder(self, rank: int, index: int) -> Path:
        """Where a snapshot's files lie."""
        return self.rank_folder(rank) / f"slot_{index}"

    def birth(self) -> Birth:
        """When it was made.

        Raises:
            OSError: it is gone.
        """
        return Birth.read(self.folder)

    def age_seconds(self) -> float:
        """How long ago that was, whatever has become of the clock on the wall.

        Raises:
            OSError: it is gone.
        """
        return self.birth().age_seconds(self.folder)

    def job(self) -> Job:
        """The job, as local rank 0 described it.

        Raises:
            ToolkitError: the description is not there, or not to be understood.
        """
        path = self.folder / JOB_NAME
        try:
            return Job.from_json(json.loads(path.read_text()))
        except OSError as error:
            raise ToolkitError("an arena's job is not described", where=path, why=error.strerror) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ToolkitError("an arena's job cannot be understood", where=path, why=str(error)) from error

    def sign(self, pid: int, ticks: int) -> None:
        """This process is the guardian."""
        _write_json(self.folder / _GUARDIAN_NAME, {"pid": pid, "start_ticks": ticks})

    def guardian(self) -> tuple[int, int] | None:
        """Process id and start of the guardian that signed last, whether it lives or not."""
        try:
            data = json.loads((self.folder / _GUARDIAN_NAME).read_text())
            return int(data["pid"]), int(data["start_ticks"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def has_guardian(self) -> bool:
        """Whether its guardian lives."""
        guardian = self.guardian()
        return guardian is not None and is_alive(*guardian)

    def is_dead(self) -> bool:
        """Whether its guardian and all its ranks have ended, as far as that can be seen from here.

        Containers may share the place and not see each other's processes. An arena that has had no ranks for
        a long while is dead, too.
        """
        if _text(self.folder / _NAMESPACE_NAME) != _pid_namespace() or self.has_guardian():
            return False
        folders = list(self.folder.glob("rank_*"))
        if not folders:
            return self.age_seconds() > _UNBORN_SECONDS
        return not any(self._lives(folder) for folder in folders)

    def _lives(self, rank_folder: Path) -> bool:
        try:
            page = ControlBlock(rank_folder, writable=False)
        except ToolkitError:
            # About to make its page; the folder of one that died before that goes with the others.
            return self.age_seconds() < _UNBORN_SECONDS
        try:
            return is_alive(*page.process)
        finally:
            page.close()

    def remove(self) -> None:
        """Free the memory; what is missing already is no error."""
        shutil.rmtree(self.folder, ignore_errors=True)


def write_contents(slot_folder: Path, files: list[SlotFile]) -> None:
    """Say which files a slot has. Only between `begin_slot` and `end_slot`."""
    _write_json(slot_folder / CONTENTS_NAME, [{"name": file.name, "kind": file.kind.name} for file in files])


def read_contents(slot_folder: Path) -> list[SlotFile]:
    """The files of a slot.

    Raises:
        ToolkitError: what the slot says of them cannot be read, as while it is written.
    """
    path = slot_folder / CONTENTS_NAME
    try:
        return [SlotFile(file["name"], PieceKind[file["kind"]]) for file in json.loads(path.read_text())]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ToolkitError("a slot's contents cannot be read", where=path, why=str(error)) from error


def _pid_namespace() -> str:
    return os.fspath(Path("/proc/self/ns/pid").readlink())


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _write_json(path: Path, data: object) -> None:
    # On tmpfs there is nothing to flush; whole all the same, for whoever reads it at any time.
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(data))
    partial.replace(path)
