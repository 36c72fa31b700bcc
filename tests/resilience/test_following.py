"""States that change where a snapshot might not look, on a real engine with two ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jobs
import pytest

WORKER = Path(__file__).with_name("following_worker.py")
SCENARIOS = re.findall(r"^@scenario\ndef (\w+)", WORKER.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str | None]]:
    """A traceback or None for every scenario, by rank."""
    root = tmp_path_factory.mktemp("following")
    jobs.run(jobs.torchrun_command(WORKER, root), timeout_seconds=250).check()
    return [json.loads((root / f"results_rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario(results: list[dict[str, str | None]], scenario: str) -> None:
    for rank, by_name in enumerate(results):
        assert by_name[scenario] is None, f"on rank {rank}:\n{by_name[scenario]}"


def test_no_scenario_is_left_out(results: list[dict[str, str | None]]) -> None:
    assert len(SCENARIOS) > 10
    assert list(results[0]) == list(results[1]) == SCENARIOS
