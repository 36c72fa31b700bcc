from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Without nvidia-smi on the PATH; the tools of Python alone.
ENVIRONMENT = {
    "PATH": "/nonexistent",
    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    "COLUMNS": "120",
}
MEMORY = ("memory", "--model", "7B", "--gpus", "1,8")
COMMUNICATION = ("comm", "--model", "7B", "--network", "100GbE", "--num-nodes", "2")
INTERVAL = ("interval", "--cost", "60s", "--mttf", "3.0931h", "--mttf-per", "job", "--step", "8.855s")
BATCH = ("batch", "--max-batch", "2000", "--micro-batches", "2,4,6", "--gpus", "1..64")


def plan(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ds_toolkit", "plan", *arguments]
    return subprocess.run(
        command, cwd=cwd, env={**ENVIRONMENT, **environment}, capture_output=True, text=True, timeout=60
    )


def answer(*arguments: str, cwd: Path) -> dict[str, object]:
    done = plan(*arguments, "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    data: dict[str, object] = json.loads(done.stdout)
    assert data.pop("schema") == 1
    return data


def test_memory_has_a_line_for_each_stage_and_number_of_gpus(tmp_path: Path) -> None:
    done = plan(*MEMORY, cwd=tmp_path)
    lines = [line.split() for line in done.stdout.splitlines() if line.strip()[:1].isdigit()]
    assert [line[:2] for line in lines] == [[stage, gpus] for gpus in ("1", "8") for stage in "0123"]
    rows = answer(*MEMORY, cwd=tmp_path)["memory"]
    assert isinstance(rows, list)
    at_stage_3 = rows[-1]
    assert (at_stage_3["stage"], at_stage_3["num_gpus"]) == (3, 8)
    assert at_stage_3["gpu"]["optimizer_bytes"] == 7 * 10**9 * 12 // 8
    assert at_stage_3["host"]["total_bytes"] == 0
    offloaded = answer(*MEMORY, "--offload-optimizer", "--offload-param", cwd=tmp_path)["memory"]
    assert isinstance(offloaded, list)
    assert offloaded[-1]["gpu"]["weights_bytes"] == 0
    assert offloaded[-1]["host"]["weights_bytes"] > 0
    assert "host, a GPU" in plan(*MEMORY, "--offload-optimizer", "--offload-param", cwd=tmp_path).stdout


def test_communication_has_a_line_for_each_stage(tmp_path: Path) -> None:
    done = plan(*COMMUNICATION, cwd=tmp_path)
    assert "one optimizer step over 100GbE" in done.stdout
    stages = answer(*COMMUNICATION, cwd=tmp_path)["stages"]
    assert isinstance(stages, list)
    assert [stage["stage"] for stage in stages] == [0, 1, 2, 3]
    assert stages[0]["all_reduce_bytes"] == 14 * 10**9
    # At the rate where both take equally long, 80 % of which is reached.
    assert stages[0]["break_even_bytes_per_second"] > 12.5e9


def test_the_interval_says_what_it_rests_on(tmp_path: Path) -> None:
    data = answer(*INTERVAL, cwd=tmp_path)
    interval = data["interval"]
    assert isinstance(interval, dict)
    assert interval["seconds"] == pytest.approx(1116.3, abs=0.2)
    assert interval["steps"] == 126
    assert interval["young_seconds"] == pytest.approx(1155.9, abs=0.2)
    assert data["two_levels"] is None
    text = plan(*INTERVAL, "--memory-cost", "0.5s", cwd=tmp_path).stdout
    assert "18 min 36 s" in text
    assert "two levels: in memory every" in text
    assert "warning" not in text
    assert "warning: " in plan(*INTERVAL[:2], "2h", *INTERVAL[3:], cwd=tmp_path).stdout


def test_the_batch_is_the_same_over_many_numbers_of_gpus(tmp_path: Path) -> None:
    data = answer(*BATCH, cwd=tmp_path)
    settings = data["settings"]
    assert isinstance(settings, list)
    for one in settings:
        product = one["num_gpus"] * one["micro_batch_size"] * one["accumulation_steps"]
        assert product == data["global_batch_size"]
    assert f"global batch {data['global_batch_size']}" in plan(*BATCH, cwd=tmp_path).stdout


@pytest.mark.parametrize(
    ("command", "suffix"),
    [(MEMORY, ".png"), (COMMUNICATION, ".png"), (INTERVAL, ".png"), (BATCH, ".png"), (BATCH, ".svg")],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_plots_are_drawn(command: tuple[str, ...], suffix: str, tmp_path: Path) -> None:
    done = plan(*command, "--plot", f"out{suffix}", cwd=tmp_path, MPLCONFIGDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    head = (tmp_path / f"out{suffix}").read_bytes()[:400]
    assert head.startswith(b"\x89PNG") if suffix == ".png" else b"<svg" in head or b"<?xml" in head


def test_without_matplotlib_the_extra_is_named(tmp_path: Path) -> None:
    # A package of that name that cannot be imported, found before the real one.
    (tmp_path / "matplotlib.py").write_text("raise ImportError\n")
    path = f"{tmp_path}{os.pathsep}{ENVIRONMENT['PYTHONPATH']}"
    done = plan(*BATCH, "--plot", "out.png", cwd=tmp_path, PYTHONPATH=path)
    assert done.returncode == 2
    assert "pip install 'deepspeed-toolkit[plot]'" in done.stderr
    assert not (tmp_path / "out.png").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((*MEMORY, "--plot", "out.gif"), "format of the plot"),
        ((*MEMORY, "--offload-param"), "--offload-param alone is not planned"),
        ((*MEMORY, "--plot", "none/out.png"), "cannot be written"),
        (("memory", "--model", "7B", "--gpus", "8..1"), "is empty"),
        (("memory", "--model", "7B", "--gpus", "many"), "is no list of numbers"),
        (("memory", "--model", "7B", "--gpus", "0"), "is 0"),
        (("memory", "--model", "0"), "is 0"),
        ((*COMMUNICATION, "--tflops", "0"), "speed of a GPU is 0"),
        ((*COMMUNICATION, "--tflops", "nan"), "speed of a GPU is nan"),
        (("interval", "--cost", "60s", "--mttf", "3h"), "--mttf-per"),
        (("interval", "--cost", "0s", "--mttf", "3h", "--mttf-per", "job"), "cost of a checkpoint is 0"),
        (("interval", "--cost", "60s", "--mttf", "0h", "--mttf-per", "job"), "mean time to failure is 0"),
        (("interval", "--cost=-60s", "--mttf", "3h", "--mttf-per", "job"), "is not a duration"),
        (("interval", "--cost", "nan", "--mttf", "3h", "--mttf-per", "job"), "is not a duration"),
        ((*INTERVAL, "--caught", "1"), "share of caught failures is 1"),
        (("batch", "--max-batch", "3", "--micro-batches", "4"), "no batch size works"),
    ],
)
def test_bad_input_ends_with_two_and_without_a_traceback(
    arguments: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    done = plan(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
