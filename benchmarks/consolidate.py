"""How long consolidating takes and how much memory: DeepSpeed's zero_to_fp32.py, `cp`, and ours, in turn.

    python benchmarks/consolidate.py [--size 340M] [--stage 2] [--ranks 2] [--rounds 5] [--folder DIR]

Whole processes on a warm page cache. Prints a table and appends it to docs/consolidate.md; the exit code is 1
if a limit is missed. A size of 3B takes 90 GB of disk.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tables import append, as_table

PAGE = Path(__file__).parents[1] / "docs" / "consolidate.md"
TITLE = "## Speed and memory"
MEGABYTE = 10**6
# Of zero_to_fp32.py's time, by what is written and by size; for 3B those of 1.5B hold.
MAX_OF_UPSTREAM = {".safetensors": {"340M": 0.30, "1.5B": 0.20}, ".bin": {"340M": 0.45, "1.5B": 0.25}}
MAX_OF_CP = 2.0
MAX_BF16_OF_FP32 = 1.5
MAX_PEAK_BYTES = 450 * MEGABYTE
# What a process takes before it does anything; `cp` needs none of it.
STARTUP = [sys.executable, "-c", "import typer, rich, ds_toolkit.convert.consolidate"]
DISK = (
    'dd if=/dev/zero of="$1" bs=2097152 count=$(($(stat -c %s "$0") / 2097152)) oflag=direct conv=fsync 2>&1'
)
# A disk that is told to forget removed files is slower meanwhile.
PAUSE_SECONDS = 2.0


@dataclass(frozen=True)
class Run:
    """One process: wall-clock seconds, and the most memory that it held at a time."""

    seconds: float
    peak_bytes: int


def main() -> int:
    """Measure, print, append."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", choices=("340M", "1.5B", "3B"), default="340M")
    parser.add_argument("--stage", type=int, choices=(2, 3), default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where there is room")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        # In a process of its own: what this one held would count as its children's peak, too.
        maker = [sys.executable, Path(__file__).parent / "checkpoints.py"]
        what = [folder / "checkpoint", given.size, str(given.stage), str(given.ranks)]
        subprocess.run([*maker, *what], check=True)
        runs = measure(folder, given.rounds)
    limit_of = "340M" if given.size == "340M" else "1.5B"
    rows, missed = judged(runs, limit_of)
    how = (
        f"{given.size} parameters, ZeRO-{given.stage}, {given.ranks} ranks, medians of {given.rounds} rounds,"
        f" torch {version('torch')}"
    )
    header = ("what", "seconds", "of upstream", "peak memory", "limits")
    table = as_table(how, header, rows)
    print(table)
    append(PAGE, TITLE, table)
    return 1 if missed else 0


def measure(folder: Path, num_rounds: int) -> dict[str, list[Run]]:
    """Every command in turn, round by round, so that a busy machine is busy for all of them."""
    checkpoint, out = folder / "checkpoint", folder / "out"
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None
    assert spec.origin is not None
    # Beside the checkpoint, where DeepSpeed puts it; in its own folder it would import the wrong `torch`.
    script = shutil.copy(Path(spec.origin).parent / "utils" / "zero_to_fp32.py", checkpoint)
    upstream = [sys.executable, script, checkpoint, out]
    ours = [sys.executable, "-m", "ds_toolkit", "consolidate", checkpoint]
    one_file = ["--max_shard_size", "100GB"]
    runs: dict[str, list[Run]] = {}
    for number in range(num_rounds + 1):
        for what, command in {
            "upstream .safetensors": [*upstream, *one_file, "--safe_serialization"],
            "upstream .bin": [*upstream, *one_file],
            "start": STARTUP,
            ".safetensors": [*ours, out / "model.safetensors"],
            "cp": ["cp", out / "model.safetensors", out / "copy"],
            # Ours is on the disk when it is done, and so should be what it is compared with.
            "cp and sync": [
                "sh",
                "-c",
                'cp "$0" "$1" && sync "$1"',
                out / "model.safetensors",
                out / "copy2",
            ],
            # What the disk itself takes for so many bytes that lie in memory.
            "disk": ["sh", "-c", DISK, out / "model.safetensors", out / "zeros"],
            ".bin": [*ours, out / "model.bin"],
            ".safetensors bf16": [*ours, out / "model.safetensors", "--dtype", "bf16"],
        }.items():
            if what != "disk" and not what.startswith("cp"):
                shutil.rmtree(out, ignore_errors=True)
                out.mkdir()
            warm(checkpoint)
            run = run_once(command)
            # The first round loads programs and libraries.
            if number:
                runs.setdefault(what, []).append(run)
            print(f"round {number}: {what}: {run.seconds:.2f} s", file=sys.stderr)
    return runs


def warm(checkpoint: Path) -> None:
    """Bring the checkpoint back to the page cache; the outputs of the last command have pushed it out."""
    for path in sorted(file for file in checkpoint.rglob("*") if file.is_file()):
        with path.open("rb", buffering=0) as file:
            buffer = bytearray(8 * 2**20)
            while file.readinto(buffer):
                pass


def run_once(command: list[str | Path]) -> Run:
    """Run a command to its end; what it left in the page cache is written out before, so that none waits."""
    os.sync()
    time.sleep(PAUSE_SECONDS)
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    if os.waitstatus_to_exitcode(status) != 0:
        sys.exit(f"{command}\n{said}")
    process.returncode = 0
    return Run(seconds, usage.ru_maxrss * 1024)


def judged(runs: Mapping[str, list[Run]], limit_of: str) -> tuple[list[tuple[str, ...]], bool]:
    """The rows of the table, and whether a limit was missed."""
    seconds = {what: statistics.median(run.seconds for run in each) for what, each in runs.items()}
    peaks = {what: max(run.peak_bytes for run in each) for what, each in runs.items()}
    rows, missed = [], False
    for what, took in seconds.items():
        suffix = ".bin" if what.endswith(".bin") else ".safetensors"
        of_upstream = took / seconds[f"upstream {suffix}"]
        limits: dict[str, bool] = {}
        if what in MAX_OF_UPSTREAM:
            most = MAX_OF_UPSTREAM[what][limit_of]
            limits[f"{most:.2f} of upstream"] = of_upstream <= most
            for copying in ("cp", "cp and sync"):
                most = MAX_OF_CP * seconds[copying] + seconds["start"]
                limits[f"{most:.2f} s ({MAX_OF_CP:g} x {copying} + start)"] = took <= most
        if what == ".safetensors bf16":
            limits[f"{MAX_BF16_OF_FP32:g} of fp32"] = took <= MAX_BF16_OF_FP32 * seconds[".safetensors"]
        if limits:
            limits[f"{MAX_PEAK_BYTES // MEGABYTE} MB"] = peaks[what] <= MAX_PEAK_BYTES
        missed = missed or not all(limits.values())
        rows.append(
            (
                what,
                f"{took:.2f}",
                f"{of_upstream:.2f}" if limits else "",
                f"{peaks[what] / MEGABYTE:.0f} MB",
                ", ".join(text if holds else f"{text} **missed**" for text, holds in limits.items()),
            )
        )
    return rows, missed


if __name__ == "__main__":
    sys.exit(main())
