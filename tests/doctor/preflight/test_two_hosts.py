"""Preflight between two hosts that are one machine, through real pdsh and sshd, with one fault at a time."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jobs
import mounts
import nodes
import psutil
import pytest
from typer.testing import CliRunner

from ds_toolkit.cli.app import make_app

FIRST, SECOND = nodes.HOSTS
REFUSING, SILENT = "127.0.0.4", "127.0.0.5"
AS_ASKED = 'exec /bin/sh -c "$SSH_ORIGINAL_COMMAND"\n'
# Stand-ins: importing the real packages on each host takes seconds, and a second version is not at hand.
TORCH = """
import os
__version__ = os.environ.get("STAND_IN_TORCH", "2.6.0")
class version:
    cuda = None
"""
# Thin on purpose: no clock of this machine is set, only what Python tells of it.
CLOCK = """
import os, time
if "STAND_IN_CLOCK_SECONDS" in os.environ:
    real_time, ahead = time.time, float(os.environ["STAND_IN_CLOCK_SECONDS"])
    time.time = lambda: real_time() + ahead
"""


@dataclass
class TwoHosts:
    """The server, the launch's folder, and what the second host does before it does what it is asked."""

    home: Path
    run: Path

    @property
    def python(self) -> Path:
        return self.run.parent / "opt" / "python"

    @property
    def checkpoints(self) -> Path:
        return self.run.parent / "checkpoints"

    def plant(self, *commands: str) -> None:
        """Run these on the second host first, in namespaces of its own."""
        inner = self.home / "second_inner.sh"
        inner.write_text("\n".join(["set -e", *commands, AS_ASKED]))
        (self.home / "second.sh").write_text(f"#!/bin/sh\nexec unshare -m /bin/sh {inner}\n")

    def preflight(
        self, *options: str | Path, hosts: Sequence[str] = nodes.HOSTS, tools: Path | None = None
    ) -> tuple[int, dict[str, Any], float]:
        """Exit code, JSON and seconds of the command."""
        (self.run / "hostfile").write_text("".join(f"{host} slots=1\n" for host in hosts))
        port = () if "--master-port" in options else ("--master-port", str(jobs.free_port()))
        python = () if "--python" in options else ("--python", self.python)
        command = ["preflight", "--hostfile", "hostfile", "--json", "--script", "train.py"]
        words = [str(word) for word in (*command, *python, *port, *options)]
        started = time.monotonic()
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.run)
            for name, value in self.environment(tools).items():
                patch.setenv(name, value)
            # In this process: a Python that starts for each test takes as long as what is tested.
            finished = CliRunner().invoke(make_app("preflight"), words, catch_exceptions=False)
        return finished.exit_code, json.loads(finished.stdout), time.monotonic() - started

    def environment(self, tools: Path | None = None) -> dict[str, str]:
        """What a person's shell would say, with the ssh that knows these hosts first on the path."""
        return {
            "PATH": f"{tools or self.home / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self.home),
            "PYTHONPATH": str(jobs.REPOSITORY),
        }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("nodes") / "home"
    scripts = {host: home / name for host, name in ((FIRST, "first.sh"), (SECOND, "second.sh"))}
    home.mkdir()
    for script in scripts.values():
        script.write_text(f"#!/bin/sh\n{AS_ASKED}")
        script.chmod(0o755)
    with nodes.ssh_server(home, forced=scripts):
        yield home


@pytest.fixture
def two(server: Path, tmp_path: Path) -> TwoHosts:
    """Two hosts without a fault."""
    (server / "second.sh").write_text(f"#!/bin/sh\n{AS_ASKED}")
    run, packages, opt = (tmp_path / name for name in ("run", "packages", "opt"))
    for folder in (run, packages / "torch", packages / "deepspeed", opt, tmp_path / "checkpoints"):
        folder.mkdir(parents=True)
    (packages / "torch/__init__.py").write_text(TORCH)
    (packages / "deepspeed/__init__.py").write_text('__version__ = "0.19.8"\n')
    (packages / "sitecustomize.py").write_text(CLOCK)
    (opt / "python").write_text(f'#!/bin/sh\nPYTHONPATH={packages}:$PYTHONPATH exec {sys.executable} "$@"\n')
    (opt / "python").chmod(0o755)
    (run / "train.py").write_text("print('training')\n")
    (run / ".deepspeed_env").write_text("DS_ACCELERATOR=cpu\nNCCL_SOCKET_IFNAME=lo\n")
    return TwoHosts(server, run)


def found(report: dict[str, Any]) -> set[tuple[str, str | None]]:
    """Codes and hosts of what a person should look at. That `lo` leads nowhere (DS727) is right."""
    return {
        (finding["code"], finding["host"])
        for finding in report["findings"]
        if finding["severity"] != "info" and finding["code"] != "DS727"
    }


