"""What checkpoints cost the training loop: none, DeepSpeed's own, snapshots, and periodic saves only.

    python benchmarks/stall.py [--stages 0 1 2 3] [--rounds 3] [--steps 20]

Two ranks on the CPU, one thread each; whole runs in turn, so that what else the machine does hits all alike.
Appends a table to docs/performance.md; exit code 1 if a limit was missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tables import append, as_table

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
WORKER = Path(__file__).with_name("stall_worker.py")
TITLE = "## Checkpoints during training"
MODES = {
    "none": "no checkpoints",
    "deepspeed": "`engine.save_checkpoint` every step",
    "snapshots": "snapshot every step, save every 10",
    "saves": "snapshot and save every 10",
}
MAX_STALL_OF_SAVE = 0.05
MAX_STALL_OF_MEMCPY = 0.3
MAX_FIRST_OF_LATER = 1.5
MAX_SLOWER = {"snapshots": 1.03, "saves": 1.02}
MILLISECONDS = 1e3
MEGABYTE = 10**6


def main() -> int:
    """Measure, print, append."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    rows, missed = [], False
    for stage in given.stages:
        runs: dict[str, list[list[dict[str, Any]]]] = {mode: [] for mode in MODES}
        for number in range(given.rounds):
            for mode, of_mode in runs.items():
                of_mode.append(run(mode, stage, given.steps))
                print(f"stage {stage}, round {number}: {MODES[mode]}: {_steps(of_mode[-1])}", file=sys.stderr)
        of_stage, missed_here = judged(stage, runs)
        rows += of_stage
        missed = missed or missed_here
    how = (
        f"2 ranks, 1 thread each, 16M parameters in fp32 with Adam, medians of {given.rounds} runs of"
        f" {given.steps} steps in turn, torch {version('torch')}"
    )
    header = ("stage", "what", "step", "of none (spread)", "stall", "limits")
    table = as_table(how, header, rows)
    print(table)
    append(PAGE, TITLE, table)
    return int(missed)


def run(mode: str, stage: int, num_steps: int) -> list[dict[str, Any]]:
    """One job; what each of its ranks measured."""
    with tempfile.TemporaryDirectory() as name:
        torchrun = Path(sys.executable).with_name("torchrun")
        command = [
            torchrun,
            "--standalone",
            "--nproc_per_node=2",
            WORKER,
            mode,
            str(stage),
            str(num_steps),
            name,
        ]
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        if done.returncode != 0:
            sys.exit(f"{mode}, stage {stage}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        result: list[dict[str, Any]] = json.loads((Path(name) / "result.json").read_text())
        return result


def judged(stage: int, runs: dict[str, list[list[dict[str, Any]]]]) -> tuple[list[tuple[str, ...]], bool]:
    """The rows of a stage, and whether a limit was missed."""
    ratios = {
        mode: [_step(mine) / _step(none) for mine, none in zip(each, runs["none"], strict=True)]
        for mode, each in runs.items()
    }
    save_seconds = statistics.median(
        second for of_run in runs["deepspeed"] for rank in of_run for second in rank["save_seconds"]
    )
    rows, missed = [], False
    for mode, each in runs.items():
        limits: dict[str, bool] = {}
        stall = ""
        if mode == "deepspeed":
            stall = f"{save_seconds * MILLISECONDS:.0f} ms"
        if mode == "snapshots":
            # The rank with the most to copy.
            ranks = [max(of_run, key=lambda rank: rank["state_bytes"]) for of_run in each]
            stalls = statistics.median(second for rank in ranks for second in rank["stall_seconds"])
            memcpy = statistics.median(rank["memcpy_seconds"] for rank in ranks)
            first = statistics.median(rank["first_stall_seconds"] for rank in ranks)
            stall = (
                f"{stalls * MILLISECONDS:.1f} ms for {ranks[0]['state_bytes'] / MEGABYTE:.0f} MB (memcpy"
                f" {memcpy * MILLISECONDS:.0f} ms); the first {first * MILLISECONDS:.1f} ms"
            )
            limits[f"{MAX_STALL_OF_SAVE} of save_checkpoint"] = stalls <= MAX_STALL_OF_SAVE * save_seconds
            limits[f"{MAX_STALL_OF_MEMCPY} of memcpy"] = stalls <= MAX_STALL_OF_MEMCPY * memcpy
            limits[f"first {MAX_FIRST_OF_LATER} of later"] = first <= MAX_FIRST_OF_LATER * stalls
        slower = statistics.median(ratios[mode])
        if mode in MAX_SLOWER:
            limits[f"{MAX_SLOWER[mode]} of none"] = slower <= MAX_SLOWER[mode]
        missed = missed or not all(limits.values())
        rows.append(
            (
                str(stage),
                MODES[mode],
                f"{statistics.median(map(_step, each)):.3f} s",
                f"{slower:.3f} ({min(ratios[mode]):.3f} to {max(ratios[mode]):.3f})",
                stall,
                ", ".join(text if holds else f"{text} **missed**" for text, holds in limits.items()),
            )
        )
    return rows, missed


def _step(of_run: list[dict[str, Any]]) -> float:
    """Median step of a run, by rank 0's clock."""
    return statistics.median(of_run[0]["step_seconds"])


def _steps(of_run: list[dict[str, Any]]) -> str:
    return f"{_step(of_run):.3f} s a step"


if __name__ == "__main__":
    sys.exit(main())
