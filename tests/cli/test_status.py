"""`ds-toolkit status` on folders and pages that the test makes itself."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from ds_toolkit.checkpoint.incident import Incident, RankEnd
from ds_toolkit.checkpoint.manifest import Manifest, ManifestFile, RunShape
from ds_toolkit.cli.app import make_app
from ds_toolkit.guardian import arenas as arenas_module
from ds_toolkit.guardian.arena import Arena, Job
from ds_toolkit.guardian.control import CONTROL_NAME, ControlBlock, Leaving, Phase
from ds_toolkit.guardian.pieces import Coordinates, PieceKind, Sharding
from ds_toolkit.guardian.processes import start_ticks

SHAPE = RunShape(world_size=2, dp_world_size=2, mp_world_size=1, zero_stage=2, precision="bf16")
KINDS = frozenset({PieceKind.MODEL})
MODEL = "mp_rank_00_model_states.pt"
JOB_ID = "0123abcd"

Call = Callable[..., tuple[int, str]]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    return folder


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where arenas lie, nobody saying otherwise."""
    monkeypatch.setattr(arenas_module, "arena_root", lambda: tmp_path / "arenas")
    return tmp_path / "arenas"


@pytest.fixture
def call(
    directory: Path, root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Call:
    """The command on the directory: its exit code, and what it printed."""
    monkeypatch.setenv("COLUMNS", "120")

    def run(*options: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as end:
            make_app("status")(["status", str(directory), *map(str, options)])
        printed = capsys.readouterr()
        assert printed.err == ""
        return int(end.value.code or 0), printed.out

    return run


def as_json(call: Call, *options: object) -> tuple[int, dict[str, Any]]:
    code, out = call(*options, "--json")
    data: dict[str, Any] = json.loads(out)
    assert data.pop("schema") == 1
    return code, data


def commit(directory: Path, step: int, *, kind: str = "periodic", age_seconds: float = 90.0) -> Path:
    """A tag of one file of 1,000 bytes with its manifest."""
    folder = directory / f"global_step{step}"
    folder.mkdir()
    (folder / MODEL).write_bytes(bytes(1000))
    created_at = datetime.now(timezone.utc) - timedelta(seconds=age_seconds)
    file = ManifestFile(MODEL, 1000, 0, 0)
    Manifest(folder.name, step, kind, SHAPE, (file,), created_at=created_at.isoformat()).write(folder)
    return folder


def make_arena(
    directory: Path, root: Path, *, num_ranks: int = 2, num_nodes: int = 1, job_id: str = JOB_ID
) -> Arena:
    """An arena on the first node, without guardian and pages."""
    job = Job(
        job_id=job_id,
        directory=directory,
        node=0,
        nodes=tuple(rank * num_nodes // num_ranks for rank in range(num_ranks)),
        sharding=Sharding(tuple(Coordinates(dp) for dp in range(num_ranks)), stage=2),
        kinds=(KINDS,) * num_ranks,
        shape=SHAPE,
        versions={},
        deadline_seconds=25.0,
        keep_last=3,
    )
    arena = Arena.create(job, root)
    for rank in job.local_ranks:
        arena.rank_folder(rank).mkdir()
    return arena


def guard(arena: Arena) -> None:
    """This process is the guardian."""
    arena.sign(os.getpid(), start_ticks(os.getpid()) or 0)


@dataclass
class Steps:
    """Where a rank is: its step, and the steps in its slots, the last of which may be half written."""

    step: int
    whole: tuple[int, ...]
    half: int | None = None
    phase: Phase = Phase.FORWARD


def place(arena: Arena, rank: int, at: Steps) -> ControlBlock:
    """This process is that rank."""
    page = ControlBlock.create(arena.rank_folder(rank), rank, 3)
    page.enter(at.phase, at.step, 1, time.monotonic_ns() - 2_000_000_000)
    for index, step in enumerate(at.whole):
        page.begin_slot(index, step, KINDS)
        page.end_slot(index)
    if at.half is not None:
        page.begin_slot(len(at.whole), at.half, KINDS)
    return page


def end(arena: Arena, rank: int) -> None:
    """The rank's process is gone, its page is there."""
    # A live process that began at another time than the rank did: its id was used again.
    path = arena.rank_folder(rank) / CONTROL_NAME
    page = bytearray(path.read_bytes())
    page[24:32] = (1).to_bytes(8, sys.byteorder)
    path.write_bytes(page)


def flat(text: str) -> str:
    """Blanks in tables are as wide as the columns need."""
    return re.sub(r"[ ─]+", " ", text)


def test_a_run_in_good_order(directory: Path, root: Path, call: Call) -> None:
    commit(directory, 40, age_seconds=700)
    commit(directory, 100, kind="last-words", age_seconds=90)
    arena = make_arena(directory, root)
    guard(arena)
    place(arena, 0, Steps(121, (120, 121)))
    place(arena, 1, Steps(121, (119, 120), half=121, phase=Phase.STEP))
    code, out = call()
    assert code == 0
    told = flat(out)
    assert told.startswith(
        "checkpoints\n \n tag step kind age size whole \n \n global_step100 100 last-words "
    )
    assert re.search(
        r" global_step100 100 last-words 1 min 3\d s 1.0 KB yes \n global_step40 40 periodic 11 ", told
    )
    assert re.search(r"\nnewest whole checkpoint: global_step100 of step 100, 1 min 3\d s old\n", told)
    assert f"job {JOB_ID}, node 0 of 1 node: guardian {os.getpid()}" in told
    assert f" 0 {os.getpid()} forward 121 121 2." in told
    assert f" 1 {os.getpid()} step 121 120 2." in told
    assert told.endswith(
        "\nif it died now: at most 1 step and the one under way would be lost, training would go on from last"
        " words of step 120\n"
    )


def test_all_of_it_as_json(directory: Path, root: Path, call: Call) -> None:
    commit(directory, 100)
    arena = make_arena(directory, root)
    guard(arena)
    place(arena, 0, Steps(121, (120, 121)))
    place(arena, 1, Steps(121, (121, 120))).leaving = Leaving.SIGNAL
    code, data = as_json(call)
    assert (code, data["newest_whole"], data["incidents"], data["problems"]) == (0, "global_step100", [], [])
    (tag,) = data["tags"]
    assert tag.pop("age_seconds") == pytest.approx(90, abs=30)
    assert datetime.fromisoformat(tag.pop("created_at")).tzinfo is not None
    assert tag == {
        "tag": "global_step100",
        "step": 100,
        "kind": "periodic",
        "num_bytes": 1000,
        "has_manifest": True,
        "is_whole": True,
        "why_broken": None,
    }
    (job,) = data["jobs"]
    first, second = job.pop("ranks")
    assert first.pop("still_seconds") == pytest.approx(2, abs=30)
    assert first == {
        "rank": 0,
        "pid": os.getpid(),
        "is_running": True,
        "phase": "forward",
        "step": 121,
        "micro_step": 1,
        "whole_steps": [120, 121],
        "leaving": None,
    }
    assert (second["whole_steps"], second["leaving"]) == ([120, 121], "signal")
    assert job == {
        "job_id": JOB_ID,
        "folder": str(arena.folder),
        "node": 0,
        "num_nodes": 1,
        "guardian_pid": os.getpid(),
        "has_guardian": True,
        "unreadable": [],
        "is_running": True,
        "step": 121,
        "whole_step": 121,
        "loss_of_death": {"num_steps": 0, "from_step": 121, "source": "snapshots"},
    }


@pytest.mark.parametrize(
    ("checkpoint", "ranks", "guarded", "lost", "source"),
    [
        (100, [Steps(121, (121,)), Steps(121, (120,))], True, 21, "checkpoint"),  # no step in common
        (100, [Steps(121, (121,)), Steps(121, (121,))], False, 21, "checkpoint"),  # nobody to write it
        (None, [Steps(121, (121,)), Steps(121, ())], True, 121, "nothing"),
        (None, [Steps(121, (118, 121)), Steps(123, (118,))], True, 5, "snapshots"),
        (120, [Steps(121, (118,)), Steps(121, (118,))], True, 1, "checkpoint"),  # snapshots are older
        (121, [Steps(121, (121,)), Steps(121, (121,))], True, 0, "snapshots"),
        (200, [Steps(121, ()), Steps(121, ())], True, 0, "checkpoint"),  # of a run that had gone further
    ],
)
def test_what_death_would_cost(
    directory: Path,
    root: Path,
    call: Call,
    checkpoint: int | None,
    ranks: list[Steps],
    guarded: bool,
    lost: int,
    source: str,
) -> None:
    if checkpoint is not None:
        commit(directory, checkpoint)
    arena = make_arena(directory, root)
    if guarded:
        guard(arena)
    for rank, at in enumerate(ranks):
        place(arena, rank, at)
    _, data = as_json(call)
    loss = data["jobs"][0]["loss_of_death"]
    assert (loss["num_steps"], loss["source"]) == (lost, source)
    out = call()[1]
    origin = {
        "snapshots": "last words of step",
        "checkpoint": "the checkpoint of",
        "nothing": "the beginning",
    }
    assert f"at most {lost} step" in out
    assert f"go on from {origin[source]}" in out


def test_a_job_without_a_guardian_is_a_problem(directory: Path, root: Path, call: Call) -> None:
    commit(directory, 100)
    arena = make_arena(directory, root)
    for rank in (0, 1):
        place(arena, rank, Steps(101, (101,)))
    code, out = call()
    assert code == 1
    assert out.endswith(f"problem: job {JOB_ID} has no guardian: nothing will write last words for it\n")
    assert f"job {JOB_ID}, node 0 of 1 node: no guardian\n" in out
    arena.sign(os.getpid(), 1)  # one that has ended
    data = as_json(call)[1]
    assert (data["jobs"][0]["guardian_pid"], data["jobs"][0]["has_guardian"]) == (os.getpid(), False)


def test_a_rank_that_has_ended_is_a_problem_while_others_run(directory: Path, root: Path, call: Call) -> None:
    commit(directory, 100)
    arena = make_arena(directory, root)
    guard(arena)
    for rank in (0, 1):
        place(arena, rank, Steps(101, (101,)))
    end(arena, 1)
    code, out = call()
    assert code == 1
    assert f" 1 {os.getpid()} (ended) forward 101 101 " in flat(out)
    assert out.endswith(f"problem: job {JOB_ID}: rank 1 (process {os.getpid()}) has ended\n")


def test_what_an_ended_job_has_left_is_shown_and_is_no_problem(
    directory: Path, root: Path, call: Call
) -> None:
    commit(directory, 100)
    arena = make_arena(directory, root)
    for rank in (0, 1):
        place(arena, rank, Steps(101, (101,)))
        end(arena, rank)
    code, out = call()
    assert code == 0
    assert out.endswith(f"\njob {JOB_ID} has ended; what it left lies in {arena.folder}\n")
    assert as_json(call)[1]["jobs"][0]["loss_of_death"] is None


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda path: path.unlink(), "No such file"),
        (lambda path: path.write_bytes(b"short"), "cut short"),
        (lambda path: path.write_bytes(bytes(4096)), "another version"),
        (
            lambda path: path.write_bytes(path.read_bytes()[:32] + bytes([99]) * 8 + bytes(4056)),
            "not be understood",
        ),
        (
            lambda path: path.write_bytes(path.read_bytes()[:80] + b"\xff" * 8 + bytes(4008)),
            "not be understood",
        ),
    ],
)
def test_a_page_that_cannot_be_read_is_a_problem(
    directory: Path, root: Path, call: Call, break_it: Callable[[Path], object], says: str
) -> None:
    commit(directory, 100)
    arena = make_arena(directory, root)
    guard(arena)
    for rank in (0, 1):
        place(arena, rank, Steps(101, (101,)))
    break_it(arena.rank_folder(1) / CONTROL_NAME)
    code, data = as_json(call)
    assert code == 1
    (problem,) = data["problems"]
    assert problem.startswith(f"job {JOB_ID}: rank 1: ")
    assert says in problem
    # The snapshots of a rank that cannot be seen are not counted on.
    assert (data["jobs"][0]["whole_step"], data["jobs"][0]["loss_of_death"]["source"]) == (None, "checkpoint")