def message(report: dict[str, Any], code: str) -> str:
    return next(finding["message"] for finding in report["findings"] if finding["code"] == code)


def answer_of(report: dict[str, Any], name: str) -> dict[str, Any]:
    return next(host["answer"] for host in report["hosts"] if host["name"] == name)


def test_sound_hosts_are_clean_and_nothing_is_left_behind(two: TwoHosts) -> None:
    _, report, _ = two.preflight("--checkpoint-dir", two.checkpoints)
    assert found(report) == set()
    assert list(two.checkpoints.iterdir()) == []
    for name in nodes.HOSTS:
        answer = answer_of(report, name)
        assert answer["software"]["versions"]["torch"] == "2.6.0"
        assert answer["storage"]["bytes_per_second"] > 0
    # Only the first host is asked for the port.
    ports = {host["name"]: host["checks"]["port"]["measured"] for host in report["hosts"]}
    assert ports[SECOND] is None
    assert ports[FIRST].endswith("free")


def test_real_packages_are_read_over_plain_ssh_too(two: TwoHosts) -> None:
    _, report, _ = two.preflight("--python", sys.executable, "--launcher", "openmpi")
    import deepspeed
    import torch

    for name in nodes.HOSTS:
        versions = answer_of(report, name)["software"]["versions"]
        assert versions["torch"] == torch.__version__
        assert versions["deepspeed"] == deepspeed.__version__
        assert versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found(report) <= {("DS1102", None)}


def test_a_python_that_is_elsewhere(two: TwoHosts) -> None:
    two.plant(f"mount -t tmpfs tmpfs {two.python.parent}")
    exit_code, report, _ = two.preflight()
    assert found(report) == {("DS1103", SECOND)}
    assert exit_code == 1
    assert message(report, "DS1103") == f"`{two.python}` is not there"


def test_no_python_at_all(two: TwoHosts) -> None:
    two.plant(f"mount -t tmpfs tmpfs {two.python.parent}", "export PATH=/nowhere")
    _, report, _ = two.preflight()
    assert found(report) == {("DS1103", SECOND)}
    assert "neither this Python nor a python3" in message(report, "DS1103")


def test_another_version(two: TwoHosts) -> None:
    two.plant("export STAND_IN_TORCH=2.5.1")
    _, report, _ = two.preflight()
    assert found(report) == {("DS1107", SECOND)}
    assert message(report, "DS1107") == "torch 2.5.1, others have 2.6.0"


def test_a_script_that_is_elsewhere(two: TwoHosts) -> None:
    two.plant(f"mount -t tmpfs tmpfs {two.run}")
    _, report, _ = two.preflight()
    assert found(report) == {("DS1104", SECOND)}


def test_a_host_where_nothing_listens(two: TwoHosts) -> None:
    _, report, _ = two.preflight(hosts=[*nodes.HOSTS, REFUSING])
    assert ("DS1101", REFUSING) in found(report)
    assert "Connection refused" in message(report, "DS1101")
    assert {host for _, host in found(report)} <= {REFUSING, None}
    # The worst first.
    assert report["hosts"][0]["name"] == REFUSING


def left_for(host: str) -> list[list[str]]:
    """Processes that still try to reach a host."""
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [command for command in commands if host in command]


def test_one_that_is_stopped_waits_for_nobody_and_leaves_nothing(two: TwoHosts) -> None:
    (two.run / "hostfile").write_text(f"{FIRST} slots=1\n{SECOND} slots=1\n")
    # It lets us in, and then says nothing.
    two.plant("exec sleep 25")
    command = [
        sys.executable,
        "-m",
        "ds_toolkit",
        "preflight",
        "--hostfile",
        "hostfile",
        "--launcher",
        "torchrun",
    ]
    with subprocess.Popen(
        [*command, "--python", two.python, "--checkpoint-dir", two.checkpoints],
        cwd=two.run,
        env={**os.environ, **two.environment()},
        stdout=subprocess.DEVNULL,
    ) as process:
        jobs.wait_until(lambda: list(two.checkpoints.iterdir()), 30, "the probe file")
        started = time.monotonic()
        process.terminate()
        assert process.wait(30) == 143
    assert time.monotonic() - started < 15
    assert list(two.checkpoints.iterdir()) == []
    jobs.wait_until(lambda: not left_for(SECOND), 3, "the end of what asked it")


