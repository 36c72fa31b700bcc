"""What the installed launcher makes of a `.deepspeed_env`, by running it with a pdsh that only listens."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from deepspeed.launcher import launch as launch_module
from deepspeed.launcher.multinode_runner import OpenMPIRunner, SlurmRunner

from ds_toolkit.env.envfile import read_env_file
from ds_toolkit.env.variables import SET_BY_THE_LAUNCHER

EXAMPLE = Path(__file__).parents[2] / ".deepspeed_env.example"


def launch(tmp_path: Path, env_file: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the launcher for one host as if there were many; gives its end and the arguments that pdsh got."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, script in (("pdsh", 'printf "%s\\0" "$@" > "$HEARD"'), ("ssh", "exit 0")):
        (tools / name).write_text(f"#!/bin/bash\n{script}\n")
        (tools / name).chmod(0o755)
    (tmp_path / ".deepspeed_env").write_text(env_file)
    (tmp_path / "hostfile").write_text("127.0.0.1 slots=1\n")
    heard = tmp_path / "heard"
    environment = {
        "PATH": f"{tools}:/usr/bin:/bin",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "HOME": str(tmp_path / "home"),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "HEARD": str(heard),
    }
    runner = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", "hostfile", "--force_multi"]
    done = subprocess.run(
        [*runner, "--master_addr", "127.0.0.1", "train.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done, heard.read_text().split("\0") if heard.exists() else []


@pytest.fixture
def exports() -> dict[str, str]:
    return read_env_file(EXAMPLE).variables


def test_the_example_reaches_the_remote_shell_as_it_is(tmp_path: Path, exports: dict[str, str]) -> None:
    done, arguments = launch(tmp_path, EXAMPLE.read_text())
    assert done.returncode == 0, done.stderr
    command = next(argument for argument in arguments if "export NCCL" in argument)
    # The remote shell runs the exports, then changes the folder and starts Python; here it lists what it has.
    remote = " ".join(arguments[arguments.index(command) :]).partition(" cd ")[0]
    bash = shutil.which("bash") or "bash"
    listing = subprocess.run(
        [bash, "-c", f"{remote} env -0"], env={}, capture_output=True, text=True, check=True
    ).stdout
    seen = dict(entry.split("=", 1) for entry in listing.split("\0") if entry)
    assert {name: seen.get(name) for name in exports} == exports


def test_a_line_without_equals_ends_the_launcher(tmp_path: Path) -> None:
    done, arguments = launch(tmp_path, "A=1\n\nB=2\n")
    assert done.returncode != 0
    assert "not enough values to unpack" in done.stderr
    assert arguments == []


def test_a_comment_with_equals_swallows_the_remote_command(tmp_path: Path) -> None:
    done, arguments = launch(tmp_path, '# A=1\nB="x y"\n')
    assert done.returncode == 0
    remote = " ".join(arguments)
    assert "export # A=1;" in remote
    assert 'export B=""x y"";' in remote


def runner_arguments() -> SimpleNamespace:
    options = dict.fromkeys(("include", "exclude", "slurm_comment", "launcher_args"), "")
    switches = dict.fromkeys(("module", "no_python"), False)
    return SimpleNamespace(
        user_script="train.py", user_args=[], num_nodes=-1, num_gpus=-1, **options, **switches
    )


def test_slurm_gets_all_variables_in_one_option_with_commas_between() -> None:
    runner = SlurmRunner(runner_arguments(), {}, {"a": [0], "b": [0]})
    runner.add_export("NCCL_IB_HCA", "mlx5_0,mlx5_1")
    command = " ".join(runner.get_cmd({}, {"a": [0], "b": [0]}))
    assert "--export=ALL,NCCL_IB_HCA=mlx5_0,mlx5_1" in command.replace("--export ", "--export=")


def test_blanks_get_quotes_that_only_a_shell_takes_off() -> None:
    runner = OpenMPIRunner(runner_arguments(), {}, {})
    runner.add_export("WANDB_NAME", "second try")
    runner.add_export("NCCL_DEBUG", "WARN")
    assert runner.exports == {"WANDB_NAME": '"second try"', "NCCL_DEBUG": "WARN"} | {
        key: value for key, value in runner.exports.items() if key.startswith("UCX")
    }


def test_the_launcher_sets_what_we_say_it_sets() -> None:
    source = inspect.getsource(launch_module)
    by_constant = {"CROSS_RANK", "CROSS_SIZE"}
    # The accelerator knows the name of the last one.
    for name in SET_BY_THE_LAUNCHER - by_constant - {"CUDA_VISIBLE_DEVICES"}:
        assert f'current_env["{name}"]' in source, name
    assert all(f"current_env[{name}]" in source for name in by_constant)
    assert "set_visible_devices_envs(current_env" in source
