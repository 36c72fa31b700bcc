"""Small and slow file systems: real ones, gone when the block is left."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SLOW_DISK = Path(__file__).with_name("slow_disk.py")


@contextlib.contextmanager
def tmpfs(folder: Path, size: str | None = None) -> Iterator[Path]:
    """Mount one at a folder, which is made if it is not there; `size` as mount(8) takes it, such as `2m`."""
    folder.mkdir(exist_ok=True)
    options = [] if size is None else ["-o", f"size={size}"]
    command = ["mount", "-t", "tmpfs", *options, "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0:
        pytest.fail(f"this test needs the right to mount a tmpfs: {done.stderr}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], timeout=30, check=True)


@contextlib.contextmanager
def slow(folder: Path, bytes_per_second: float) -> Iterator[Path]:
    """Mount what takes so much a second at a folder, which is made; what is written lies beside it."""
    behind = folder.with_name(f"{folder.name}_behind")
    behind.mkdir()
    folder.mkdir()
    log = folder.with_name(f"{folder.name}.log")
    command = [sys.executable, SLOW_DISK, behind, folder, str(bytes_per_second)]
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as disk:
        try:
            for _ in range(1000):
                if os.path.ismount(folder):
                    break
                if disk.poll() is not None:
                    pytest.fail(f"this test needs /dev/fuse and libfuse 2: {log.read_text()}")
                time.sleep(0.01)
            yield folder
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], timeout=30, check=False)
            # Whoever still holds a file of it open keeps it alive.
            with contextlib.suppress(subprocess.TimeoutExpired):
                disk.wait(2)
            disk.kill()
