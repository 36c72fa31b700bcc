"""Config in, weights out, and a killed run in between: every command shown, then what it all came to."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from ds_toolkit.env.fabric import detect_host
from ds_toolkit.units import format_bytes, format_seconds

HERE = Path(os.path.relpath(Path(__file__).resolve().parent))
TRAIN = HERE / "train.py"
DEEPSPEED_PORT = 29500
BIN = Path(sys.executable).parent
NUM_RANKS = 2
PROMPT = "The lamp at Skerry Point "
console = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Finished:
    """How a command ended: exit code, seconds, and the most memory its process held."""

    exit_code: int
    seconds: float
    peak_memory_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/tiny_lm"))
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--kill-at-step", type=int, default=73)
    arguments = parser.parse_args()
    started_seconds = time.perf_counter()
    run_dir = fresh(arguments.run_dir)
    config, checkpoints, weights = run_dir / "ds_config.json", run_dir / "checkpoints", run_dir / "model.bin"

    say("1. A ZeRO-3 config for a small language model and this machine")
    gen_config = ["ds-toolkit", "gen-config", "--model", "1M", "--stage", "3", "--num-nodes", "1"]
    gen_config += ["--gpus-per-node", str(NUM_RANKS), "--sequence-length", "128", "--micro-batch-size", "8"]
    expect_success(run([*gen_config, "-o", str(config)]))

    train = [
        "deepspeed",
        "--num_gpus",
        str(NUM_RANKS),
        *other_port_if_needed(),
        str(TRAIN),
        "--config",
        str(config),
    ]
    train += ["--run-dir", str(run_dir), "--steps", str(arguments.steps)]
    train += ["--save-every", str(arguments.save_every), "--kill-at-step", str(arguments.kill_at_step)]
    say(f"2. Training; one of the two ranks is killed after step {arguments.kill_at_step}")
    killed = run(train)
    if killed.exit_code == 0:
        sys.exit("the run was to be killed and was not")
    say(f"   It ended with exit code {killed.exit_code}.")
    say("3. The same command again")
    expect_success(run(train))

    say("4. fp32 weights in one file, read by plain PyTorch")
    consolidated = run(["ds-toolkit", "consolidate", str(checkpoints), str(weights)])
    expect_success(consolidated)
    expect_success(run(["python", str(HERE / "continue_text.py"), str(weights), PROMPT]))

    say("5. What it came to")
    steps = [json.loads(line) for line in (run_dir / "steps.jsonl").read_text().splitlines()]
    console.print(closing_table(steps, consolidated, time.perf_counter() - started_seconds))


def fresh(run_dir: Path) -> Path:
    """An empty directory; only one that an earlier tour left, or none, is cleared away."""
    if run_dir.exists():
        if not (run_dir / "ds_config.json").exists() and any(run_dir.iterdir()):
            sys.exit(f"{run_dir} holds something else; give another --run-dir")
        shutil.rmtree(run_dir)
    run_dir.mkdir(parents=True)
    return run_dir


def other_port_if_needed() -> list[str]:
    """A free port for the launcher where its default one is taken by another run."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", DEEPSPEED_PORT))
        except OSError:
            probe.bind(("", 0))
            return ["--master_port", str(probe.getsockname()[1])]
    return []


def run(command: list[str]) -> Finished:
    """Show a command and run it; `ds-toolkit`, `deepspeed` and `python` are those of this environment."""
    console.print(f"$ {shlex.join(command)}", style="bold")
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if len(detect_host().gpus) < NUM_RANKS:
        environment["DS_ACCELERATOR"] = "cpu"
    started_seconds = time.perf_counter()
    process = subprocess.Popen([str(BIN / command[0]), *command[1:]], env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - started_seconds
    # Linux counts it in KiB.
    return Finished(process.returncode, seconds, usage.ru_maxrss * 1024)


def expect_success(finished: Finished) -> None:
    if finished.exit_code != 0:
        sys.exit(f"the command above failed with exit code {finished.exit_code}")


def say(text: str) -> None:
    console.print(f"\n{text}", style="bold cyan")


def closing_table(steps: list[dict[str, Any]], consolidated: Finished, seconds: float) -> Table:
    """What the log of steps and the commands' own accounting tell."""
    runs = sorted({step["started"] for step in steps})
    first, second = ([step for step in steps if step["started"] == started] for started in runs)
    died_after, resumed_at = first[-1]["step"], second[0]["resumed_at"]
    stall_seconds = sum(step["stall_seconds"] for step in steps)
    step_seconds = sum(step["step_seconds"] for step in steps) - stall_seconds
    stalls = [step["stall_seconds"] for step in steps if step["stall_seconds"] > 0]
    table = Table(show_header=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    for name, value in (
        ("steps done", str(second[-1]["step"])),
        ("last step before the death", str(died_after)),
        ("step of the resume", str(resumed_at)),
        ("steps lost", str(died_after - resumed_at)),
        ("loss, first and last step", f"{first[0]['loss']:.3f}, {second[-1]['loss']:.3f}"),
        ("checkpoint stall, of step time", f"{100 * stall_seconds / step_seconds:.1f} %"),
        ("a checkpoint's stall, median", format_seconds(median(stalls))),
        ("consolidate, whole process", format_seconds(consolidated.seconds)),
        ("consolidate, peak memory", format_bytes(consolidated.peak_memory_bytes)),
        ("the whole tour", format_seconds(seconds)),
    ):
        table.add_row(name, value)
    return table


if __name__ == "__main__":
    main()
