"""The command on this host alone, and what it says where its own input is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jobs
import pytest


def preflight(tmp_path: Path, *options: str | Path) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "ds_toolkit", "preflight", *options],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(jobs.REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A Python that finds stand-ins of torch and deepspeed; importing the real ones takes long."""
    for name in ("torch", "deepspeed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text('__version__ = "1.2.3"\nclass version: cuda = None\n')
    return Path(sys.executable)


def test_this_host_alone(tmp_path: Path, python: Path) -> None:
    # The folder of the launch comes first on the ranks' path, as DeepSpeed's launcher puts it there.
    exit_code, out, err = preflight(tmp_path, "--python", python)
    assert exit_code == 0, err
    assert "torch 1.2.3" in out
    assert "localhost" in out
    assert "DS1122 no-gpu-seen" in out
    assert "1 note in 1 host" in out


def test_json_holds_what_was_measured(tmp_path: Path, python: Path) -> None:
    (tmp_path / "ds_config.json").write_text('{"ds_toolkit": {"keep_last": 1000000}}')
    options = ("--python", python, "--json", "--checkpoint-dir", "new/checkpoints", "--model", "7B")
    exit_code, out, _ = preflight(tmp_path, *options, "--config", "ds_config.json")
    report = json.loads(out)
    assert exit_code == 1
    (space,) = [finding for finding in report["findings"] if finding["code"] == "DS1112"]
    assert space["host"] == "localhost"
    # 16 bytes a parameter in fp32.
    assert "1000001 checkpoints of 112.0 GB" in space["message"]
    (host,) = report["hosts"]
    assert host["answer"]["software"]["versions"]["torch"] == "1.2.3"
    assert host["checks"]["space"]["severity"] == "error"
    assert host["answer"]["storage"]["folder"] == str(tmp_path)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--hostfile", "none"], "the hostfile cannot be read"),
        (["--hostfile", "bad"], "`worker-1` cannot be read"),
        (["--config", "none"], "the configuration cannot be read"),
        (["--config", "wrong"], "keep_last"),
        (["--env-file", "none"], "the environment file cannot be read"),
        (["--model", "seven"], "`seven` is not a count"),
        (["--launcher", "rsh"], "rsh"),
    ],
)
def test_wrong_input_is_an_error_and_no_finding(tmp_path: Path, options: list[str], said: str) -> None:
    (tmp_path / "bad").write_text("worker-1\n")
    (tmp_path / "wrong").write_text('{"ds_toolkit": {"keep_last": 0}}')
    exit_code, out, err = preflight(tmp_path, *options, "--json")
    assert exit_code == 2
    assert said in json.dumps(json.loads(out)["error"])
    assert "Traceback" not in err
