"""Which variables the installed torch reads: names that we call current, and which of two names counts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ds_toolkit.env.variables import REPLACED, VARIABLES

HOME = Path(torch.__file__).parent
C10D = HOME / "include" / "torch" / "csrc" / "distributed" / "c10d"
# NCCLUtils.cpp alone names it, and is compiled into builds for CUDA only.
ONLY_WITH_CUDA = {"TORCH_NCCL_USE_COMM_NONBLOCKING"}
CURRENT = sorted({name for name in VARIABLES if name.startswith("TORCH_")} - ONLY_WITH_CUDA)
RENAMED = [
    (old, new.name) for old, new in REPLACED.items() if new.is_read and (new.since or "").startswith("torch ")
]
# One rank of gloo remembers its collectives as NCCL's ranks do.
RECORDER = """
import json
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace_json
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(9):
    dist.all_reduce(torch.ones(1))
print(len(json.loads(_dump_fr_trace_json())["entries"]))
"""


@pytest.fixture(scope="module")
def strings() -> bytes:
    """All that names a variable in the installed torch: libraries, and headers and Python of its c10d."""
    files = [
        *(HOME / "lib" / f"lib{name}.so" for name in ("torch_cpu", "torch_python", "c10")),
        *C10D.glob("*.hpp"),
        *(HOME / "distributed").glob("*.py"),
    ]
    return b"\0".join(path.read_bytes() for path in files)


@pytest.mark.parametrize("name", CURRENT)
def test_a_current_name_is_read(name: str, strings: bytes) -> None:
    assert named(name, strings)


@pytest.mark.parametrize(("old", "new"), RENAMED)
def test_both_names_of_what_was_renamed_are_read(old: str, new: str, strings: bytes) -> None:
    assert named(old, strings)
    assert named(new, strings)


def named(name: str, strings: bytes) -> bool:
    # Whole: between quotes in a source, between zeros in a library.
    return f'"{name}"'.encode() in strings or f"\0{name}\0".encode() in strings


def test_the_new_name_stands_first_in_the_lists_of_torch() -> None:
    text = "".join((C10D / "ProcessGroupNCCL.hpp").read_text().split())
    for old, new in RENAMED:
        if old.startswith("NCCL_"):
            assert f'{{"{new}","{old}"}}' in text
    assert "SkipCleanUp=3" in text


@pytest.mark.parametrize(
    ("variables", "entries"),
    [
        ({"TORCH_FR_BUFFER_SIZE": "3"}, 3),
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "5"}, 5),
        ({"TORCH_FR_BUFFER_SIZE": "3", "TORCH_NCCL_TRACE_BUFFER_SIZE": "5"}, 3),
    ],
)
def test_the_flight_recorder_takes_the_new_name_before_the_old(
    variables: dict[str, str], entries: int
) -> None:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_")}
    done = subprocess.run(
        [sys.executable, "-c", RECORDER],
        env={**inherited, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == entries
