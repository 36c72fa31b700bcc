"""How long linting takes: one file against the imports it needs, and a thousand files in one call.

Prints a table and appends it to docs/performance.md: `python benchmarks/lint.py`.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tables import append, as_table

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
TITLE = "## ds-toolkit lint"
NUM_RUNS = 5
NUM_FILES = 1000
MAX_RATIO = 3.0
MAX_SECONDS = 5.0
CONFIG = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10000, "warmup_num_steps": 100}},
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": 500000000,
        "stage3_prefetch_bucket_size": 50000000,
        "stage3_gather_16bit_weights_on_model_save": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    },
    "activation_checkpointing": {"partition_activations": True},
}


def main() -> int:
    """Measure, print, append; the exit code is 1 if a limit is missed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        one, many = write_files(folder)
        imports = median_seconds([sys.executable, "-c", "import pydantic, typer, rich"])
        single = median_seconds([sys.executable, "-m", "ds_toolkit", "lint", one])
        wrong = median_seconds([sys.executable, "-m", "ds_toolkit", "lint", write_wrong(folder)])
        thousand = median_seconds([sys.executable, "-m", "ds_toolkit", "lint", *many])
    rows = [
        ("import pydantic, typer, rich", f"{imports:.3f} s", "1.0", ""),
        ("lint of one file", f"{single:.3f} s", f"{single / imports:.2f}", f"{MAX_RATIO:g}x"),
        ("lint of one file with findings", f"{wrong:.3f} s", f"{wrong / imports:.2f}", f"{MAX_RATIO:g}x"),
        (f"lint of {NUM_FILES} files", f"{thousand:.2f} s", "", f"{MAX_SECONDS:g} s"),
    ]
    how = f"median of {NUM_RUNS} after a warm-up"
    table = as_table(how, ("what", "time", "ratio", "limit"), rows)
    print(table)
    append(PAGE, TITLE, table)
    return 0 if max(single, wrong) / imports <= MAX_RATIO and thousand < MAX_SECONDS else 1


def write_files(folder: Path) -> tuple[Path, list[Path]]:
    """A good configuration, and a thousand that differ from it and from each other."""
    paths = []
    for number in range(NUM_FILES):
        path = folder / f"ds_config_{number:04}.json"
        changed = {
            **CONFIG,
            "steps_per_print": number + 1,
            **({"zero_optimisation": {}} if number % 10 == 1 else {}),
        }
        path.write_text(json.dumps(changed, indent=2))
        paths.append(path)
    return paths[0], paths


def write_wrong(folder: Path) -> Path:
    """A configuration with a key that is misspelt, one that is unknown and a number in quotes."""
    path = folder / "wrong.json"
    wrong = {**CONFIG, "zero_optimisation": {}, "mine": 1, "steps_per_print": "10"}
    path.write_text(json.dumps(wrong, indent=2))
    return path


def median_seconds(command: list[str | Path]) -> float:
    """Median seconds of a command from its start to its end, after one run that warms up."""
    seconds = []
    for _ in range(NUM_RUNS + 1):
        started = time.perf_counter()
        done = subprocess.run(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
        )
        seconds.append(time.perf_counter() - started)
        assert done.returncode in (0, 1), done.stderr
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    sys.exit(main())
