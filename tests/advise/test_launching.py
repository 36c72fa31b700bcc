from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from ds_toolkit.advise.launching import LAUNCHERS, NOTICE_SECONDS, Launch, hostfile_text, launch_script
from ds_toolkit.config.consumers import Consumer
from ds_toolkit.env.hostfile import parse_hostfile_text
from ds_toolkit.env.launchers import Launcher
from ds_toolkit.errors import ToolkitError

LAUNCH = Launch(Launcher.PDSH, 2, 8, "/opt/python/bin/python", "/data/run")
# Says what it was started with, one word a line, and what it sees.
FAKE_PYTHON = """#!/usr/bin/env bash
printf '%s\\n' "$@"
echo "folder=$PWD mine=${MINE:-} file=${DS_ENV_FILE:-} rank=${RANK:-} master=${MASTER_ADDR:-}"
"""
FAKE_SRUN = """#!/usr/bin/env bash
echo "srun $1 $2 $3"
shift 3
SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NTASKS=4 exec "$@"
"""


@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("folder", ["/data/run", '/data/it\'s a "run"', "/data/$HOME/`id`"])
def test_scripts_are_clean_under_shellcheck(launcher: Launcher, num_nodes: int, folder: str) -> None:
    launch = replace(LAUNCH, launcher=launcher, num_nodes=num_nodes)
    if launcher is not Launcher.PDSH:
        launch = replace(launch, folder=folder, script="my train.py", config="my $config")
    launch = replace(launch, hostfile="my $hosts", env_file=f"my env{folder}")
    done = subprocess.run(
        ["shellcheck", "--severity=style", "-"],
        input=launch_script(launch),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def start(
    tmp_path: Path, launcher: Launcher, *arguments: str, num_nodes: int = 2, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the script with an interpreter, and with Slurm's tools, that only say what they were told."""
    # pdsh takes no path that a shell would read otherwise.
    folder = tmp_path / ("mine" if launcher is Launcher.PDSH else "it's mine")
    folder.mkdir()
    tools = {
        "python": FAKE_PYTHON,
        "srun": FAKE_SRUN,
        "scontrol": "#!/usr/bin/env bash\nprintf 'n1\\nn2\\n'\n",
    }
    for name, text in tools.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (folder / ".deepspeed_env").write_text("MINE=carried,whole\n")
    (folder / "hostfile").write_text(hostfile_text(["n1", "n2"], 8))
    launch = Launch(launcher, num_nodes, 8, str(tmp_path / "python"), str(folder))
    script = tmp_path / "launch.sh"
    script.write_text(launch_script(launch))
    return subprocess.run(
        ["bash", script, *arguments],
        env={"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", **environment},
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )


@pytest.mark.parametrize("launcher", [Launcher.PDSH, Launcher.OPENMPI])
def test_deepspeeds_launcher_gets_hostfile_and_environment_file(launcher: Launcher, tmp_path: Path) -> None:
    lines = start(tmp_path, launcher, "--my", "a b").stdout.splitlines()
    assert lines[:4] == ["-m", "deepspeed.launcher.runner", "--launcher", launcher.value]
    assert lines[4:6] == ["--hostfile", "hostfile"]
    at = lines.index("train.py")
    assert lines[at : at + 6] == [
        "train.py",
        "--deepspeed",
        "--deepspeed_config",
        "ds_config.json",
        "--my",
        "a b",
    ]
    assert "mine mine= file=.deepspeed_env" in lines[-1]
    assert "--force_multi" not in lines


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_scripts_set_the_variables_where_the_launcher_is_said_to_leave_it_to_them(launcher: Launcher) -> None:
    script = launch_script(replace(LAUNCH, launcher=launcher))
    assert ("    . ./.deepspeed_env\n" in script) == launcher.script_sets_variables
    assert ("export DS_ENV_FILE=.deepspeed_env\n" in script) != launcher.script_sets_variables


def test_a_single_node_is_launched_as_if_there_were_more(tmp_path: Path) -> None:
    assert "--force_multi" in start(tmp_path, Launcher.PDSH, num_nodes=1).stdout.splitlines()


def test_a_missing_hostfile_ends_the_script(tmp_path: Path) -> None:
    script = launch_script(replace(LAUNCH, folder=str(tmp_path), python="/bin/true"))
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "NAME slots=8" in done.stderr


def test_torchrun_inherits_the_environment_file(tmp_path: Path) -> None:
    done = start(tmp_path, Launcher.TORCHRUN, MASTER_ADDR="n1", NODE_RANK="1")
    lines = done.stdout.splitlines()
    assert lines[:2] == ["-m", "torch.distributed.run"]
    for option, value in (("--nnodes", "2"), ("--nproc-per-node", "8"), ("--node-rank", "1")):
        assert lines[lines.index(option) + 1] == value
    assert "mine=carried,whole " in lines[-1]


def test_torchrun_says_what_each_host_must_be_told(tmp_path: Path) -> None:
    done = start(tmp_path, Launcher.TORCHRUN)
    assert done.returncode != 0
    assert "MASTER_ADDR" in done.stderr


def test_slurm_gives_each_rank_its_place_and_time_for_last_words(tmp_path: Path) -> None:
    done = start(tmp_path, Launcher.SLURM, "a b", SLURM_JOB_NODELIST="n[1-2]")
    lines = done.stdout.splitlines()
    assert lines[0] == f"srun --export=ALL --kill-on-bad-exit=0 --wait={NOTICE_SECONDS}"
    assert lines[1:6] == ["train.py", "--deepspeed", "--deepspeed_config", "ds_config.json", "a b"]
    # All of it: only DeepSpeed's own way to Slurm ends a value at a comma.
    assert "mine=carried,whole file= rank=3 master=n1" in lines[-1]
    script = launch_script(replace(LAUNCH, launcher=Launcher.SLURM))
    directives = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert f"#SBATCH --signal=TERM@{NOTICE_SECONDS}" in directives
    assert "#SBATCH --ntasks-per-node=8" in directives
    # Slurm stops reading at the first command.
    assert script.index(directives[-1]) < script.index("\nset -euo")


def test_a_hostfile_is_one_that_the_launcher_reads() -> None:
    assert parse_hostfile_text(hostfile_text(["a", "me@b"], 4)).slots == {"a": 4, "me@b": 4}
    for hosts in ([], ["a", "a"], ["a b"], ["$(reboot)"], [""], ["-oProxyCommand"]):
        with pytest.raises(ToolkitError):
            hostfile_text(hosts, 4)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"launcher": Launcher.MPICH}, "no script for mpich"),
        ({"num_nodes": 0}, "number of nodes is 0"),
        ({"gpus_per_node": -1}, "GPUs a node is -1"),
        ({"master_port": 70_000}, "not a port"),
        ({"python": "python"}, "not absolute"),
        ({"script": "train.py\nreboot"}, "line break"),
        ({"folder": "/data/my run"}, "pdsh would not carry"),
        ({"folder": "/data/%n"}, "pdsh would not carry"),
        ({"python": "/opt/$(reboot)/python"}, "pdsh would not carry"),
        ({"script": "a;b.py"}, "pdsh would not carry"),
        ({"config": "it's.json"}, "pdsh would not carry"),
        ({"master_addr": "-x"}, "not the address"),
        ({"consumer": Consumer.ACCELERATE}, "no script for Accelerate"),
    ],
)
def test_what_cannot_be_launched_is_refused(change: dict[str, object], says: str) -> None:
    with pytest.raises(ToolkitError, match=says):
        replace(LAUNCH, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_each_consumer_gets_its_own_arguments(launcher: Launcher) -> None:
    launch = replace(LAUNCH, launcher=launcher)
    assert ' train.py --deepspeed --deepspeed_config ds_config.json "$@"' in launch_script(launch)
    for_trainer = launch_script(replace(launch, consumer=Consumer.HF))
    assert ' train.py --deepspeed ds_config.json "$@"' in for_trainer


def test_the_trainers_parser_takes_its_arguments() -> None:
    from transformers import HfArgumentParser, TrainingArguments

    parser = HfArgumentParser(TrainingArguments)
    (parsed, rest) = parser.parse_known_args(["--output_dir", "x", "--deepspeed", "ds_config.json"])
    assert parsed.deepspeed == "ds_config.json"
    assert rest == []
