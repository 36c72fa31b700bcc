"""What is recorded of kills on other days: the rows can be read, and none tells of a loss."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import jobs

ROWS = jobs.REPOSITORY / "docs" / "chaos.csv"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, jobs.REPOSITORY / "tests" / "chaos.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_recorded_kills_were_all_survived() -> None:
    with ROWS.open(newline="") as file:
        num_random = sum(row["serial"] != "0" for row in csv.DictReader(file))
    done = run("--summary")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed: 0" in done.stdout
    assert f"random kills: {num_random} survived" in done.stdout


def test_a_recorded_failure_is_told(tmp_path: Path) -> None:
    header, first, *_ = ROWS.read_text().splitlines()
    failed = dict(zip(header.split(","), next(csv.reader([first])), strict=True)) | {
        "failures": "weights differ"
    }
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, header.split(","))
        writer.writeheader()
        writer.writerow(failed)
    done = run("--summary", "--rows", tmp_path / "rows.csv")
    assert done.returncode == 1
    assert "weights differ" in done.stdout