def test_only_ranks_of_this_node_and_jobs_of_this_directory_are_looked_at(
    directory: Path, root: Path, call: Call
) -> None:
    commit(directory, 100)
    arena = make_arena(directory, root, num_ranks=4, num_nodes=2)
    guard(arena)
    for rank in (0, 1):
        place(arena, rank, Steps(101, (101,)))
    make_arena(directory.parent / "elsewhere", root, job_id="ffffffff")
    unknown = root / "eeeeeeee"
    unknown.mkdir()
    (unknown / "job.json").write_text("{}")
    code, data = as_json(call)
    assert (code, [job["job_id"] for job in data["jobs"]]) == (0, [JOB_ID])
    assert [rank["rank"] for rank in data["jobs"][0]["ranks"]] == [0, 1]
    assert f"job {JOB_ID}, node 0 of 2 nodes: " in call()[1]


def test_arenas_in_another_place_are_found_where_they_are_said_to_be(
    directory: Path, tmp_path: Path, call: Call
) -> None:
    commit(directory, 100)
    arena = make_arena(directory, tmp_path / "nvme")
    guard(arena)
    for rank in (0, 1):
        place(arena, rank, Steps(101, (101,)))
    assert as_json(call)[1]["jobs"] == []
    assert "no job on this node has snapshots for this directory" in call()[1]
    assert len(as_json(call, "--arena", tmp_path / "nvme")[1]["jobs"]) == 1


