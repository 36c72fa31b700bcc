"""What preflight says of variables on their way, beside what DeepSpeed's own runners make of them."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest
from deepspeed.launcher.multinode_runner import OpenMPIRunner, PDSHRunner, SlurmRunner
from fleets import SOUND_FLEET, with_intent, with_lines

from ds_toolkit.doctor.preflight.variable_rules import Carried, carried
from ds_toolkit.env.envfile import parse_env_text
from ds_toolkit.env.launchers import Launcher

VALUES = [
    "eth0",
    "mlx5_0,mlx5_1",
    "second try",
    "$HOME",
    'a"b',
    "it's",
    "a\\nb",
    "a\\\\b",
    "a\\",
    "`id`",
    "x y # z",
    "",
    "a;b",
    "~/x",
]
RESOURCES = {"worker-0": [0], "worker-1": [0]}


def arguments() -> SimpleNamespace:
    texts = dict.fromkeys(("include", "exclude", "slurm_comment", "launcher_args", "user_script"), "")
    switches = dict.fromkeys(
        (
            "module",
            "no_python",
            "no_local_rank",
            "save_pid",
            "enable_each_rank_log",
            "ssh_port",
            "venv_script",
        )
    )
    return SimpleNamespace(
        user_args=[],
        num_nodes=-1,
        num_gpus=-1,
        master_addr="a",
        master_port=1,
        hostfile="h",
        **texts,
        **switches,
    )


def said(value: str, launcher: Launcher) -> Carried:
    fleet = with_intent(with_lines(SOUND_FLEET, f"A={value}\n"), launcher=launcher)
    (variable,) = carried(fleet.intent)
    return variable


@pytest.mark.parametrize("value", VALUES)
def test_pdsh_and_its_remote_shell(value: str) -> None:
    runner = PDSHRunner(arguments(), "")
    runner.add_export("A", value + "\n")
    command, _, _ = runner.get_cmd({}, RESOURCES)
    exports = next(part for part in command if part.startswith("export A="))
    shell = subprocess.run(
        ["sh", "-c", f'{exports} printf "%s" "$A"'], env={}, capture_output=True, text=True, check=False
    )
    arrived = shell.stdout if shell.returncode == 0 else None
    variable = said(value, Launcher.PDSH)
    if variable.why is None:
        assert variable.value == arrived == value
    else:
        assert arrived != value


@pytest.mark.parametrize("value", VALUES)
def test_open_mpi_gets_arguments_as_they_are(value: str) -> None:
    runner = OpenMPIRunner(arguments(), "", dict.fromkeys(RESOURCES, 1))
    runner.add_export("A", value + "\n")
    command = runner.get_cmd({}, RESOURCES)
    arrived = next(part for part in command if part.startswith("A=")).removeprefix("A=")
    variable = said(value, Launcher.OPENMPI)
    assert variable.value == arrived
    assert (variable.why is None) == (arrived == value)


@pytest.mark.parametrize("value", ["eth0", "mlx5_0,mlx5_1"])
def test_slurm_ends_values_at_commas(value: str) -> None:
    runner = SlurmRunner(arguments(), "", RESOURCES)
    runner.add_export("A", value + "\n")
    # Slurm's list of variables, as srun(1) describes --export: names and values between commas.
    words = " ".join(runner.get_cmd({}, RESOURCES)).split()
    exported = next(word for word in words if "A=" in word)
    arrived = next(part for part in exported.split(",") if part.startswith("A=")).removeprefix("A=")
    assert said(value, Launcher.SLURM).value == arrived


def test_nothing_arrives_where_nobody_reads_the_file() -> None:
    one = with_intent(SOUND_FLEET, slots={"worker-0": 8})
    broken = with_lines(SOUND_FLEET, "A=1\n\nB=2\n")
    commented = with_lines(SOUND_FLEET, "A=1\n# B=2\n")
    for fleet, why in (
        (one, "several hosts only"),
        (broken, "ends the launcher"),
        (commented, "nothing runs"),
    ):
        variables = carried(fleet.intent)
        assert variables
        assert all(variable.value is None and why in (variable.why or "") for variable in variables)
    without = with_intent(SOUND_FLEET, env_file=None)
    assert carried(without.intent) == []
    assert carried(with_intent(SOUND_FLEET, env_file=parse_env_text("HF_TOKEN=x\n")).intent) == [
        Carried("HF_TOKEN", "********", None)
    ]
