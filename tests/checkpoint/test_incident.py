"""What guardians wrote down, read back."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from ds_toolkit.checkpoint.incident import Hang, HungRank, Incident, RankEnd, RankPlace, incidents, utc_now
from ds_toolkit.errors import ToolkitError

INCIDENT = Incident(
    happened_at="2030-01-02T03:04:05.000006+00:00",
    job_id="0000abcd",
    node=0,
    ended=(RankEnd(1, 4711, "exception", "ValueError: loss is nan"),),
    ranks=(RankPlace(0, 4710, "backward", 8, 8), RankPlace(1, 4711, "forward", 7, None)),
    outcome="complete",
    why="Step 7 is complete.",
    last_step=7,
    step=7,
    tag="global_step7",
    kind="last-words",
    total_bytes=4096,
    seconds=0.25,
)


def test_it_reads_back(tmp_path: Path) -> None:
    path = INCIDENT.write(tmp_path)
    assert path.name == "20300102T030405.000006Z-0000abcd-node0.json"
    assert Incident.read(path) == INCIDENT
    assert incidents(tmp_path) == [INCIDENT]


HANG = Hang(
    "rank 1 left its loop after 37 batches; rank 0 waits in backward of batch 38.",
    60.5,
    (HungRank(0, 4710, "backward", 37, "Thread 0x1"), HungRank(1, 4711, "idle", 37, "none: it is stopped")),
)


def test_a_hang_reads_back(tmp_path: Path) -> None:
    ended = dataclasses.replace(INCIDENT, event="hang", hang=HANG, ended=())
    assert Incident.read(ended.write(tmp_path)) == ended
    assert ended.what == f"nothing moved for 60 s: {HANG.what}"
    assert "batch 38. Step 7" in str(ended)
    assert ended.is_failure
    # The end of one that was left alone is told by another incident, and counted once.
    assert not dataclasses.replace(ended, outcome="reported", tag=None).is_failure


def test_an_incident_of_before_there_was_a_watch(tmp_path: Path) -> None:
    path = INCIDENT.write(tmp_path)
    data = json.loads(path.read_text())
    del data["event"], data["hang"]
    path.write_text(json.dumps(data))
    assert Incident.read(path) == INCIDENT
    assert (INCIDENT.event, INCIDENT.hang) == ("end", None)


def test_newest_last_and_the_unreadable_left_out(tmp_path: Path) -> None:
    older = dataclasses.replace(INCIDENT, happened_at="2030-01-02T03:04:05+02:00", job_id="ffffffff")
    path = INCIDENT.write(tmp_path)
    older.write(tmp_path)
    data = json.loads(path.read_text())
    folder = path.parent
    (folder / "empty.json").write_text("")
    (folder / "list.json").write_text("[]")
    (folder / "no-zone.json").write_text(json.dumps({**data, "happened_at": "2030-01-02T03:04:05"}))
    (folder / "short.json").write_text(json.dumps({"job_id": "x", "ended": [], "ranks": []}))
    (folder / ".x.json.1.partial").write_text("{}")
    (folder / "newer.json").write_text(json.dumps({**data, "from_a_newer_version": 1, "node": 9}))
    assert [found.node for found in incidents(tmp_path)] == [0, 0, 9]
    assert incidents(tmp_path)[0] == older
    with pytest.raises(ToolkitError, match="cannot be read"):
        Incident.read(folder / "no-zone.json")


def test_none(tmp_path: Path) -> None:
    assert incidents(tmp_path) == []


@pytest.mark.parametrize(
    ("changes", "caught"),
    [
        ({}, True),
        ({"outcome": "there already"}, True),
        ({"step": 6}, True),
        ({"step": 5}, False),
        ({"outcome": "weights only"}, False),
        ({"outcome": "impossible"}, False),
        ({"outcome": "failed"}, False),
        ({"step": None}, False),
        ({"last_step": None}, True),
    ],
)
def test_it_was_caught_if_at_most_a_step_is_lost(changes: dict[str, object], caught: bool) -> None:
    assert dataclasses.replace(INCIDENT, **changes).was_caught is caught


def test_an_end_of_the_program_is_no_failure() -> None:
    assert INCIDENT.is_failure
    ended = (RankEnd(0, 1, "end"), RankEnd(1, 2, "end"))
    assert not dataclasses.replace(INCIDENT, ended=ended).is_failure


def test_in_words() -> None:
    words = "rank 1 (process 4711) raised: ValueError: loss is nan. Step 7 is complete."
    assert str(INCIDENT).endswith(words)
    assert dataclasses.replace(INCIDENT, happened_at=utc_now()).when.tzinfo is not None