def test_looking_changes_nothing(directory: Path, root: Path, call: Call) -> None:
    commit(directory, 100)
    arena = make_arena(directory, root)
    guard(arena)
    for rank in (0, 1):
        place(arena, rank, Steps(101, (101,), half=102))

    def everything() -> dict[str, bytes]:
        files = [path for path in directory.parent.rglob("*") if path.is_file()]
        return {str(path): path.read_bytes() for path in files}

    before = everything()
    call()
    assert everything() == before


def test_a_directory_without_a_whole_checkpoint_is_a_problem(directory: Path, call: Call) -> None:
    code, out = call()
    assert (code, out) == (
        1,
        "no job on this node has snapshots for this directory\n"
        "problem: there is no whole checkpoint: a failure would cost all of the training\n",
    )
    (commit(directory, 5) / MODEL).write_bytes(b"cut")
    code, out = call()
    assert code == 1
    assert re.search(r"global_step5 +\? +periodic .* NO ", out)
    assert "newest whole" not in out
    assert out.count("problem: ") == 2
    assert f"problem: global_step5 is not whole: {MODEL}: " in out


def test_a_broken_tag_beside_a_whole_one_is_a_problem(directory: Path, call: Call) -> None:
    commit(directory, 5)
    (commit(directory, 9) / MODEL).unlink()
    code, data = as_json(call)
    assert (code, data["newest_whole"]) == (1, "global_step5")
    assert [tag["is_whole"] for tag in data["tags"]] == [True, False]
    assert len(data["problems"]) == 1


