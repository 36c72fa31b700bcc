"""The clock on the wall is set a day forward and a day back while a job runs: nothing goes by it.

Of the ranks and of the guardian alone (tests/set_clock.c); the machine's own stays what it is.
"""

from __future__ import annotations

import datetime
import os
import re
import signal
import struct
import time
from pathlib import Path
from typing import Any

import jobs
import pytest
import simple_runs

from ds_toolkit.checkpoint.incident import Incident, incidents
from ds_toolkit.checkpoint.manifest import Manifest
from ds_toolkit.guardian.arena import Arena
from ds_toolkit.guardian.control import ControlBlock

INTERVAL_SECONDS = 0.5
DAY_SECONDS = 24 * 3600


class Clock:
    """Of all processes that have the environment, those of the machine being as they are."""

    def __init__(self, folder: Path) -> None:
        self._file, library = folder / "ahead_seconds", folder / "set_clock.so"
        self._file.write_bytes(struct.pack("@l", 0))
        source = jobs.REPOSITORY / "tests" / "set_clock.c"
        jobs.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source]).check()
        self.environment = {"LD_PRELOAD": os.fspath(library), "SET_CLOCK_FILE": os.fspath(self._file)}

    def set(self, days: int) -> None:
        """Ahead of the machine's clock by so many days."""
        with self._file.open("r+b") as file:
            file.write(struct.pack("@l", days * DAY_SECONDS))


def is_ahead_by_days(text: str) -> int:
    """How far a time is ahead of the machine's clock, in whole days."""
    difference = datetime.datetime.fromisoformat(text) - datetime.datetime.now(datetime.timezone.utc)
    return round(difference.total_seconds() / DAY_SECONDS)


def newest(directory: Path) -> Manifest:
    """What `latest` names, which must be there whenever one looks."""
    return Manifest.read(directory / (directory / "latest").read_text())


def watch(directory: Path, seconds: float) -> list[Manifest]:
    """Checkpoints that became the newest within this time."""
    seen: dict[str, Manifest] = {}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        manifest = newest(directory)
        seen.setdefault(manifest.tag, manifest)
        time.sleep(0.02)
    return list(seen.values())


@pytest.fixture(scope="module")
def jumped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two jobs that are killed in the end, one after a jump forward and one after a jump back."""
    folder = tmp_path_factory.mktemp("clock")
    clock, directory = Clock(folder), folder / "ckpt"
    words = (directory, "1000000", f"{INTERVAL_SECONDS}s", "--snapshots", "--set-clock")
    found: dict[str, Any] = {"directory": directory, "periods": {}, "early_incidents": [], "logs": []}
    for days in (1, -1):
        command = jobs.torchrun_command(simple_runs.WORKER, *words, num_ranks=1)
        log = folder / f"{days}.log"
        with jobs.Job(command, environment=clock.environment, log=log) as job:
            jobs.wait_until(lambda: simple_runs.arenas_of(directory), 90, "the arena")
            (place,) = simple_runs.arenas_of(directory)
            jobs.wait_until(lambda: (directory / "latest").exists(), 60, "a checkpoint")
            found["periods"][f"before {days}"] = watch(directory, 3.0)
            clock.set(days)
            found["periods"][f"{days}"] = watch(directory, 4.0)
            found["early_incidents"].append(len(incidents(directory)))
            page = ControlBlock(Arena(place).rank_folder(0), writable=False)
            os.kill(page.process[0], signal.SIGKILL)
            assert job.wait(60).exit_code != 0
            jobs.wait_until(lambda: not simple_runs.arenas_of(directory), 60, "the end of the guardian")
            found["logs"].append(job.output())
            found["last_step"] = page.step
    return found


def test_the_clock_was_set(jumped: dict[str, Any]) -> None:
    for days in (1, -1):
        ahead = [is_ahead_by_days(manifest.created_at) for manifest in jumped["periods"][f"{days}"]]
        assert ahead[0] != days, "the newest was written before the jump"
        assert set(ahead[1:]) == {days}


@pytest.mark.parametrize("period", ["before 1", "1", "before -1", "-1"])
def test_saves_stay_on_schedule(jumped: dict[str, Any], period: str) -> None:
    """One every half second, and nothing else: on a small machine some come late."""
    num_saves = len(jumped["periods"][period]) - 1
    seconds = 3.0 if period.startswith("before") else 4.0
    assert seconds / INTERVAL_SECONDS / 3 <= num_saves <= seconds / INTERVAL_SECONDS + 1


def test_no_last_words_without_a_reason(jumped: dict[str, Any]) -> None:
    assert jumped["early_incidents"] == [0, 1]
    for log in jumped["logs"]:
        assert not re.search(r"guardian of this node has ended|is missing|no snapshots", log)


def test_incidents_have_times_and_names_of_their_own(jumped: dict[str, Any]) -> None:
    paths = sorted((jumped["directory"] / "incidents").iterdir())
    assert len(paths) == 2
    # In the order of their times: the later death has the earlier one.
    by_time = [Incident.read(path) for path in paths]
    assert incidents(jumped["directory"]) == by_time
    assert [is_ahead_by_days(incident.happened_at) for incident in by_time] == [-1, 1]
    assert all(incident.was_caught for incident in by_time)
    assert all(incident.seconds is None or 0 <= incident.seconds < 10 for incident in by_time)


def test_what_is_newest_is_so_by_its_step(jumped: dict[str, Any]) -> None:
    """The run went on from a checkpoint of a day ahead; deleting has taken older steps alone."""
    steps = simple_runs.whole_steps(jumped["directory"])
    assert jumped["last_step"] - 1 <= steps[0] <= jumped["last_step"]
    assert newest(jumped["directory"]).step == steps[0]
    assert len(steps) == 3
    assert "last-words)" in jumped["logs"][1]
