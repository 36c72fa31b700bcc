"""Failures made on purpose, with real launchers and signals, told from their logs alone."""

from __future__ import annotations

import os
import signal
import socket
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

import jobs
import pytest

from ds_toolkit.doctor import diagnose as diagnosing
from ds_toolkit.doctor.diagnose import Diagnosis, diagnose

HERE = Path(__file__).parent
CODES = {
    "SIGKILL": "DS1204",
    "SIGABRT": "DS1210",
    "SIGSEGV": "DS1213",
    "SIGBUS": "DS1206",
    "SIGTERM": "DS1216",
}
LAUNCHERS = {"deepspeed": jobs.deepspeed_command, "torchrun": jobs.torchrun_command}


@pytest.fixture(autouse=True)
def quiet_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the logs alone: not from what this machine's kernel has to say."""
    monkeypatch.setattr(diagnosing, "kernel_log", lambda: b"")
    monkeypatch.setattr(diagnosing, "cgroup_kills", lambda: None)


def diagnosed(
    command: Sequence[str | os.PathLike[str]],
    folder: Path,
    environment: dict[str, str] | None = None,
    *,
    fails: bool = True,
) -> Diagnosis:
    """Run it to its end, and look at what it printed."""
    finished = jobs.run(command, environment=environment, cwd=folder)
    assert (finished.exit_code != 0) is fails, finished.output[-3000:]
    log = folder / "job.log"
    log.write_text(finished.output)
    return diagnose([log])


def codes(diagnosis: Diagnosis) -> list[str]:
    return [cause.finding.code for cause in diagnosis.causes]


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(
    ("name", "rank"),
    [("SIGKILL", 0), ("SIGKILL", 1), ("SIGABRT", 0), ("SIGSEGV", 1), ("SIGBUS", 0), ("SIGTERM", 1)],
)
def test_a_signal_to_a_rank(launcher: str, name: str, rank: int, tmp_path: Path) -> None:
    script = (HERE / "gloo_script.py", str(rank), str(int(getattr(signal, name))))
    diagnosis = diagnosed(LAUNCHERS[launcher](*script), tmp_path)
    log = (tmp_path / "job.log").read_text()
    assert codes(diagnosis)[0] == CODES[name], log[-3000:]
    assert diagnosis.first is not None
    assert diagnosis.first.rank == rank, log[-3000:]


def test_a_missing_interpreter(tmp_path: Path) -> None:
    diagnosis = diagnosed(["bash", "-c", "/opt/none/bin/python3.99 train.py; exit $?"], tmp_path)
    assert codes(diagnosis) == ["DS1217"]
    command = [jobs.BIN / "deepspeed", "--num_gpus=1", f"--master_port={jobs.free_port()}", "--no_python"]
    diagnosis = diagnosed([*command, "--no_local_rank", "none/python3"], tmp_path)
    assert "DS1217" in codes(diagnosis)


def test_a_wrong_hostfile(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("worker-1 slot=1\n")
    command = [jobs.BIN / "deepspeed", "--hostfile", "hostfile", HERE / "gloo_script.py"]
    diagnosis = diagnosed(command, tmp_path)
    assert codes(diagnosis)[0] == "DS1261"
    assert "worker-1 slot=1" in diagnosis.causes[0].finding.message


def test_a_blank_line_in_the_environment_file(tmp_path: Path) -> None:
    (tmp_path / ".deepspeed_env").write_text("A=1\n\nB=2\n")
    assert codes(diagnosed(several_nodes(tmp_path), tmp_path, with_pdsh(tmp_path)))[0] == "DS1264"


def test_a_comment_in_the_environment_file_that_comments_the_launch_away(tmp_path: Path) -> None:
    (tmp_path / ".deepspeed_env").write_text("# A=1\n")
    diagnosis = diagnosed(several_nodes(tmp_path), tmp_path, with_pdsh(tmp_path), fails=False)
    assert codes(diagnosis) == ["DS1265"]


def several_nodes(folder: Path) -> list[str | os.PathLike[str]]:
    (folder / "hostfile").write_text("localhost slots=1\n")
    options = ["--hostfile", "hostfile", "--force_multi", "--no_ssh_check", "--master_addr", "127.0.0.1"]
    return [jobs.BIN / "deepspeed", *options, HERE / "gloo_script.py"]


def with_pdsh(folder: Path) -> dict[str, str]:
    """A pdsh that reaches the node and does what a shell there would make of the command."""
    pdsh = folder / "bin" / "pdsh"
    pdsh.parent.mkdir()
    pdsh.write_text('#!/bin/bash\nwhile [ "$1" != -w ]; do shift; done; shift 2\nbash -c "$*" > /dev/null\n')
    pdsh.chmod(pdsh.stat().st_mode | stat.S_IXUSR)
    return {"PATH": f"{pdsh.parent}:{os.environ['PATH']}", "HOME": str(folder)}


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        diagnosis = diagnosed([sys.executable, HERE / "gloo_script.py", "0", "9"], tmp_path, environment)
    assert codes(diagnosis)[0] == "DS1250"


def test_a_loss_that_is_nan(tmp_path: Path) -> None:
    diagnosis = diagnosed([sys.executable, HERE / "nan_script.py"], tmp_path, fails=False)
    assert codes(diagnosis) == ["DS1273"]


def test_a_limit_of_memory(tmp_path: Path) -> None:
    assert codes(diagnosed([sys.executable, HERE / "memory_script.py"], tmp_path)) == ["DS1203"]


def test_a_resume_at_stage_3_with_another_world_size(tmp_path: Path) -> None:
    worker = HERE / "resume_worker.py"
    jobs.run(jobs.torchrun_command(worker, "save", tmp_path / "checkpoints")).check()
    diagnosis = diagnosed(
        jobs.torchrun_command(worker, "load", tmp_path / "checkpoints", num_ranks=1), tmp_path
    )
    assert codes(diagnosis)[0] == "DS1277", (tmp_path / "job.log").read_text()[-3000:]
    assert diagnosis.first is not None
    assert diagnosis.first.raised is not None


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_run_that_goes_well_has_no_causes(launcher: str, tmp_path: Path) -> None:
    command = LAUNCHERS[launcher](HERE / "gloo_script.py", "9", "9")
    diagnosis = diagnosed(command, tmp_path, fails=False)
    assert codes(diagnosis) == []
    assert diagnosis.first is None
