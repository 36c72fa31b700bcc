"""`ds-toolkit consolidate` and `python -m ds_toolkit.zero_to_fp32`, as people call them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jobs
import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

from ds_toolkit.cli.app import make_app


@pytest.fixture
def checkpoint(zoo: Path) -> Path:
    return zoo / "stage2-bf16-2ranks" / "checkpoints"


def invoked(*arguments: str | Path, exit_code: int = 0) -> str:
    result = CliRunner().invoke(make_app(), ["consolidate", *map(str, arguments)])
    assert result.exit_code == exit_code, result.output
    return result.stdout


def test_the_command_prints_a_summary(checkpoint: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(make_app(), ["consolidate", str(checkpoint), str(tmp_path / "model.bin")])
    assert result.exit_code == 0, result.output
    assert "global_step3: step 3, ZeRO stage 2, 2 ranks, 3 files" in result.output
    assert "17 tensors, 304 parameters, fp32" in result.output
    assert "head.weight = embedding.weight" in result.output


def test_the_command_prints_json(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    options = ["--json", "--dtype", "bf16", "--tag", "global_step3"]
    result = CliRunner().invoke(make_app(), ["consolidate", str(checkpoint), str(out), *options])
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert (summary["output"], summary["num_bytes"]) == (str(out), out.stat().st_size)
    assert (summary["dtype"], summary["stage"], summary["num_parameters"]) == ("bf16", 2, 304)
    assert summary["bytes_per_second"] > 0


def test_the_command_names_a_truncated_shard_without_a_traceback(checkpoint: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(checkpoint, tmp_path / "checkpoints")
    shard = copied / "global_step3" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    size_bytes = shard.stat().st_size
    os.truncate(shard, size_bytes // 2)
    done = subprocess.run(
        [sys.executable, "-m", "ds_toolkit", "consolidate", str(copied), str(tmp_path / "model.bin")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert str(shard) in done.stderr
    assert f"it has {size_bytes // 2:,} bytes" in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints"]


def test_every_option_reaches_the_room(zoo: Path, tmp_path: Path) -> None:
    truth = torch.load(zoo / "stage3-no-frozen-tied" / "truth.pt")
    torch.save({"frozen.bias": truth["frozen.bias"]}, tmp_path / "base.bin")
    (tmp_path / "out").mkdir()
    options = ["--format", "bin", "--max-shard-size", "50B", "--strip-prefix", "up.", "--only", "weight"]
    options += ["--only", "frozen.*", "--base", tmp_path / "base.bin", "--jobs", "1", "--dtype", "fp16"]
    printed = invoked(zoo / "stage3-no-frozen-tied" / "checkpoints", tmp_path / "out", *options)
    index = json.loads((tmp_path / "out" / "pytorch_model.bin.index.json").read_text())
    assert set(index["weight_map"]) == {"weight", "frozen.bias"}
    state = torch.load(tmp_path / "out" / index["weight_map"]["weight"], weights_only=True)
    assert torch.equal(state["weight"], truth["up.weight"].half())
    assert "1 name from the base" in printed
    assert "files   pytorch_model-00001-of-00002.bin, pytorch_model-00002-of-00002.bin" in printed
    error = subprocess.run(
        [sys.executable, "-m", "ds_toolkit", "consolidate", zoo, tmp_path / "a.bin", "--jobs", "0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (error.returncode, error.stderr.splitlines()[0]) == (2, "error: 0 is no number of threads")


@pytest.mark.parametrize("out", ["model.bin", "out/"])
def test_a_dry_run_writes_nothing(checkpoint: Path, tmp_path: Path, out: str) -> None:
    printed = invoked(checkpoint, f"{tmp_path}/{out}", "--dry-run", "--max-shard-size", "500B")
    assert "(nothing is written)" in printed
    assert "needs   1.4 KB of disk, and " in printed
    assert "of memory or so" in printed
    if out == "out/":
        assert "files   model-00001-of-00003.safetensors, " in printed
    assert not list(tmp_path.iterdir())
    summary = json.loads(invoked(checkpoint, f"{tmp_path}/{out}", "--dry-run", "--json"))
    truth = torch.load(checkpoint.parent / "truth.pt")
    num_bytes = sum(value.nbytes for name, value in truth.items() if name != "head.weight")
    assert (summary["written"], summary["fits"], summary["num_bytes"]) == (False, True, num_bytes)
    assert not list(tmp_path.iterdir())


def test_a_trailing_slash_makes_a_folder(checkpoint: Path, tmp_path: Path) -> None:
    invoked(checkpoint, f"{tmp_path}/model.bin/")
    assert [path.name for path in (tmp_path / "model.bin").iterdir()] == ["model.safetensors"]


# The door for people who call DeepSpeed's script.


def both_scripts(checkpoint: Path, out: Path, *options: str) -> tuple[Path, Path]:
    folders = []
    for module in ("deepspeed.utils.zero_to_fp32", "ds_toolkit.zero_to_fp32"):
        folder = out / module
        command = [sys.executable, "-m", module, checkpoint, folder, *options]
        # DeepSpeed's script imports the classes of a user that are in the checkpoint.
        paths = os.pathsep.join([*sys.path, str(Path(__file__).parents[1])])
        jobs.run(command, environment={"PYTHONPATH": paths}).check()
        folders.append(folder)
    theirs, ours = folders
    assert {path.name for path in ours.iterdir()} == {path.name for path in theirs.iterdir()}
    for path in theirs.glob("*.json"):
        assert json.loads((ours / path.name).read_text()) == json.loads(path.read_text())
    return theirs, ours


def test_the_door_writes_what_deepspeeds_script_writes(checkpoint: Path, tmp_path: Path) -> None:
    options = ["--max_shard_size", "0.3KB", "--exclude_frozen_parameters", "-d"]
    theirs, ours = both_scripts(checkpoint, tmp_path / "new", *options)
    shards = sorted(theirs.glob("pytorch_model-*.bin"))
    assert len(shards) > 2
    for path in shards:
        expected, found = (torch.load(folder / path.name, weights_only=True) for folder in (theirs, ours))
        assert set(found) == set(expected)
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
            assert found[name].dtype == value.dtype


def test_the_door_writes_safetensors(zoo: Path, tmp_path: Path) -> None:
    # Of a checkpoint without tied weights, on which DeepSpeed's script fails.
    checkpoint = zoo / "stage3-no-frozen-tied" / "checkpoints"
    theirs, ours = both_scripts(checkpoint, tmp_path, "--safe_serialization", "-t", "global_step3")
    expected, found = (safetensors.torch.load_file(folder / "model.safetensors") for folder in (theirs, ours))
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_the_door_replaces_and_fails_clearly(checkpoint: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ds_toolkit.zero_to_fp32"]
    (tmp_path / "pytorch_model.bin").write_text("old")
    jobs.run([*command, ".", tmp_path], cwd=checkpoint).check()
    assert "up.weight" in torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    finished = jobs.run([*command, tmp_path, tmp_path / "out"])
    assert finished.exit_code == 2
    assert finished.output.startswith("error: there is no checkpoint in this directory")
    assert "Traceback" not in finished.output
