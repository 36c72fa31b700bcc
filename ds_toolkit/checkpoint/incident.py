"""What a guardian wrote down about an end that nobody asked for, or a hang: `<dir>/incidents/*.json`.

One file a node. That of the node that committed says what came of it for the whole job.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_toolkit.errors import ToolkitError
from ds_toolkit.files import make_directory, write_whole

FOLDER_NAME = "incidents"
FORMAT_VERSION = 1
END, HANG = "end", "hang"
REPORTED = "reported"


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended.

    Attributes:
        rank: global rank.
        pid: its process id.
        how: `died` (its process was gone without a word), `exception`, `signal`, or `end` if its program came
            to its end.
        detail: the exception or the signal, in its own words.
    """

    rank: int
    pid: int
    how: str
    detail: str = ""

    def __str__(self) -> str:
        words = {"died": "died", "exception": "raised", "signal": "was told to end", "end": "came to its end"}
        detail = f": {self.detail}" if self.detail else ""
        return f"rank {self.rank} (process {self.pid}) {words.get(self.how, self.how)}{detail}"


@dataclass(frozen=True)
class RankPlace:
    """Where a rank was.

    Attributes:
        rank: global rank.
        pid: its process id.
        phase: of its training loop: `attached`, `data`, `forward`, `backward`, `step`, `parked`; or `unknown`
            if it had not begun.
        step: optimizer steps that it had done.
        whole_step: newest step of which it had a whole snapshot; None if it had none.
    """

    rank: int
    pid: int
    phase: str
    step: int
    whole_step: int | None


@dataclass(frozen=True)
class HungRank:
    """A rank when nothing moved.

    Attributes:
        rank: global rank.
        pid: its process id.
        phase: as in `RankPlace`.
        batches: micro-batches that it had finished since its process began.
        stacks: of all its threads, as Python's faulthandler writes them; or why there are none.
    """

    rank: int
    pid: int
    phase: str
    batches: int
    stacks: str


@dataclass(frozen=True)
class Hang:
    """Nothing moved on a node.

    Attributes:
        what: who waited where, and who was elsewhere, in words.
        still_seconds: for how long nothing had moved when it was noticed.
        ranks: all ranks of the node.
    """

    what: str
    still_seconds: float
    ranks: tuple[HungRank, ...]

    def __str__(self) -> str:
        return f"nothing moved for {self.still_seconds:.0f} s: {self.what}"


@dataclass(frozen=True)
class Incident:
    """An end of a job, or a hang, seen from one node.

    Attributes:
        happened_at: UTC, ISO 8601.
        job_id: of the job, the same on all nodes.
        node: number of the node, from 0.
        ended: ranks of the node that ended or were about to, the first one first.
        ranks: where all ranks of the node were.
        outcome: `complete`, `weights only`, `there already` (a checkpoint of that step), `impossible`,
            `failed` if it was to be written and was not, or `reported` if a hang was left alone.
        why: the outcome in words.
        last_step: newest step that all ranks that are known of had done; None if there were none.
        step: that the outcome is about; None if there is none.
        tag: the checkpoint that was written, or was there already; None if there is none.
        kind: its kind.
        total_bytes: size of what was written.
        seconds: from the end to the commit; None if nothing was written.
        event: `end`, or `hang` if it was a hang that was seen, or that was ended.
        hang: what stood still; None if it was no hang.
    """

    happened_at: str
    job_id: str
    node: int
    ended: tuple[RankEnd, ...]
    ranks: tuple[RankPlace, ...]
    outcome: str
    why: str
    last_step: int | None = None
    step: int | None = None
    tag: str | None = None
    kind: str | None = None
    total_bytes: int = 0
    seconds: float | None = None
    event: str = END
    hang: Hang | None = None

    @property
    def is_failure(self) -> bool:
        """Whether a run ended by a failure.

        A program that ends without closing its guard has not failed. Nor has one of which a hang was
        reported: it may have moved on, and if not, its end has an incident of its own.
        """
        if self.outcome == REPORTED:
            return False
        return any(end.how != "end" for end in self.ended) or not self.ended

    @property
    def was_caught(self) -> bool:
        """Whether training can go on from a checkpoint that lacks at most one step."""
        if self.outcome not in ("complete", "there already") or self.step is None:
            return False
        return self.last_step is None or self.step >= self.last_step - 1

    @property
    def what(self) -> str:
        """Who ended, or what stood still, in words."""
        if self.hang is not None:
            return str(self.hang)
        return "; ".join(map(str, self.ended)) or "a rank of another node ended or hung"

    @property
    def when(self) -> datetime.datetime:
        """`happened_at` to reckon with."""
        return datetime.datetime.fromisoformat(self.happened_at)

    def __str__(self) -> str:
        return f"{self.happened_at} job {self.job_id}, node {self.node}: {self.what.rstrip('.')}. {self.why}"

    def write(self, directory: Path) -> Path:
        """Put it into the checkpoint directory, whole; where it lies.

        Raises:
            OSError: it cannot be written.
        """
        folder = directory / FOLDER_NAME
        make_directory(folder)
        compact = self.when.strftime("%Y%m%dT%H%M%S.%fZ")
        path = folder / f"{compact}-{self.job_id}-node{self.node}.json"
        data = {"format": FORMAT_VERSION, **dataclasses.asdict(self)}
        write_whole(path, (json.dumps(data, indent=1) + "\n").encode())
        return path

    @classmethod
    def read(cls, path: Path) -> Incident:
        """Read one back; what a newer version says besides is left out.

        Raises:
            ToolkitError: it cannot be read, or is none.
        """
        try:
            return cls._from_json(json.loads(path.read_bytes()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ToolkitError("an incident cannot be read", where=path, why=str(error)) from error

    @classmethod
    def _from_json(cls, data: Mapping[str, Any]) -> Incident:
        names = {field.name for field in dataclasses.fields(cls)}
        known = {name: value for name, value in data.items() if name in names}
        known["ended"] = tuple(RankEnd(**end) for end in data["ended"])
        known["ranks"] = tuple(RankPlace(**place) for place in data["ranks"])
        if (hang := known.get("hang")) is not None:
            known["hang"] = Hang(
                hang["what"], hang["still_seconds"], tuple(HungRank(**rank) for rank in hang["ranks"])
            )
        incident = cls(**known)
        # Whoever reads them compares times: one that has none is none.
        if incident.when.tzinfo is None:
            raise ValueError("its time has no time zone")
        return incident


def utc_now() -> str:
    """The time as an incident has it."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="microseconds")


def incidents(directory: Path) -> list[Incident]:
    """Incidents of a checkpoint directory, newest last; what cannot be read is left out."""
    found = []
    for path in sorted((directory / FOLDER_NAME).glob("[!.]*.json")):
        try:
            found.append(Incident.read(path))
        except ToolkitError:
            continue
    return sorted(found, key=lambda incident: incident.when)