@pytest.mark.parametrize("launcher", ["pdsh", "torchrun"])
def test_a_host_that_accepts_and_never_answers(two: TwoHosts, launcher: str) -> None:
    with socket.create_server((SILENT, nodes.port_of(two.home))):
        _, report, seconds = two.preflight(
            "--launcher", launcher, "--timeout", "4", hosts=[SILENT, *nodes.HOSTS]
        )
    assert ("DS1101", SILENT) in found(report)
    assert message(report, "DS1101") == "it cannot be reached: no answer within 4 s"
    assert answer_of(report, SECOND)["software"]["versions"]["torch"] == "2.6.0"
    assert seconds < 12
    jobs.wait_until(lambda: not left_for(SILENT), 3, "the end of what asked it")


def test_a_host_that_wants_a_password(two: TwoHosts, tmp_path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "stranger"], check=True)
    config = (two.home / "ssh_config").read_text()
    (tmp_path / "ssh_config").write_text(
        re.sub(r"IdentityFile \S+", f"IdentityFile {tmp_path}/stranger", config)
    )
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {tmp_path}/ssh_config "$@"\n')
    (tools / "ssh").chmod(0o755)
    _, report, _ = two.preflight(tools=tools)
    assert found(report) == {("DS1101", FIRST), ("DS1101", SECOND)}
    assert "Permission denied" in message(report, "DS1101")


def test_a_checkpoint_directory_that_is_not_shared(two: TwoHosts) -> None:
    two.plant(f"mount -t tmpfs tmpfs {two.checkpoints}")
    _, report, _ = two.preflight("--checkpoint-dir", two.checkpoints)
    assert found(report) == {("DS1111", SECOND)}
    assert list(two.checkpoints.iterdir()) == []


def test_a_full_disk(two: TwoHosts) -> None:
    with mounts.tmpfs(two.checkpoints, "1m"):
        _, report, _ = two.preflight("--checkpoint-dir", two.checkpoints)
        assert list(two.checkpoints.iterdir()) == []
    assert found(report) == {("DS1110", FIRST), ("DS1110", SECOND)}
    assert "No space left on device" in message(report, "DS1110")


def test_no_room_for_the_checkpoints_that_are_kept(two: TwoHosts) -> None:
    with mounts.tmpfs(two.checkpoints, "400m"):
        (two.checkpoints / "global_step10").mkdir()
        (two.checkpoints / "global_step10/shard").write_bytes(bytes(110 * 10**6))
        _, report, _ = two.preflight("--checkpoint-dir", two.checkpoints)
    assert found(report) == {("DS1112", FIRST), ("DS1112", SECOND)}
    assert "4 checkpoints of 110.0 MB need 440.0 MB" in message(report, "DS1112")


def test_a_master_port_that_is_taken(two: TwoHosts) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        _, report, _ = two.preflight("--master-port", str(port))
    assert found(report) == {("DS1120", FIRST)}
    assert message(report, "DS1120") == f"port {port} cannot be used: in use"


def test_a_small_shared_memory(two: TwoHosts) -> None:
    two.plant("mount -t tmpfs -o size=64m tmpfs /dev/shm")
    _, report, _ = two.preflight()
    assert found(report) == {("DS1114", SECOND)}
    assert message(report, "DS1114").startswith("67.1 MB free on /dev/shm")


def test_a_clock_that_is_ahead(two: TwoHosts) -> None:
    two.plant("export STAND_IN_CLOCK_SECONDS=60")
    _, report, _ = two.preflight()
    assert found(report) == {("DS1109", SECOND)}
    seconds = float(re.findall(r"[\d.]+", message(report, "DS1109"))[0])
    # At most by how long the answer was under way less than the truth, and never more.
    assert 55 < seconds <= 60.1


def test_a_low_limit_of_open_files(two: TwoHosts) -> None:
    two.plant("ulimit -n 256")
    _, report, _ = two.preflight()
    assert found(report) == {("DS1116", SECOND)}
    assert message(report, "DS1116") == "`ulimit -n` is 256, and ranks may need 1024"


def test_an_interface_that_is_not_there(two: TwoHosts) -> None:
    (two.run / ".deepspeed_env").write_text("DS_ACCELERATOR=cpu\nNCCL_SOCKET_IFNAME=ens99\n")
    _, report, _ = two.preflight()
    assert found(report) == {("DS1118", FIRST), ("DS1118", SECOND)}


def test_start_up_files_that_differ_and_secrets_that_stay(two: TwoHosts) -> None:
    (two.run / ".deepspeed_env").write_text("DS_ACCELERATOR=cpu\nWANDB_API_KEY=abc123\n")
    two.plant("export NCCL_IB_DISABLE=1", "export NCCL_TOKEN=xyz789 WANDB_API_KEY=abc123")
    _, report, _ = two.preflight()
    assert ("DS1124", SECOND) in found(report)
    text = json.dumps(report)
    assert "NCCL_IB_DISABLE" in text
    # It is not even asked for.
    assert "WANDB_API_KEY" not in answer_of(report, SECOND)["variables"]
    assert "abc123" not in text
    assert "xyz789" not in text
