"""Many small stories on real engines with two ranks, those of one worker in one process group.

`scenarios` is the guard's behaviour, good input and bad; `background` snapshots and the guardian, and by name
what others got wrong; `following` states that change where a snapshot might not look.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path

import jobs
import pytest

# How many each has at the least.
WORKERS = {"scenarios": 20, "background": 10, "following": 10}
Results = list[dict[str, str | None]]


def path_of(worker: str) -> Path:
    return Path(__file__).with_name(f"{worker}_worker.py")


def scenarios_of(worker: str) -> list[str]:
    return re.findall(r"^@scenario\ndef (\w+)", path_of(worker).read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def results_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Results]:
    """A traceback or None for every scenario of a worker, by rank; each worker runs once."""

    @functools.cache
    def run(worker: str) -> Results:
        root = tmp_path_factory.mktemp(worker)
        jobs.run(jobs.torchrun_command(path_of(worker), root), timeout_seconds=250).check()
        return [json.loads((root / f"results_rank{rank}.json").read_text()) for rank in (0, 1)]

    return run


@pytest.mark.parametrize(
    ("worker", "scenario"), [(worker, scenario) for worker in WORKERS for scenario in scenarios_of(worker)]
)
def test_scenario(results_of: Callable[[str], Results], worker: str, scenario: str) -> None:
    for rank, by_name in enumerate(results_of(worker)):
        assert by_name[scenario] is None, f"on rank {rank}:\n{by_name[scenario]}"


@pytest.mark.parametrize("worker", WORKERS)
def test_no_scenario_is_left_out(results_of: Callable[[str], Results], worker: str) -> None:
    results = results_of(worker)
    assert len(scenarios_of(worker)) > WORKERS[worker]
    assert list(results[0]) == list(results[1]) == scenarios_of(worker)
