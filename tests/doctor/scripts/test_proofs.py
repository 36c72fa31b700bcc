"""The rules against DeepSpeed itself: what they warn of goes wrong as they say, with two ranks on the CPU."""

from __future__ import annotations

import time
from pathlib import Path

import jobs
import pytest

from ds_toolkit.doctor.scripts.checking import check_script
from ds_toolkit.doctor.scripts.known_config import KnownConfig

WORKER = Path(__file__).with_name("proof_worker.py")
# How long a rank that waits for nothing would need at most, by two orders of magnitude.
STANDSTILL_SECONDS = 4


def said(output: str) -> set[str]:
    return {line.removeprefix("SAID ") for line in output.splitlines() if line.startswith("SAID ")}


def found(stage: int) -> set[tuple[str, str]]:
    """The rule and the function of the worker, for each finding in the worker's own text."""
    text = WORKER.read_text()
    lines = text.splitlines()
    findings = check_script(text.encode(), WORKER.name, config=KnownConfig(stage))
    names = []
    for finding in findings:
        above = [line for line in lines[: finding.where.line] if line.startswith("def ")]
        names.append((finding.code, above[-1].removeprefix("def ").partition("(")[0]))
    return set(names)


def test_the_rules_find_the_cases_that_are_tried_here() -> None:
    assert found(2) == {
        ("DS1011", "save_on_one"),
        ("DS1025", "tag_by_rank"),
        ("DS1041", "optimizer_beside"),
        ("DS1032", "uneven"),
        ("DS1013", "early_leave"),
        # In fp16 only, which nobody knows of here.
        ("DS1042", "backward_beside"),
        ("DS1043", "clipping"),
    }
    assert ("DS1021", "empty_state_dict") in found(3)
    assert ("DS1044", "thrown_away") in found(0)


@pytest.mark.parametrize(
    ("case", "reached", "never"),
    [
        ("save_on_one", {"0 begins", "1 begins"}, {"0 saved"}),
        ("early_leave", {"0 begins", "1 begins"}, {"0 reduced"}),
        ("uneven", {"1 ended 1", "1 left", "0 begins 2"}, {"0 ended 2"}),
    ],
)
def test_a_rank_waits_for_ever(tmp_path: Path, case: str, reached: set[str], never: set[str]) -> None:
    command = jobs.torchrun_command(WORKER, case, tmp_path / "checkpoints", "2")
    with jobs.Job(command, log=tmp_path / "log") as job:
        jobs.wait_until(lambda: reached <= said(job.output()), 120, f"{reached}")
        time.sleep(STANDSTILL_SECONDS)
        assert job.process.poll() is None, job.output()
        assert not never & said(job.output())


@pytest.mark.parametrize(
    ("case", "stage", "error"),
    [
        ("tag_by_rank", "2", "is not consistent across all ranks"),
        ("backward_beside", "0", "Direct calls to tensor.backward() are not supported"),
        ("thrown_away", "0", "IndexError"),
        ("begun_twice", "2", "trying to initialize the default process group twice"),
    ],
)
def test_a_script_ends_with_an_error(tmp_path: Path, case: str, stage: str, error: str) -> None:
    finished = jobs.run(jobs.torchrun_command(WORKER, case, tmp_path, stage))
    assert finished.exit_code != 0
    assert error in finished.output


@pytest.mark.parametrize(
    ("case", "stage", "seen"),
    [
        # The optimizer that was handed over changes nothing; the engine's step does.
        ("optimizer_beside", "2", {"unchanged True steps 0", "unchanged False steps 1"}),
        ("empty_state_dict", "3", {"0 0 0 0"}),
        ("clipping", "1", {"norm 0.0"}),
    ],
)
def test_a_script_goes_on_and_does_nothing(tmp_path: Path, case: str, stage: str, seen: set[str]) -> None:
    finished = jobs.run(jobs.torchrun_command(WORKER, case, tmp_path, stage)).check()
    assert said(finished.output) == {f"{rank} {words}" for rank in (0, 1) for words in seen}