def test_a_latest_that_names_no_tag_is_a_problem(directory: Path, call: Call) -> None:
    commit(directory, 5)
    (directory / "latest").write_text("global_step7")
    code, data = as_json(call)
    assert code == 1
    (lost,) = [tag for tag in data["tags"] if tag["tag"] == "global_step7"]
    assert (lost["created_at"], lost["age_seconds"], lost["num_bytes"]) == (None, None, 0)
    assert re.search(r"global_step7 +\? +\? +\? +0 B +NO", call()[1])


def test_times_that_are_odd(directory: Path, call: Call) -> None:
    commit(directory, 5, age_seconds=-500)  # by another machine's clock
    folder = commit(directory, 6)
    manifest = Manifest.read(folder)
    for created_at in ("yesterday", "2020-01-01T00:00:00"):
        Manifest(**{**vars(manifest), "created_at": created_at}).write(folder)
        tags = {tag["step"]: tag for tag in as_json(call)[1]["tags"]}
        assert tags[5]["age_seconds"] == 0
        assert (tags[6]["age_seconds"] > 86_400) == (created_at != "yesterday")


def test_names_are_printed_as_they_are(directory: Path, call: Call) -> None:
    (directory / "[red]x").mkdir()
    (directory / "[red]x" / MODEL).write_bytes(b"no archive")
    out = call()[1]
    assert re.search(r"\[red\]x +\? ", out)
    assert "problem: [red]x is not whole" in out


def test_a_long_name_is_whole_where_the_terminal_is_narrow(
    directory: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    tag = "x" * 150
    folder = commit(directory, 5).rename(directory / tag)
    (folder / MODEL).unlink()
    monkeypatch.setenv("COLUMNS", "60")
    table = call()[1].partition("no job")[0]
    assert table.count("x") == len(tag)


def test_incidents_have_a_row_each(directory: Path, call: Call) -> None:
    for moment, end, tag in (
        ("2026-01-02T03:04:05+00:00", RankEnd(1, 4711, "died", "[SIGKILL]"), "global_step7"),
        ("2026-01-03T01:00:00+02:00", RankEnd(0, 4710, "exception", "ValueError"), None),
    ):
        Incident(moment, "0badcafe", 0, (end,), (), "complete", "", tag=tag).write(directory)
    commit(directory, 7)
    code, out = call()
    assert code == 0  # what is over is no problem
    assert "2026-01-02 03:04:05 UTC rank 1 (process 4711) died: [SIGKILL] global_step7" in flat(out)
    assert "2026-01-02 23:00:00 UTC rank 0 (process 4710) raised: ValueError none" in flat(out)
    assert as_json(call)[1]["incidents"][0] == {
        "when": "2026-01-02T03:04:05+00:00",
        "what": "rank 1 (process 4711) died: [SIGKILL]",
        "tag": "global_step7",
    }


def test_a_place_that_is_no_directory_cannot_be_looked_at(tmp_path: Path) -> None:
    for path in (tmp_path / "none", Path(__file__)):
        command = [sys.executable, "-m", "ds_toolkit", "status", str(path)]
        finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert (finished.returncode, finished.stdout) == (2, "")
        assert "there is no such directory" in finished.stderr
