"""The tour that `make quickstart` gives, shortened: every command of it is really run."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import jobs
import pytest
import torch

EXAMPLE = jobs.REPOSITORY / "examples" / "tiny_lm"


@pytest.fixture(scope="module")
def tour(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The run's folder and all that was printed."""
    run_dir = tmp_path_factory.mktemp("tour") / "run"
    command = [sys.executable, EXAMPLE / "quickstart.py", "--run-dir", run_dir]
    command += ["--steps", "12", "--save-every", "4", "--kill-at-step", "7"]
    finished = jobs.run(command, timeout_seconds=250, cwd=jobs.REPOSITORY).check()
    return run_dir, finished.output


def row(output: str, name: str) -> str:
    """The value beside a name in the closing table."""
    (value,) = re.findall(rf"{re.escape(name)}\s*│\s*(.*?)\s*│", output)
    return str(value)


def test_the_closing_table(tour: tuple[Path, str]) -> None:
    _, output = tour
    assert row(output, "steps done") == "12"
    assert row(output, "last step before the death") == "7"
    # The last words of step 7, unless the rank died while it was being copied; the last save is of step 4.
    assert row(output, "step of the resume") in ("6", "7")
    assert row(output, "steps lost") in ("0", "1")
    assert float(row(output, "checkpoint stall, of step time").rstrip(" %")) > 0
    assert float(row(output, "consolidate, peak memory").rstrip(" MB")) > 20


def test_every_command_is_shown(tour: tuple[Path, str]) -> None:
    _, output = tour
    shown = [line.split()[1] for line in output.splitlines() if line.startswith("$ ")]
    assert shown == ["ds-toolkit", "deepspeed", "deepspeed", "ds-toolkit", "python"]
    first, second = (line for line in output.splitlines() if line.startswith("$ deepspeed"))
    assert first == second
    assert "exit code 247" in output


def losses(run_dir: Path) -> dict[int, dict[int, float]]:
    """By the step at which a run began, and then by step."""
    of_runs: dict[int, dict[int, float]] = {}
    for line in (run_dir / "steps.jsonl").read_text().splitlines():
        step = json.loads(line)
        of_runs.setdefault(step["resumed_at"], {})[step["step"]] = step["loss"]
    return of_runs


def test_the_killed_run_goes_on_as_if_nothing_had_happened(tour: tuple[Path, str], tmp_path: Path) -> None:
    run_dir, output = tour
    command = jobs.deepspeed_command(EXAMPLE / "train.py", "--config", run_dir / "ds_config.json")
    jobs.run([*command, "--run-dir", tmp_path, "--steps", "12", "--save-every", "100"]).check()
    (undisturbed,) = losses(tmp_path).values()
    died, resumed = losses(run_dir).values()
    resumed_at = int(row(output, "step of the resume"))
    assert sorted(undisturbed) == list(range(1, 13))
    assert sorted(died) == list(range(1, 8))
    assert sorted(resumed) == list(range(resumed_at + 1, 13))
    assert {**died, **resumed} == undisturbed


def test_plain_pytorch_reads_the_weights(tour: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, _ = tour
    monkeypatch.syspath_prepend(EXAMPLE)
    from model import TinyLM

    model = TinyLM()
    weights = torch.load(run_dir / "model.bin", weights_only=True)
    model.load_state_dict(weights, strict=True)
    assert {value.dtype for value in weights.values()} == {torch.float32}
    assert 1_000_000 < sum(value.numel() for value in weights.values()) < 1_200_000


def test_a_folder_of_something_else_is_not_cleared(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text("{}")
    (tmp_path / "thesis.tex").write_text("three years of work")
    finished = jobs.run([sys.executable, EXAMPLE / "quickstart.py", "--run-dir", tmp_path])
    assert finished.exit_code == 1
    assert "holds something else" in finished.output
    assert (tmp_path / "thesis.tex").exists()
