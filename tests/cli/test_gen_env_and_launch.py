from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_toolkit.advise.launching import LAUNCHERS
from ds_toolkit.cli.gen_launch import LaunchChoice
from ds_toolkit.env.envfile import read_env_file
from ds_toolkit.env.hostfile import read_hostfile

ENVIRONMENT = {"PATH": "/nonexistent", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
LAUNCH = ("gen-launch", "--num-nodes", "2", "--gpus-per-node", "4")


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ds_toolkit", *arguments]
    return subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)


def test_each_line_is_explained_on_the_terminal_and_not_in_the_file(tmp_path: Path) -> None:
    done = run("gen-env", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    variables = read_env_file(tmp_path / ".deepspeed_env").variables
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" in variables
    for name, value in variables.items():
        assert f"- {name}={value}: " in done.stdout
    assert done.stdout.endswith("written: .deepspeed_env\n")


def test_running_it_again_keeps_every_line(tmp_path: Path) -> None:
    (tmp_path / "my_env").write_text("HF_HOME=/data\nNCCL_DEBUG=TRACE\n")
    assert run("gen-env", "-o", "my_env", cwd=tmp_path).returncode == 0
    once = (tmp_path / "my_env").read_text()
    assert once.startswith("HF_HOME=/data\nNCCL_DEBUG=TRACE\n")
    done = run("gen-env", "-o", "my_env", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["settings"] == {}
    assert (tmp_path / "my_env").read_text() == once


def test_a_dry_run_of_debugging_writes_nothing(tmp_path: Path) -> None:
    done = run("gen-env", "--debug", "--dry-run", "--launcher", "torchrun", cwd=tmp_path)
    assert "\nNCCL_DEBUG=INFO\n" in done.stdout
    assert "torchrun does not read the file" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "arguments", "says"),
    [
        ("HF_TOKEN=x\n", (), "looks like a secret"),
        ("# note\n", (), "cannot read"),
        ("A=1\n", ("--hostfile", "none"), "hostfile cannot be read"),
        ("A=1\n", ("-o", "none/env"), "cannot be written"),
    ],
)
def test_a_file_that_is_refused_stays_as_it_was(
    text: str, arguments: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    (tmp_path / ".deepspeed_env").write_text(text)
    done = run("gen-env", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / ".deepspeed_env").read_text() == text


def test_a_script_and_its_hostfile(tmp_path: Path) -> None:
    done = run(*LAUNCH, "--launcher", "pdsh", "--hosts", "n1,n2", "-o", "launch.sh", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert read_hostfile(tmp_path / "hostfile").slots == {"n1": 4, "n2": 4}
    script = (tmp_path / "launch.sh").read_text()
    assert f"{sys.executable} -m deepspeed.launcher.runner" in script
    assert f"cd {tmp_path}\n" in script
    assert os.access(tmp_path / "launch.sh", os.X_OK)
    refused = run(*LAUNCH, "--launcher", "slurm", "-o", "launch.sh", cwd=tmp_path)
    assert refused.returncode == 2
    assert "the file exists" in refused.stderr
    assert (tmp_path / "launch.sh").read_text() == script
    assert run(*LAUNCH, "--launcher", "slurm", "-o", "launch.sh", "--force", cwd=tmp_path).returncode == 0


def test_without_a_file_the_script_is_printed(tmp_path: Path) -> None:
    done = run(*LAUNCH, "--launcher", "slurm", cwd=tmp_path)
    assert done.stdout.startswith("#!/usr/bin/env bash\n#SBATCH --nodes=2\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--launcher", "impi"), "'impi' is not one of"),
        (("--launcher", "pdsh", "--script", "my train.py"), "pdsh would not carry the path"),
        (("--launcher", "slurm", "--for", "lightning"), "no script for Lightning"),
        (("--launcher", "pdsh", "--hosts", "n1,-oProxyCommand", "-o", "l.sh"), "not the name of a host"),
        (("--launcher", "pdsh", "--hosts", "n1"), "--hosts names 1 hosts, --num-nodes says 2"),
        (("--launcher", "pdsh", "--hosts", "n1,n1", "-o", "l.sh"), "stands twice"),
        (("--launcher", "pdsh", "--master-addr", "$(reboot)"), "not the address"),
        (("--launcher", "pdsh", "--python", "python3"), "not absolute"),
    ],
)
def test_what_cannot_be_launched_is_refused(arguments: tuple[str, ...], says: str, tmp_path: Path) -> None:
    done = run(*LAUNCH, *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_help_lists_the_launchers_that_there_are_scripts_for(tmp_path: Path) -> None:
    text = run("gen-launch", "--help", cwd=tmp_path).stdout
    assert [choice.value for choice in LaunchChoice] == [launcher.value for launcher in LAUNCHERS]
    assert "slurm" in text
    assert "mpich" not in text
    assert "impi" not in text


def test_the_trainer_gets_the_argument_that_its_parser_takes(tmp_path: Path) -> None:
    text = run(*LAUNCH, "--launcher", "slurm", "--for", "hf", cwd=tmp_path).stdout
    assert " train.py --deepspeed ds_config.json " in text
    assert "--deepspeed_config" not in text
