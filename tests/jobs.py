"""Processes for the tests: launched as people launch them, ended for certain."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Finished:
    """How a job ended: its exit code (negative for a signal) and all it printed."""

    exit_code: int
    output: str

    def check(self) -> Finished:
        """Fail the test with the job's output unless it ended with 0."""
        assert self.exit_code == 0, f"exit code {self.exit_code}\n{self.output[-6000:]}"
        return self


class Job:
    """A process and its descendants; leaving the block ends them all.

    What it prints goes to a pipe that `wait` reads, or to the file `log` if it is watched for a while.
    """

    def __init__(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        log: Path | None = None,
    ) -> None:
        self._log = log
        with contextlib.ExitStack() as opened:
            self.process = subprocess.Popen(
                [os.fspath(part) for part in command],
                env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **(environment or {})},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=opened.enter_context(log.open("wb")) if log else subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill_all()
        self.process.wait(timeout=10)
        if self.process.stdout:
            self.process.stdout.close()

    def wait(self, timeout_seconds: float) -> Finished:
        """Wait for the end; a job that takes longer is killed and fails the test with what it printed."""
        try:
            output, _ = self.process.communicate(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            self._kill_all()
            output, _ = self.process.communicate()
            output = self.output() if self._log else output
            raise AssertionError(f"no end within {timeout_seconds} s\n{output[-6000:]}") from None
        return Finished(self.process.returncode, self.output() if self._log else output)

    def output(self) -> str:
        """What it has printed to its log so far."""
        return self._log.read_text(errors="replace") if self._log else ""

    def _kill_all(self) -> None:
        # torchrun gives each rank a session of its own: a process group would not hold them all.
        with contextlib.suppress(psutil.NoSuchProcess):
            family = [self.process, *psutil.Process(self.process.pid).children(recursive=True)]
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


def run(
    command: Sequence[str | os.PathLike[str]],
    *,
    timeout_seconds: float = 150,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Finished:
    """Run a command to its end."""
    with Job(command, environment=environment, cwd=cwd) as job:
        return job.wait(timeout_seconds)


def torchrun_command(
    script: Path, *arguments: str | os.PathLike[str], num_ranks: int = 2
) -> list[str | os.PathLike[str]]:
    """Under torchrun, with a free port."""
    launcher = [BIN / "torchrun", "--standalone", f"--nproc_per_node={num_ranks}"]
    return [*launcher, script, *arguments]


def deepspeed_command(
    script: Path, *arguments: str | os.PathLike[str], num_ranks: int = 2
) -> list[str | os.PathLike[str]]:
    """Under DeepSpeed's own launcher, with a free port."""
    launcher = [BIN / "deepspeed", f"--num_gpus={num_ranks}", f"--master_port={free_port()}"]
    return [*launcher, script, *arguments]


def free_port() -> int:
    """A TCP port nobody listens on."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until(condition: object, timeout_seconds: float, what: str) -> None:
    """Poll a callable every 2 ms until it is true."""
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return
        time.sleep(0.002)
    raise AssertionError(f"{what}: not within {timeout_seconds} s")
