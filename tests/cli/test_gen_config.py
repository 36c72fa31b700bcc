from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_toolkit.config.linter import lint
from ds_toolkit.config.reader import read_config

# The machine under test may have GPUs; without nvidia-smi on the PATH it counts as one that has none.
ENVIRONMENT = {
    "PATH": "/nonexistent",
    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    "COLUMNS": "120",
}
SMALL = ("--model", "1M", "--stage", "3", "--num-nodes", "1", "--gpus-per-node", "2")
SMALL += ("--sequence-length", "128", "--micro-batch-size", "8")


def gen_config(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ds_toolkit", "gen-config", *arguments]
    return subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)


def test_a_config_is_written_with_its_ladder_and_its_reasons(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    done = gen_config(*SMALL, "-o", "runs/ds_config.json", "--force", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert [line.split()[0:3] for line in lines if "->" in line] == [["->", "ZeRO", "3"]]
    assert len([line for line in lines if line.startswith("- ")]) > 6
    assert lines[-1] == "written: runs/ds_config.json"
    document = read_config(tmp_path / "runs" / "ds_config.json")
    assert json.loads((tmp_path / "runs" / "ds_config.json").read_text()) == document.data
    assert document.data["zero_optimization"]["stage"] == 3  # type: ignore[index]
    assert lint(document, world_size=2) == []


def test_json_output_holds_what_the_file_holds(tmp_path: Path) -> None:
    done = gen_config(*SMALL, "--json", cwd=tmp_path)
    report = json.loads(done.stdout)
    assert report["schema"] == 1
    assert report["config"] == json.loads((tmp_path / "ds_config.json").read_text())
    assert [rung["name"] for rung in report["rungs"] if rung["chosen"]] == ["ZeRO 3"]
    assert report["file"] == "ds_config.json"


def test_a_dry_run_prints_and_writes_nothing(tmp_path: Path) -> None:
    done = gen_config(*SMALL, "--dry-run", cwd=tmp_path)
    config = json.loads(done.stdout[done.stdout.index("\n{\n") :])
    assert config["train_micro_batch_size_per_gpu"] == 8
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "--model is missing"),
        (("--model", "big"), "`big` is not a count"),
        (("--model", "1M", "-o", "missing/c.json"), "the folder does not exist"),
        (("--model", "1M", "-o", "there.json"), "the file exists"),
        (("--model", "1M", "-o", "."), "is a folder"),
        (("--model", "1M", "--gpus-per-node", "0"), "is 0"),
        (("--model", "1M", "--host-memory", "much"), "`much` is not a size"),
        (("--model", "70B", "--host-memory", "1GB"), "does not fit"),
        (("--model", "1M", "--stage", "4"), "--stage"),
    ],
)
def test_bad_input_ends_with_two_and_without_a_traceback(
    arguments: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    (tmp_path / "there.json").write_text("mine")
    done = gen_config(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "there.json").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["there.json"]


def test_force_replaces_the_file(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text("mine")
    assert gen_config("--model", "1M", "--force", cwd=tmp_path).returncode == 0
    assert "train_micro_batch_size_per_gpu" in (tmp_path / "ds_config.json").read_text()


@pytest.mark.parametrize("arguments", [["--help"], ["--model", "1M", "--dry-run"]])
def test_neither_torch_nor_deepspeed_is_imported(arguments: list[str], tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from ds_toolkit.cli import main\n"
        "try:\n    main()\n"
        "finally:\n"
        "    print('heavy:', sorted({'torch', 'deepspeed', 'numpy'} & sys.modules.keys()))\n"
    )
    command = [sys.executable, "-c", program, "gen-config", *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "heavy: []"
