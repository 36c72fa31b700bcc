"""What the world does to a run: a full disk, a killed rank, an end without goodbye, no compiler."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jobs
import mounts
import psutil
import pytest
from simple_runs import WORKER, arenas_of, report_of, whole_steps

from ds_toolkit.checkpoint.manifest import Manifest
from ds_toolkit.checkpoint.ownership import LOCK_NAME

LAUNCHERS = {"torchrun": jobs.torchrun_command, "deepspeed": jobs.deepspeed_command}


def hidden(directory: Path) -> list[str]:
    """What is left behind there; the lock of a run that died stays, and keeps nobody out."""
    return [path.name for path in directory.glob(".*") if path.name != LOCK_NAME]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 20 MB: room for two checkpoints of the big kind, not for three."""
    with mounts.tmpfs(tmp_path / "small", "20m") as mount_point:
        yield mount_point


def test_a_disk_that_fills_up_during_a_save(small_disk: Path) -> None:
    finished = jobs.run(jobs.torchrun_command(WORKER, small_disk / "ckpt", "6", "2", "--big"))
    assert finished.exit_code != 0
    # The file, the cause, the fix; and no rank is left waiting, or there would be no end.
    for told in (
        "a checkpoint file cannot be written",
        ".global_step6.",
        " bytes are free",
        "keep_last",
    ):
        assert told in finished.output
    assert whole_steps(small_disk / "ckpt") == [4, 2]
    assert (small_disk / "ckpt" / "latest").read_text() == "global_step4"
    assert hidden(small_disk / "ckpt") == []
    # With space again, the same command goes on.
    shutil.rmtree(small_disk / "ckpt" / "global_step2")
    finished = jobs.run(jobs.torchrun_command(WORKER, small_disk / "ckpt", "6", "2", "--big"))
    assert report_of(finished)["resumed"] == 4
    assert whole_steps(small_disk / "ckpt") == [6, 4]


