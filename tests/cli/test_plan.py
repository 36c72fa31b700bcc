from __future__ import annotations

import contextlib
import json
import os
import pty
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
# A number that no float holds.
BEYOND = "9" * 400
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


def test_a_checkpoint_in_memory_that_costs_more_than_one_on_disk_is_warned_about(tmp_path: Path) -> None:
    done = plan(*INTERVAL, "--memory-cost", "61s", cwd=tmp_path)
    assert done.returncode == 0
    assert "warning: a checkpoint in memory costs 61 s, more than one on disk (60 s)" in done.stdout


def on_terminal(answers: str, *arguments: str, cwd: Path) -> str:
    """What is on the screen after a person typed the answers."""
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "ds_toolkit", "plan", *arguments]
    with subprocess.Popen(
        command, cwd=cwd, env=ENVIRONMENT, stdin=terminal, stdout=terminal, stderr=terminal
    ) as run:
        os.close(terminal)
        os.write(controller, answers.encode())
        screen = b""
        # Reading fails once the process has closed its terminal.
        with contextlib.suppress(OSError):
            while data := os.read(controller, 4096):
                screen += data
        os.close(controller)
        assert run.wait(timeout=30) == 0, screen
    return screen.decode()


@pytest.mark.parametrize(
    ("answers", "every"), [("\n", "11 min 15 s"), ("gpu\n", "11 min 15 s"), ("fleet\nJob\n", "3 h 0 min")]
)
def test_on_a_terminal_it_asks_whose_mttf_it_is(answers: str, every: str, tmp_path: Path) -> None:
    arguments = ("interval", "--cost", "60s", "--mttf", "3h", "--num-nodes", "2")
    screen = on_terminal(answers, *arguments, cwd=tmp_path)
    assert "Whose mean time to failure is 3h: that of a GPU, a node or the job? [gpu]" in screen
    assert every in screen
    assert ("`fleet` is none of gpu, node, job" in screen) is ("fleet" in answers)


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
        (("interval", "--cost", "60s", "--mttf", "3h"), "--mttf-per is missing"),
        (("interval", "--cost", "60s", "--mttf", "3h"), "give --mttf-per and one of gpu, node, job"),
        (("interval", "--cost", "0s", "--mttf", "3h", "--mttf-per", "job"), "cost of a checkpoint is 0"),
        (("interval", "--cost", "60s", "--mttf", "0h", "--mttf-per", "job"), "mean time to failure is 0"),
        (("interval", "--cost=-60s", "--mttf", "3h", "--mttf-per", "job"), "is not a duration"),
        (("interval", "--cost", "nan", "--mttf", "3h", "--mttf-per", "job"), "is not a duration"),
        ((*INTERVAL, "--caught", "1"), "share of caught failures is 1"),
        ((*INTERVAL, "--caught", "nan"), "share of caught failures is nan"),
        ((*INTERVAL, "--slowdown", "inf"), "slowdown is inf"),
        ((*INTERVAL, "--slowdown=-0.1"), "slowdown is -0.1"),
        ((*INTERVAL, "--soft", "nan"), "share of soft failures is nan"),
        ((*INTERVAL, "--soft", "0", "--memory-cost", "1s"), "share of soft failures is 0"),
        ((*INTERVAL, "--memory-cost", "0s"), "is 0"),
        ((*INTERVAL, "--restart", "5 parsecs"), "is not a duration"),
        ((*INTERVAL, "--write", "inf"), "is not a duration"),
        ((*INTERVAL, "--longest", "0s"), "longest interval is 0"),
        ((*INTERVAL, "--last-words", f"{BEYOND}h"), "last words time is inf"),
        ((*INTERVAL, "--num-nodes", "0"), "number of nodes is 0"),
        ((*INTERVAL, "--num-nodes", BEYOND), "number of nodes is beyond all numbers"),
        ((*INTERVAL, f"--gpus-per-node=-{BEYOND}"), "number of GPUs a node is beyond all numbers"),
        ((*MEMORY, "--micro-batch-size", BEYOND), "micro batch size is above"),
        ((*MEMORY, "--sequence-length", "0"), "sequence length is 0"),
        ((*MEMORY, "--accumulation-steps=-1"), "number of accumulation steps is -1"),
        (("memory", "--model", "1kg"), "`1kg` is not a count"),
        ((*COMMUNICATION, "--tflops", "inf"), "speed of a GPU is inf"),
        ((*COMMUNICATION, "--accumulation-steps", BEYOND), "number of accumulation steps is above"),
        ((*COMMUNICATION[:4], f"{BEYOND}GbE"), "is not a network"),
        ((*COMMUNICATION[:4], f"{BEYOND}x100GbE"), "is not a network"),
        (("batch", "--max-batch", "0", "--micro-batches", "4"), "largest batch is 0"),
        (("batch", "--max-batch", "64", "--micro-batches", "nan"), "is no list of numbers"),
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
