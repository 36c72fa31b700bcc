"""`ds-toolkit consolidate` when it is killed, watched, or sent to a place that does not take it."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import jobs
import mounts
import pytest
import torch

from ds_toolkit.cli import consolidate_report
from ds_toolkit.convert.placing import partial_path

COMMAND = [sys.executable, "-m", "ds_toolkit", "consolidate"]
OUTPUTS = ["model.bin", "model.safetensors", "out/"]


def checkpoint_of(folder: Path, num_tensors: int, num_elements: int) -> Path:
    """A stage-0 checkpoint of zeros."""
    folder.mkdir()
    module = {f"layer{number}.weight": torch.zeros(num_elements) for number in range(num_tensors)}
    state = {"module": module, "buffer_names": [], "global_steps": 1, "dp_world_size": 1, "mp_world_size": 1}
    torch.save(state, folder / "mp_rank_00_model_states.pt")
    return folder


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of 160 MB, so that writing takes a while."""
    return checkpoint_of(tmp_path_factory.mktemp("big") / "tag", 20, 2_000_000)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return checkpoint_of(tmp_path / "tag", 2, 10)


def test_names_do_not_steer_the_terminal(tmp_path: Path) -> None:
    folder = tmp_path / "tag"
    folder.mkdir()
    weight = torch.zeros(3)
    state = {"module": {"a": weight, "\x1b[2Jb": weight}, "buffer_names": [], "global_steps": 1}
    torch.save({**state, "dp_world_size": 1}, folder / "mp_rank_00_model_states.pt")
    done = jobs.run([*COMMAND, folder, tmp_path / "two\nlines.safetensors"]).check()
    assert "  tied    \\x1b[2Jb = a\n" in done.output
    assert "two\\nlines.safetensors  " in done.output


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("out", OUTPUTS)
def test_a_kill_in_the_middle_leaves_no_output_and_the_next_run_no_remains(
    big: Path, tmp_path: Path, out: str
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    command = [*COMMAND, big, f"{place}/{out}", "--max-shard-size", "40MB"]
    name = Path(out).name
    with subprocess.Popen(command) as process:
        partial = partial_path(place / name).name.replace(str(os.getpid()), str(process.pid))

        def copying() -> bool:
            found = [path for path in (place / partial).rglob("*") if path.is_file()] or [place / partial]
            return any(path.exists() and path.stat().st_blocks > 2**14 for path in found)

        jobs.wait_until(copying, 60, "the copy")
        process.kill()
        assert process.wait(30) == -signal.SIGKILL
    assert names_in(place) == {partial}
    jobs.run(command).check()
    assert names_in(place) == {name}
    if out == "out/":
        assert len(names_in(place / name)) == 5


@pytest.mark.parametrize("out", OUTPUTS)
@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_in_the_middle_leaves_nothing(
    big: Path, tmp_path: Path, out: str, stop: signal.Signals
) -> None:
    with subprocess.Popen([*COMMAND, big, f"{tmp_path}/{out}"]) as process:
        jobs.wait_until(lambda: list(tmp_path.iterdir()), 60, "the copy")
        os.kill(process.pid, stop)
        assert process.wait(30) == 128 + stop
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("out", ["model.bin", "model.safetensors", "new/", "old"])
def test_a_place_that_may_not_be_written(small: Path, tmp_path: Path, out: str) -> None:
    place = tmp_path / "place"
    (place / "old").mkdir(parents=True)
    # Root may write anywhere but on a file system that is read-only.
    with mounts.tmpfs(place):
        (place / "old").mkdir()
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        finished = jobs.run([*COMMAND, small, f"{place}/{out}"])
    assert finished.exit_code == 2
    assert finished.output.startswith("error: the output cannot be written")
    assert f"where: {place / Path(out).name}" in finished.output
    assert "Read-only file system" in finished.output
    assert "Traceback" not in finished.output


def test_a_dry_run_that_would_not_fit(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path / "tag", 1, 2**20)
    with mounts.tmpfs(tmp_path / "place", "2m") as place:
        finished = jobs.run([*COMMAND, checkpoint, f"{place}/", "--dry-run"])
    assert finished.exit_code == 1
    assert "needs   4.2 MB of disk, and 2.1 MB are free: too little" in finished.output


def test_lines_of_progress_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(consolidate_report.time, "monotonic", lambda: now)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with consolidate_report.progress_of("model.bin", silent=False) as report:
        assert report is not None
        for step in range(1, 201):
            now += 0.125
            report(step * 10**6, 200 * 10**6)
    lines = sys.stderr.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == 4
    assert lines[0] == "model.bin: 41.0 MB of 200.0 MB, 8.2 MB/s"


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_short_work_prints_no_progress(small: Path, tmp_path: Path, options: list[str]) -> None:
    command = [*COMMAND, small, tmp_path / "model.safetensors", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert "2 tensors" in done.stdout or json.loads(done.stdout)["num_tensors"] == 2


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_bar_on_a_terminal(big: Path, tmp_path: Path, options: list[str]) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    command = [*COMMAND, big, tmp_path / "model.safetensors", *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                shown += os.read(ours, 65536)
            except OSError:
                break
        assert process.wait(60) == 0
    os.close(ours)
    assert (b"model.safetensors" in shown and b"/160.0 MB" in shown and b"/s" in shown) is not bool(options)
    assert shown == b"" or not options
