"""Six steps, a save, a new process, six steps more: the losses and weights of twelve steps at a stretch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jobs
import pytest

WORKER = Path(__file__).with_name("bit_exact_worker.py")
LAYOUTS = [f"stage{stage}_{precision}" for stage in (0, 1, 2, 3) for precision in ("fp32", "bf16")]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank measured, by mode."""
    root = tmp_path_factory.mktemp("bit_exact")
    for mode in ("straight", "resumed"):
        jobs.run(jobs.torchrun_command(WORKER, mode, root), timeout_seconds=250).check()
    return {
        mode: [json.loads((root / f"{mode}_rank{rank}.json").read_text()) for rank in (0, 1)]
        for mode in ("straight", "resumed")
    }


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_run_is_the_undisturbed_run(
    results: dict[str, list[dict[str, Any]]], layout: str, rank: int
) -> None:
    straight, resumed = results["straight"][rank][layout], results["resumed"][rank][layout]
    assert len(straight["losses"]) == 24
    assert len(set(straight["losses"])) > 20
    assert straight["first_losses"] + resumed["losses"] == straight["losses"]
    assert resumed["fingerprint"] == straight["fingerprint"]


def test_ranks_differ_where_they_should(results: dict[str, list[dict[str, Any]]]) -> None:
    """If both ranks drew the same data, a rank restored from the other's state would go unnoticed."""
    first, second = results["straight"]
    for layout in LAYOUTS:
        assert first[layout]["losses"] != second[layout]["losses"]
        assert first[layout]["fingerprint"] != second[layout]["fingerprint"]