def rank_process(launcher: int, rank: int) -> int:
    """Process id of a rank below a launcher."""
    found = [
        process.pid
        for process in psutil.Process(launcher).children(recursive=True)
        if process.environ().get("RANK") == str(rank) and WORKER.name in " ".join(process.cmdline())
    ]
    # A rank may have children (a shell of some library); it is the eldest.
    return min(found)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What six steps give when nobody interferes."""
    directory = tmp_path_factory.mktemp("undisturbed")
    return report_of(jobs.run(jobs.torchrun_command(WORKER, directory, "6", "2", "--big")))


@pytest.mark.parametrize(
    ("launcher", "victim"), [("torchrun", 0), ("torchrun", 1), ("deepspeed", 0), ("deepspeed", 1)]
)
def test_a_rank_killed_while_a_checkpoint_is_written(
    tmp_path: Path, undisturbed: dict[str, Any], launcher: str, victim: int
) -> None:
    command = LAUNCHERS[launcher]
    directory = tmp_path / "ckpt"
    with jobs.Job(command(WORKER, directory, "6", "2", "--big")) as job:
        # Seen from outside: this checkpoint is begun and not committed.
        jobs.wait_until(
            lambda: any(directory.glob(".global_step4.*.partial/*")), 120, "the second checkpoint"
        )
        os.kill(rank_process(job.process.pid, victim), signal.SIGKILL)
        assert job.wait(120).exit_code != 0
    assert whole_steps(directory)[0] in (2, 4)
    assert (directory / (directory / "latest").read_text() / "manifest.json").exists()
    resumed = report_of(jobs.run(command(WORKER, directory, "6", "2", "--big")))
    assert resumed["resumed"] in (2, 4)
    assert hidden(directory) == []
    assert resumed["fingerprint"] == undisturbed["fingerprint"]
    assert resumed["losses"] == undisturbed["losses"][-len(resumed["losses"]) :]


def test_an_end_without_close_loses_nothing(tmp_path: Path) -> None:
    finished = jobs.run(jobs.torchrun_command(WORKER, tmp_path, "5", "2", "--no-close"))
    # An abort in the interpreter's own end is torch's; what counts is that no rank waited for another.
    assert finished.exit_code in (0, 1), finished.output
    assert whole_steps(tmp_path) == [4, 2]


def test_an_end_without_close_is_a_normal_end(tmp_path: Path) -> None:
    """The guardian writes what the last step left in the slots, and no incident."""
    finished = jobs.run(jobs.torchrun_command(WORKER, tmp_path, "5", "100", "--no-close", "--snapshots"))
    assert finished.exit_code in (0, 1), finished.output
    jobs.wait_until(lambda: not arenas_of(tmp_path), 30, "the end of the guardian")
    assert whole_steps(tmp_path) == [5]
    assert Manifest.read(tmp_path / "global_step5").kind == "final"
    assert (tmp_path / "latest").read_text() == "global_step5"


@pytest.fixture
def no_compiler(tmp_path: Path) -> dict[str, str]:
    """An environment in which nothing can be compiled and nothing compiled before is found."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "python3").symlink_to(sys.executable)
    for name in ("gcc", "g++", "c++", "cc", "clang++", "ninja", "nvcc"):
        assert shutil.which(name, path=str(tools)) is None
    return {"PATH": str(tools), "CC": "", "CXX": "", "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}


def test_training_without_a_compiler(tmp_path: Path, no_compiler: dict[str, str]) -> None:
    command = jobs.torchrun_command(WORKER, tmp_path / "ckpt", "2", "2")
    report_of(jobs.run(command, environment=no_compiler))
    # The reason why `skip_cpu_extension_builds` exists, and the proof that this test has no compiler.
    finished = jobs.run([*command, "--no-skip"], environment=no_compiler)
    assert finished.exit_code != 0
    assert "deepspeed_shm_comm" in finished.output or "ninja" in finished.output.lower(), finished.output


def beside_small_memory(size: str, *words: str | os.PathLike[str]) -> list[str | os.PathLike[str]]:
    """A job of one rank that sees a /dev/shm of its own, of this size as mount(8) takes it."""
    mount = f"mount -t tmpfs -o size={size} tmpfs /dev/shm"
    job = jobs.torchrun_command(WORKER, *words, "--big", "--snapshots", num_ranks=1)
    return ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh", *job]


def test_too_little_memory_is_told_with_the_way_out(tmp_path: Path) -> None:
    finished = jobs.run(beside_small_memory("3m", tmp_path / "ckpt", "3", "2"))
    report_of(finished)
    # Both sizes, a tenth being left to others; and what to do about it.
    for told in ("no snapshots", "no room for a snapshot", "4.0 MB a slot", "2.8 MB free in /dev/shm"):
        assert told in finished.output
    for way_out in ("a larger /dev/shm", "`arena` to a folder on a fast local disk", "`snapshot_every` to 0"):
        assert way_out in finished.output
    assert whole_steps(tmp_path / "ckpt") == [3, 2], "without snapshots checkpoints are synchronous"
    assert "in the background" not in finished.output
    # The first way out, beside the same small memory.
    command = beside_small_memory("3m", tmp_path / "ckpt", "5", "2", f"--arena={tmp_path / 'arena'}")
    finished = jobs.run(command)
    assert report_of(finished)["resumed"] == 3
    assert "no snapshots" not in finished.output
    (root,) = (tmp_path / "arena").iterdir()
    assert list(root.iterdir()) == []


def test_memory_for_one_slot_is_used_and_told(tmp_path: Path) -> None:
    """What is being written stays as it is, however fast the steps are that follow."""
    finished = jobs.run(beside_small_memory("6m", tmp_path / "ckpt", "30", "8"))
    report_of(finished)
    for told in ("one slot only (4.0 MB a slot", "5.7 MB free in /dev/shm", "(`save_every` is 8)"):
        assert told in finished.output
    assert "is missing" not in finished.output
    in_background = [line for line in finished.output.splitlines() if line.endswith("in the background")]
    assert len(in_background) >= 2
    assert whole_steps(tmp_path / "ckpt")[0] == 30
