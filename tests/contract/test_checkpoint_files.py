"""Which files DeepSpeed writes and opens, so that what completeness is judged by is what it really needs."""

from __future__ import annotations

import json
from pathlib import Path

import jobs
from surviving_files import Grid, opened

WORKER = Path(__file__).with_name("checkpoint_files_worker.py")
NUM_RANKS = 4
# The order is the worker's: no expert group after a larger one, pipelines last.
GRIDS = [
    *(Grid(dp=4, tp=1, pp=1, stage=stage) for stage in (0, 1, 2, 3)),
    Grid(dp=4, tp=1, pp=1, stage=3, hpz=2),
    *(Grid(dp=4, tp=1, pp=1, stage=stage, ep=ep, native_moe=True) for ep in (1, 2, 4) for stage in (0, 1, 2)),
    *(Grid(dp=2, tp=1, pp=2, stage=stage) for stage in (0, 1)),
]


def test_deepspeed_opens_the_files_that_are_asked_for_and_no_others(tmp_path: Path) -> None:
    cases = [
        {"stage": grid.stage, "hpz": grid.hpz, "ep": grid.ep if grid.native_moe else 0, "pp": grid.pp}
        for grid in GRIDS
    ]
    command = jobs.torchrun_command(WORKER, tmp_path, json.dumps(cases), num_ranks=NUM_RANKS)
    jobs.run(command, timeout_seconds=250).check()
    seen = json.loads((tmp_path / "files.json").read_text())
    for grid, files in zip(GRIDS, seen, strict=True):
        assert set(files["written"]) == opened(grid), grid
        assert set(files["opened"]) == opened(grid), grid
