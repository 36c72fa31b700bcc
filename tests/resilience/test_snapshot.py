"""A snapshot holds what DeepSpeed would have saved, in every layout, file by file and bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jobs
import pytest

WORKER = Path(__file__).with_name("snapshot_worker.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """By rank and case, what was compared."""
    root = tmp_path_factory.mktemp("snapshots")
    jobs.run(jobs.torchrun_command(WORKER, root), timeout_seconds=250).check()
    return [json.loads((root / f"results_rank{rank}.json").read_text()) for rank in (0, 1)]


def test_every_layout_is_saved_as_deepspeed_saves_it(results: list[dict[str, dict[str, Any]]]) -> None:
    failed = [
        f"{case} on rank {rank}:\n{found['failed']}"
        for rank, by_case in enumerate(results)
        for case, found in by_case.items()
        if "failed" in found
    ]
    assert not failed, "\n".join(failed)
    assert list(results[0]) == list(results[1])
    assert len(results[0]) == 28


def test_something_was_compared_in_each(results: list[dict[str, dict[str, Any]]]) -> None:
    for case, found in results[0].items():
        assert found["num_tensors"] > 10, case
        assert found["steps"] >= 2, case
    partitioned = {case: found for case, found in results[1].items() if "stage0" not in case}
    assert all(found["num_tensors"] >= 8 for found in partitioned.values())
    # Below stage 3 the cell's model file is kept once a node.
    assert not any("mp_rank_00_model_states.pt" in found["names"] for found in results[1].values())
