"""How every command ends when the world is against it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jobs
import pytest
import torch

COMMAND = [sys.executable, "-m", "ds_toolkit"]


def big_checkpoint(folder: Path) -> Path:
    """A stage-0 checkpoint of 400 MB, so that a consolidation takes a while."""
    folder.mkdir()
    module = {f"layer{number}": torch.zeros(5_000_000) for number in range(20)}
    state = {
        "module": module,
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": None,
        "frozen_param_shapes": None,
        "shared_params": None,
        "frozen_param_fragments": None,
        "global_steps": 1,
        "global_samples": 1,
        "skipped_steps": 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": "0.19.8",
    }
    torch.save(state, folder / "mp_rank_00_model_states.pt")
    return folder


@pytest.mark.parametrize(("stop", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_command_leaves_nothing(tmp_path: Path, stop: signal.Signals, exit_code: int) -> None:
    checkpoint = big_checkpoint(tmp_path / "tag")
    with subprocess.Popen([*COMMAND, "consolidate", checkpoint, tmp_path / "model.bin"]) as process:
        jobs.wait_until(lambda: list(tmp_path.glob(".model.bin.*")), 60, "the copy")
        os.kill(process.pid, stop)
        assert process.wait(30) == exit_code
    assert [path.name for path in tmp_path.iterdir()] == ["tag"]


AS_NOBODY = """
import contextlib, os, sys
from ds_toolkit.cli.app import make_app, run
with contextlib.suppress(BaseException):
    # Python itself may lie where nobody may look: all modules that will be needed are loaded now.
    make_app()(["consolidate", "nowhere", "model.bin"])
os.setuid(65534)
sys.argv = ["ds-toolkit", *sys.argv[1:]]
run()
"""


@pytest.mark.parametrize("locked", ["checkpoints", "checkpoints/tag", "checkpoints/latest", "out"])
def test_what_may_not_be_read_is_told_without_a_traceback(tmp_path: Path, locked: str) -> None:
    for folder in ("checkpoints/tag", "out"):
        (tmp_path / folder).mkdir(parents=True)
    torch.save({}, tmp_path / "checkpoints" / "tag" / "mp_rank_00_model_states.pt")
    (tmp_path / "checkpoints" / "latest").write_text("tag")
    (tmp_path / locked).chmod(0)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    finished = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, "consolidate", "checkpoints", "out/model.bin", "--json"],
        cwd=tmp_path,
        # Nobody may not write down what coverage has measured.
        env={name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 2, finished.stderr
    assert "Traceback" not in finished.stderr
    assert json.loads(finished.stdout)["error"]["where"]


def test_a_full_standard_output(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        finished = subprocess.run(
            [*COMMAND, "gen-config", "--model", "1M", "--dry-run"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert finished.returncode != 0
    assert "No space left on device" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_defaults_are_shown_in_the_help() -> None:
    assert "[default:" in jobs.run([*COMMAND, "gen-config", "--help"]).check().output


LOADED = """
import contextlib, sys
from ds_toolkit.cli.app import run
with contextlib.suppress(SystemExit):
    run()
print(*sys.modules, sep="\\n")
"""


def test_a_run_of_one_command_loads_no_other(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"train_batch_size": 8, "mine": 1}')
    finished = jobs.run([sys.executable, "-c", LOADED, "lint", tmp_path / "c.json"]).check()
    assert "unknown-key" in finished.output
    loaded = set(finished.output.splitlines())
    assert "ds_toolkit.cli.lint" in loaded
    assert not loaded & {"ds_toolkit.cli.plan", "ds_toolkit.cli.gen_config", "ds_toolkit.env.rules", "rich"}


def test_the_help_names_all_commands() -> None:
    finished = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, check=True)
    for name in ("gen-config", "gen-env", "gen-launch", "plan", "lint", "explain", "schema", "consolidate"):
        assert f"  {name}" in finished.stdout
