"""The guard's own work after each step: looking at the state, pickling what changed; copying apart.

    python benchmarks/step_overhead.py [--stages 0 1 2 3] [--steps 200] [--profile LINES]

Two ranks on the CPU, one thread each, with so many small parameters that looking at them is all the work.
Entering phases and an idle fence, some microseconds each, are not counted. Appends a table to
docs/performance.md; exit code 1 if the limit was missed. With --profile nothing is appended.
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
WORKER = Path(__file__).with_name("step_overhead_worker.py")
TITLE = "## The guard's own work per step"
MAX_SECONDS = 0.002
MILLISECONDS = 1e3


def main() -> int:
    """Measure, print, append."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--profile", type=int, metavar="LINES", help="print where the time goes")
    given = parser.parse_args()
    results = {stage: run(stage, given.steps, given.profile) for stage in given.stages}
    rows = [row_of(stage, result) for stage, result in results.items()]
    num_parameters = next(iter(results.values()))["num_parameters"]
    how = (
        f"2 ranks, 1 thread each, {num_parameters} parameters in fp32 with Adam, {given.steps} steps,"
        f" the slower rank, torch {version('torch')}"
    )
    table = as_table(how, ("stage", "median", "9 of 10 below", "limit"), rows)
    print(table)
    if given.profile is None:
        append(PAGE, TITLE, table)
    return int(any("missed" in row[-1] for row in rows))


def run(stage: int, num_steps: int, profile: int | None) -> dict[str, Any]:
    """One job; what each of its ranks measured."""
    with tempfile.TemporaryDirectory() as name:
        torchrun = Path(sys.executable).with_name("torchrun")
        command = [torchrun, "--standalone", "--nproc_per_node=2", WORKER, str(stage), str(num_steps), name]
        done = subprocess.run(
            command if profile is None else [*command, str(profile)],
            env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if done.returncode != 0:
            sys.exit(f"stage {stage}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        if profile is not None:
            print(done.stdout[-12000:])
        result: dict[str, Any] = json.loads((Path(name) / "result.json").read_text())
        return result


def row_of(stage: int, result: dict[str, Any]) -> tuple[str, ...]:
    """A stage's row; the rank that is slower counts."""
    seconds = max(result["work_seconds"], key=statistics.median)
    median, tail = statistics.median(seconds), statistics.quantiles(seconds, n=10)[-1]
    limit = f"{MAX_SECONDS * MILLISECONDS:.0f} ms"
    return (
        str(stage),
        f"{median * MILLISECONDS:.2f} ms",
        f"{tail * MILLISECONDS:.2f} ms",
        limit if median <= MAX_SECONDS else f"{limit} **missed**",
    )


if __name__ == "__main__":
    sys.exit(main())
