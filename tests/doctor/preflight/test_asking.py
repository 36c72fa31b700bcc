"""What comes back from hosts that are slow, loud, silent or not what they seem."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jobs
import psutil
import pytest

from ds_toolkit.doctor.preflight.carrying import Command, local_command, remote_command
from ds_toolkit.doctor.preflight.probe import MARK
from ds_toolkit.doctor.preflight.running import Reply, run_command
from ds_toolkit.env.launchers import Launcher


def reply_to(script: str, timeout_seconds: float = 5) -> tuple[Reply, float]:
    started = time.monotonic()
    reply = run_command(Command(("/bin/sh", "-c", script), {}), timeout_seconds)
    return reply, time.monotonic() - started


def test_answers_are_told_from_noise() -> None:
    lines = ["Welcome!", f'{MARK}{{"clock_seconds": 1000.0}}', f"{MARK}not json", f'{MARK}{{"a": 1}}', "bye"]
    reply, _ = reply_to("\n".join(f"echo '{line}'" for line in lines))
    assert reply.answers == ({"clock_seconds": 1000.0}, {"a": 1})
    assert reply.noise == ("Welcome!", "bye")
    assert reply.clock is not None
    assert reply.clock.most_seconds < 1000 - time.time() + 60
    assert reply.clock.least_seconds <= reply.clock.most_seconds
    assert not reply.timed_out


def running() -> set[str]:
    """The commands of all processes."""
    return {" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])}


@pytest.mark.parametrize(
    "script",
    [
        "sleep 60",
        "while echo drop; do sleep 0.05; done",
        "setsid sleep 61 & sleep 60",
        "trap '' TERM; sleep 62 & sleep 60",
        "exec >&- 2>&-; sleep 60",
    ],
)
def test_one_that_never_ends_is_ended_with_its_children(script: str) -> None:
    reply, seconds = reply_to(script, timeout_seconds=0.5)
    assert seconds < 5
    assert reply.exit_code == -9
    assert reply.answers == ()
    jobs.wait_until(lambda: running().isdisjoint({"sleep 61", "sleep 62"}), 3, "the end of its children")


def test_one_that_never_stops_talking_is_cut_off() -> None:
    reply, seconds = reply_to("yes", timeout_seconds=20)
    assert seconds < 15
    assert len(reply.noise) <= 20


def test_a_program_that_is_not_there() -> None:
    reply = run_command(Command(("/nowhere/ssh",), {}), 1)
    assert reply.noise == ("/nowhere/ssh: No such file or directory",)
    assert reply.exit_code == 255


def test_no_question_is_ever_put_to_a_person(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pdsh").write_text("#!/bin/sh\n")
    (tmp_path / "pdsh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", "-p 2222")
    ssh = remote_command("worker-1", Launcher.OPENMPI, "/usr/bin/python3", {}, 60)
    assert ssh.arguments[0] == "ssh"
    assert "BatchMode=yes" in ssh.arguments
    assert ssh.arguments[-3:-1] == ("--", "worker-1")
    pdsh = remote_command("worker-1", Launcher.PDSH, "/usr/bin/python3", {}, 60)
    assert pdsh.arguments[0] == "pdsh"
    assert pdsh.environment["PDSH_RCMD_TYPE"] == "ssh"
    assert pdsh.environment["PDSH_SSH_ARGS_APPEND"].startswith("-p 2222 -o BatchMode=yes")
    # pdsh would replace %h, and one argument holds at most 128 KiB.
    assert "%" not in pdsh.arguments[-1]
    assert len(pdsh.arguments[-1]) < 2**15


def test_modules_that_lie_where_the_shell_begins_are_not_imported(tmp_path: Path) -> None:
    for name in ("json", "base64", "socket"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('mine')\n")
    request = {"action": "read", "checkpoint_dir": str(tmp_path), "run": "x", "num_read": 1}
    command = local_command(sys.executable, request)
    done = subprocess.run(
        command.arguments, cwd=tmp_path, env={**os.environ}, capture_output=True, text=True, check=True
    )
    answers = [json.loads(line[len(MARK) :]) for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert answers[1] == {"tokens": []}
