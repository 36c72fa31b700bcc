"""How long reading a log of 1 GB takes, and how much memory: one like others, and one whose lines all differ.

Prints a table and appends it to docs/performance.md: `python benchmarks/diagnose.py`.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tables import append, as_table

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
TITLE = "## ds-toolkit diagnose"
LOG_BYTES = 10**9
MAX_SECONDS = 20.0
MAX_BYTES = 300 * 10**6
LETTERS = "abcdefghijklmnopqrstuvwxyz     "
END = """[rank3]: Traceback (most recent call last):
[rank3]:   File "/work/train.py", line 210, in <module>
[rank3]:     loss = model(batch)
[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has 1.20 GiB free.
"""


def main() -> int:
    """Measure, print, append; the exit code is 1 if a limit is missed."""
    rows, failed = [], False
    for name, line in (("lines of training, 8 ranks", training_line), ("no two lines alike", unlike_line)):
        with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as folder:
            log = Path(folder) / "train.log"
            write_log(log, line)
            seconds, peak_bytes = measure(log)
        failed |= seconds > MAX_SECONDS or peak_bytes > MAX_BYTES
        rows.append((name, f"{seconds:.1f} s", f"{peak_bytes / 1e6:.0f} MB"))
    limits = ("limit", f"{MAX_SECONDS:g} s", f"{MAX_BYTES / 1e6:.0f} MB")
    table = as_table("a log of 1 GB, page cache warm", ("log", "time", "peak memory"), [*rows, limits])
    print(table)
    append(PAGE, TITLE, table)
    return int(failed)


def training_line(number: int, chance: random.Random) -> str:
    """What eight ranks print while all goes well: losses, progress bars, NCCL's notes, warnings."""
    rank = number % 8
    kind = chance.random()
    if kind < 0.5:
        return (
            f"[rank{rank}]: {{'loss': {chance.random() * 3:.4f}, 'learning_rate': 1e-05, 'step': {number}}}\n"
        )
    if kind < 0.8:
        return f"\rEpoch 0: {number % 100:3}%|###       | {number}/500150 [6:28:43<94:39:17, 1.37it/s]"
    if kind < 0.99:
        return f"node{rank}:{number}:76 [{rank}] NCCL INFO Channel {number % 32:02}/0 : {rank}[0] -> 1[1]\n"
    return (
        f"\x1b[33m[rank{rank}]: UserWarning: Error while tokenizing sample {number}, it is left out\x1b[0m\n"
    )


def unlike_line(number: int, chance: random.Random) -> str:
    """A line of generated text: its shape is seen once."""
    words = "".join(chance.choices(LETTERS, k=80))
    return f"0: sample {number}: {words}\n"


def write_log(path: Path, line: Callable[[int, random.Random], str]) -> None:
    """A log of that size, with a failure at its end."""
    chance = random.Random(1)
    block = "".join(line(number, chance) for number in range(150_000)).encode()
    with path.open("wb") as file:
        number = 0
        while file.tell() < LOG_BYTES - len(block):
            # What a set of shapes must not profit from is other text in each block.
            turned = block.translate(rotated(number)) if line is unlike_line else block
            file.write(turned)
            number += 1
        file.write(END.encode())


def rotated(number: int) -> bytes:
    """A table that puts other letters for letters."""
    small = bytes(range(ord("a"), ord("z") + 1))
    order = list(small)
    random.Random(number).shuffle(order)
    return bytes.maketrans(small, bytes(order))


def measure(log: Path) -> tuple[float, int]:
    """Seconds and peak resident bytes of the command in a process of its own."""
    code = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:]);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    command = [sys.executable, "-m", "ds_toolkit", "diagnose", str(log), "--json"]
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, *command], stdout=subprocess.PIPE, text=True, check=True
    )
    seconds = time.perf_counter() - started
    answer, _, peak = done.stdout.rstrip().rpartition("\n")
    found = json.loads(answer)
    assert found["findings"][0]["code"] == "DS1230", answer[:2000]
    assert found["first_failure"]["rank"] == 3
    return seconds, int(peak) * 1024


if __name__ == "__main__":
    sys.exit(main())
