"""Engines of several kinds in one process, each with a guard: all are killed at once, and all are resumed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import jobs
import pytest
from simple_runs import arenas_of

from ds_toolkit.checkpoint.incident import incidents
from ds_toolkit.errors import ToolkitError
from ds_toolkit.guardian.arena import Arena
from ds_toolkit.guardian.arenas import arenas
from ds_toolkit.guardian.control import ControlBlock

WORKER = Path(__file__).with_name("several_worker.py")
IN_MEMORY = ["plain", "compiled-engine", "compiled-module"]
KINDS = [*IN_MEMORY, "file-backed"]
START_SECONDS, END_SECONDS = 120.0, 60.0


def pages_of(arena: Arena) -> list[ControlBlock]:
    return [ControlBlock(arena.rank_folder(rank), writable=False) for rank in (0, 1)]


def arena_roots(root: Path) -> list[Path | None]:
    """Where arenas lie: in memory, and on the disk."""
    return [None, *(root / "arena").glob("*")]


def all_arenas(root: Path) -> dict[str, Arena]:
    """By kind of engine, wherever they lie."""
    found = {}
    for place in arena_roots(root):
        for arena in arenas(place):
            # One of another job may go while it is looked at.
            with contextlib.suppress(ToolkitError):
                if arena.job().directory.parent == root:
                    found[arena.job().directory.name] = arena
    return found


def runs(job: jobs.Job) -> bool:
    assert job.process.poll() is None, f"the job has ended\n{job.output()[-5000:]}"
    return True


def have_guardians(root: Path) -> bool:
    found = all_arenas(root)
    return len(found) == len(KINDS) and all(arena.has_guardian() for arena in found.values())


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Where it happened, how far each kind had come, and what the next job made of it, by rank."""
    root = tmp_path_factory.mktemp("several")
    with jobs.Job(jobs.torchrun_command(WORKER, "killed", root), log=root / "killed.log") as job:
        jobs.wait_until(lambda: runs(job) and have_guardians(root), START_SECONDS, "all guardians")
        found = all_arenas(root)
        on_disk = [os.fspath(arena.folder) for kind, arena in found.items() if kind not in IN_MEMORY]
        pages = {kind: pages_of(arena) for kind, arena in found.items()}
        # In the middle of a turn: one is a step ahead of the others.
        jobs.wait_until(
            lambda: (
                runs(job)
                and all(page.step == 4 for page in pages["plain"])
                and all(page.step == 3 for page in pages["compiled-module"])
            ),
            START_SECONDS,
            "a step of the first kind, and not yet of the last",
        )
        os.kill(pages["plain"][1].process[0], signal.SIGKILL)
        assert job.wait(END_SECONDS).exit_code != 0
        done = {kind: min(page.step for page in pages[kind]) for kind in KINDS}
        jobs.wait_until(lambda: not all_arenas(root), END_SECONDS, "the end of all guardians")
    jobs.run(jobs.torchrun_command(WORKER, "resumed", root)).check()
    results = [json.loads((root / f"resumed_rank{rank}.json").read_text()) for rank in (0, 1)]
    return {"root": root, "done": done, "on_disk": on_disk, "results": results}


@pytest.mark.parametrize("kind", KINDS)
def test_each_is_resumed_as_if_nothing_had_been(killed: dict[str, Any], kind: str) -> None:
    for by_run in killed["results"]:
        straight, resumed = by_run["straight"][kind], by_run["resumed"][kind]
        why, step = resumed["resumed"]
        assert why == "last-words"
        assert killed["done"][kind] - 1 <= step <= killed["done"][kind]
        assert 0 < len(resumed["losses"]) < len(straight["losses"])
        assert resumed["losses"] == straight["losses"][-len(resumed["losses"]) :]
        assert resumed["fingerprint"] == straight["fingerprint"]


def test_they_were_not_all_at_one_step(killed: dict[str, Any]) -> None:
    """So that the process's random state was not the same for all of them."""
    steps = {kind: found["resumed"][1] for kind, found in killed["results"][0]["resumed"].items()}
    assert steps["plain"] == steps["compiled-module"] + 1, steps


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_to_be_compiled_was_compiled(killed: dict[str, Any], kind: str) -> None:
    for found in killed["results"][0].values():
        assert (found[kind]["graphs"] > 0) == kind.startswith("compiled")


@pytest.mark.parametrize("kind", KINDS)
def test_each_directory_has_an_incident_of_its_own(killed: dict[str, Any], kind: str) -> None:
    (incident,) = incidents(killed["root"] / kind)
    assert incident.was_caught
    assert 1 in [end.rank for end in incident.ended]


def test_an_arena_on_a_disk_lies_there_and_nowhere_else(killed: dict[str, Any]) -> None:
    place = killed["root"] / "arena"
    assert [Path(folder).parent.parent for folder in killed["on_disk"]] == [place]
    assert arenas_of(killed["root"] / "file-backed") == []
    (root,) = place.iterdir()
    assert list(root.iterdir()) == [], "slots are left on the disk"
