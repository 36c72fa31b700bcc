"""A few of the starts and kills that `make cycles` makes hundreds of: real engines, and nothing is left."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import jobs

CYCLES = jobs.REPOSITORY / "tests" / "cycles.py"
TABLE = jobs.REPOSITORY / "docs" / "cycles.csv"
LEFT = ("processes", "segments", "sockets", "descriptors", "files")


def rows_of(table: Path) -> list[dict[str, str]]:
    with table.open(newline="") as file:
        return list(csv.DictReader(file))


def test_each_way_to_die_leaves_nothing(tmp_path: Path) -> None:
    table = tmp_path / "cycles.csv"
    # One more than there are ways: the last run finds what the one before it left.
    command = [sys.executable, CYCLES, "--cycles", "6", "--table", table]
    jobs.run(command, timeout_seconds=200, environment={"PYTHONPATH": f"{jobs.REPOSITORY}"}).check()
    (row,) = rows_of(table)
    assert row["cycles"] == "6"
    assert {row[f"{what}_left"] for what in LEFT} == {"0"}
    assert row["runs_lost"] == "0"


def test_the_table_tells_of_no_leak() -> None:
    rows = rows_of(TABLE)
    assert sum(int(row["cycles"]) for row in rows) >= 90
    for row in rows:
        assert {row[f"{what}_left"] for what in LEFT if what != "files"} == {"0"}
        assert row["runs_lost"] == "0"
