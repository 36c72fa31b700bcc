"""One tag, written by the guardians of all nodes: each copies what its ranks give, one commits."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ds_toolkit.checkpoint import commit
from ds_toolkit.checkpoint.commit import PartialTag
from ds_toolkit.checkpoint.manifest import WEIGHTS_ONLY, Manifest, ManifestFile, RankManifest
from ds_toolkit.errors import ToolkitError
from ds_toolkit.files import write_whole
from ds_toolkit.guardian.arena import Arena, Job
from ds_toolkit.guardian.deadline import Deadline
from ds_toolkit.guardian.journal import note
from ds_toolkit.guardian.writing import Giving, copy_slot, lay_beside

_LOOK_SECONDS = 0.1
_VISIBLE_SECONDS = 5.0
_GIVEN_UP = "given_up_node_"


@dataclass(frozen=True)
class Purpose:
    """Why a tag is written, and how it is kept; as in its manifest."""

    kind: str
    protected: bool = False
    micro_steps: int = 0


class JointTag:
    """This node's part in a tag that is being written.

    Every call raises a ToolkitError if it does not succeed, be it that the disk is full.
    """

    def __init__(
        self,
        arena: Arena,
        job: Job,
        partial: PartialTag,
        step: int,
        *,
        committer: int,
        nodes: Iterable[int],
        deadline: Deadline,
    ) -> None:
        """
        Args:
            arena: of this node.
            job: as this node's arena has it.
            partial: the tag; all nodes give it the same name and save id.
            step: optimizer steps that it holds.
            committer: the node that makes the hidden folder and commits.
            nodes: that write; the committer seals the ranks of all others.
            deadline: after which it is given up.
        """
        self._arena, self._job, self._partial, self._step = arena, job, partial, step
        self._commits = committer == job.node
        self._nodes = frozenset(nodes)
        self._deadline = deadline

    def begin(self) -> None:
        """Make the hidden folder, or wait until the committer's is seen here."""
        directory = self._partial.directory
        if not directory.is_dir():
            # Making it anew might fill the disk below a mount that has gone.
            raise ToolkitError("the checkpoint directory is gone", where=directory)
        if self._commits:
            with _Explained(self._partial):
                commit.begin(self._partial)
            return
        while not self._folder_is_there():
            self._wait("the node that commits has not begun the checkpoint")

    def copy(self, givings: Iterable[Giving]) -> dict[int, list[ManifestFile]]:
        """Copy and flush what the ranks of this node give; the files by rank.

        Raises:
            SlotChangedError: a slot was written over meanwhile.
        """
        with _Explained(self._partial):
            return {
                giving.rank: copy_slot(self._arena, giving, self._partial.folder, self._deadline)
                for giving in givings
            }

    def seal(self, files: dict[int, list[ManifestFile]]) -> None:
        """Say for each rank of this node, and of those that do not take part, what it gave."""
        absent = [rank for rank, node in enumerate(self._job.nodes) if node not in self._nodes]
        with _Explained(self._partial):
            for rank in [*self._job.local_ranks, *(absent if self._commits else [])]:
                of_rank = files.get(rank, [])
                commit.seal_flushed(self._partial, rank, self._step, self._job.shape, of_rank)

    def finish(self, purpose: Purpose) -> Manifest:
        """Commit when all nodes have sealed their ranks; on another node, wait until it is committed."""
        if not self._commits:
            return self._committed()
        self._await_seals()
        with _Explained(self._partial):
            manifest = commit.commit(
                self._partial,
                kind=purpose.kind,
                protected=purpose.protected,
                micro_steps=purpose.micro_steps,
                versions=self._job.versions,
                patience_seconds=0,
                point_latest=purpose.kind != WEIGHTS_ONLY,
            )
        try:
            lay_beside(self._arena.scripts_folder, self._partial.directory)
        except OSError as error:
            note(f"the scripts beside the checkpoints cannot be written: {error}")
        return manifest

    def give_up(self, why: str) -> None:
        """Remove what was written, or let the node that commits know that it waits in vain."""
        if self._commits:
            commit.abandon(self._partial)
            return
        try:
            write_whole(self._partial.folder / f"{_GIVEN_UP}{self._job.node:05d}", why.encode())
        except OSError as error:
            note(f"the node that commits cannot be told: {error}")

    def _await_seals(self) -> None:
        folder = self._partial.folder
        missing = list(range(len(self._job.nodes)))
        while True:
            # A listing is what a network file system asks its server for; it would remember single names.
            with _Explained(self._partial):
                there = {path.name for path in folder.iterdir()}
            for name in sorted(there):
                if name.startswith(_GIVEN_UP):
                    why = _text(folder / name)
                    raise ToolkitError(f"node {int(name[len(_GIVEN_UP) :])} gave up", where=folder, why=why)
            missing = [rank for rank in missing if RankManifest.path(folder, rank).name not in there]
            if not missing:
                return
            self._wait(f"rank {missing[0]} has not sealed the checkpoint")

    def _committed(self) -> Manifest:
        while self._folder_is_there():
            self._wait("the checkpoint has not been committed")
        # A network file system may show that one name is gone before it shows that the other is there.
        patience = Deadline(min(_VISIBLE_SECONDS, self._deadline.seconds_left))
        while True:
            with contextlib.suppress(ToolkitError):
                manifest = Manifest.read(self._partial.target)
                if manifest.step == self._step:
                    return manifest
            if not patience.seconds_left:
                raise ToolkitError("the node that commits gave up", where=self._partial.target)
            time.sleep(_LOOK_SECONDS)

    def _folder_is_there(self) -> bool:
        with _Explained(self._partial):
            return self._partial.folder in self._partial.directory.iterdir()

    def _wait(self, what: str) -> None:
        try:
            self._deadline.check()
        except ToolkitError as error:
            raise ToolkitError(what, where=self._partial.folder, why=error.what) from error
        time.sleep(_LOOK_SECONDS)


class _Explained:
    """Turns an error of the operating system into one that says what was meant to be done."""

    def __init__(self, partial: PartialTag) -> None:
        self._partial = partial

    def __enter__(self) -> None:
        return

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, OSError):
            raise ToolkitError(
                f"the checkpoint `{self._partial.tag}` cannot be written",
                where=error.filename if isinstance(error.filename, str) else self._partial.folder,
                why=error.strerror or str(error),
            ) from error


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        return str(error)
