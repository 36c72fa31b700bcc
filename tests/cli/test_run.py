"""`ds-toolkit run`: what it passes on, waits for and starts again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jobs
import psutil
import pytest
from launched import DS_CONFIG, PLAIN_SCRIPT, rank_process, seen_by, torchrun_launch

from ds_toolkit.checkpoint.newest import survey
from ds_toolkit.checkpoint.ownership import GUARDIAN_LOCK_NAME

RUN = [sys.executable, "-m", "ds_toolkit", "run"]
TESTS = jobs.REPOSITORY / "tests"
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{jobs.REPOSITORY}{os.pathsep}{TESTS}"}

# Commits the next step of a directory and fails, until there are as many as it was told.
COMMITTING = """
import sys
from pathlib import Path
from ds_toolkit.checkpoint import commit
from ds_toolkit.checkpoint.manifest import RunShape
directory, last = Path(sys.argv[1]), int(sys.argv[2])
step = len(list(directory.glob("global_step*"))) + 1
if step > last:
    sys.exit(0)
partial = commit.PartialTag(directory, f"global_step{step}", commit.new_save_id())
commit.begin(partial)
(partial.folder / "mp_rank_00_model_states.pt").write_bytes(b"weights")
shape = RunShape(world_size=1, dp_world_size=1, mp_world_size=1, zero_stage=1, precision="fp32")
commit.seal(partial, 0, step, shape, ["mp_rank_00_model_states.pt"])
commit.commit(partial, kind="periodic")
sys.exit(1)
"""

# Says that it is ready, and what it is told.
LISTENING = """
import signal, sys, time
def told(number, frame):
    print("told", signal.Signals(number).name, flush=True)
    sys.exit(5)
signal.signal(signal.SIGTERM, told)
signal.signal(signal.SIGINT, told)
print("ready", flush=True)
time.sleep(60)
"""


def supervise(*command: str | os.PathLike[str], options: tuple[str, ...] = ()) -> tuple[dict[str, Any], str]:
    """What the summary says, and what stood on standard error."""
    finished = subprocess.run(
        [*RUN, "--json", *options, "--", *command],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    # Standard output is one document, whatever the job prints.
    summary: dict[str, Any] = json.loads(finished.stdout)
    assert summary["exit_code"] == finished.returncode
    return summary, finished.stderr


def told_by(summary: dict[str, Any], name: str) -> list[object]:
    return [attempt[name] for attempt in summary["attempts"]]


def test_a_job_that_ends_well_is_started_once() -> None:
    summary, said = supervise("sh", "-c", "echo from the job")
    assert summary["exit_code"] == 0
    assert summary["why"] == "it is done"
    assert told_by(summary, "restarted") == [False]
    assert "from the job" in said


def test_the_same_failure_twice_is_the_last() -> None:
    summary, said = supervise("sh", "-c", "exit 7")
    assert summary["exit_code"] == 7
    assert told_by(summary, "exit_code") == [7, 7]
    assert told_by(summary, "restarted") == [True, False]
    assert "twice in the same way before its first checkpoint" in summary["why"]
    assert "starting again in 1.0 s" in said


def test_a_job_that_fails_otherwise_each_time_uses_up_its_restarts(tmp_path: Path) -> None:
    counting = f"echo x >> {tmp_path}/count; exit $((10 + $(wc -l < {tmp_path}/count)))"
    summary, said = supervise("sh", "-c", counting, options=("--max-restarts", "1"))
    assert told_by(summary, "exit_code") == [11, 12]
    assert summary["exit_code"] == 12
    assert summary["why"] == "there are no restarts left of 1"
    assert "starting again in 1.0 s; 0 restarts left" in said


def test_checkpoints_are_a_reason_to_go_on(tmp_path: Path) -> None:
    summary, said = supervise(
        sys.executable, "-c", COMMITTING, tmp_path, "2", options=("--checkpoint-dir", str(tmp_path))
    )
    assert summary["exit_code"] == 0
    assert told_by(summary, "exit_code") == [1, 1, 0]
    assert told_by(summary, "step") == [1, 2, 2]
    assert said.count("starting again in 1.0 s") == 2, said


def test_a_death_is_over_when_its_guardian_has_ended(tmp_path: Path) -> None:
    command = [sys.executable, TESTS / "fake_job.py", tmp_path, "4"]
    summary, said = supervise(*command, options=("--max-restarts", "0"))
    # Where it writes was seen from outside.
    assert told_by(summary, "exit_code") == [137]
    assert told_by(summary, "step") == [4]
    assert told_by(summary, "failed_at_step") == [4]
    assert "waiting for the guardian" in said
    assert [candidate.step for candidate in survey(tmp_path)[0]] == [4]
    assert not (tmp_path / GUARDIAN_LOCK_NAME).exists()


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_who_tells_it_to_end_tells_the_job(number: signal.Signals, exit_code: int) -> None:
    # The shell does not pass it on, as DeepSpeed's launcher does not, and ends with a code of its own.
    command = ["sh", "-c", f"trap : TERM INT; {sys.executable} -c '{LISTENING}'; exit 9"]
    with subprocess.Popen(
        [*RUN, "--", *command], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == f"told {number.name}\n"
        assert process.wait(20) == exit_code


def test_told_to_end_between_two_attempts(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*RUN, "--", "sh", "-c", f"echo x >> {tmp_path}/count; exit 4"],
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert any("starting again" in line for line in process.stderr)
        process.send_signal(signal.SIGTERM)
        said = process.stderr.read()
    assert "told to end by SIGTERM" in said
    assert "attempt 2" not in said
    assert process.returncode == 143
    assert (tmp_path / "count").read_text() == "x\n"


def test_nothing_of_the_job_stays(tmp_path: Path) -> None:
    """A process in a session of its own, whose launcher has ended, as a rank whose launcher was killed."""
    leaving = f"setsid sleep 300 & echo $! > {tmp_path}/pid; exit 3"
    summary, said = supervise("sh", "-c", leaving, options=("--max-restarts", "0"))
    assert summary["exit_code"] == 3
    assert "processes that the command had left behind, and that were ended: 1" in said
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_as_process_1_of_a_container(tmp_path: Path) -> None:
    """It hears SIGTERM, which a process 1 without a handler does not, and reaps what is not its own."""
    script = (
        f"sh -c 'sleep 0.1 &'; sleep 1; ps -o stat= -A > {tmp_path}/states; touch {tmp_path}/looked; sleep 60"
    )
    command = ["unshare", "--fork", "--pid", "--mount-proc", *RUN, "--", "sh", "-c", script]
    with subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL) as process:
        jobs.wait_until((tmp_path / "looked").exists, 30, "a look at the processes")
        (first,) = psutil.Process(process.pid).children()
        first.send_signal(signal.SIGTERM)
        assert process.wait(20) == 143
    assert "Z" not in (tmp_path / "states").read_text()


def test_a_command_that_is_not_there() -> None:
    finished = subprocess.run(
        [*RUN, "--", "no-such-launcher"], env=ENVIRONMENT, capture_output=True, text=True
    )
    assert finished.returncode == 2
    assert "the command cannot be started" in finished.stderr
    assert "no-such-launcher" in finished.stderr


def test_a_killed_rank_is_no_end(tmp_path: Path) -> None:
    """The whole of it: an unmodified script, a rank killed from outside, and nobody who does anything."""
    config, directory = tmp_path / "ds_config.json", tmp_path / "ckpt"
    config.write_text(json.dumps(DS_CONFIG))
    script = ["--deepspeed_config", config, "--steps", "40", "--step-seconds", "0.05", "--end", "destroy"]
    command = torchrun_launch("--checkpoint-dir", directory, PLAIN_SCRIPT, *script)
    with jobs.Job([*RUN, "--", *command], environment=ENVIRONMENT) as job:
        jobs.wait_until((directory / "global_step4").exists, 60, "a checkpoint")
        os.kill(rank_process(job.process.pid, rank=1), signal.SIGKILL)
        finished = job.wait(90).check()
    (seen,) = seen_by(finished)
    assert 4 <= seen["first"] < 40
    assert seen["last"] == 40
    assert survey(directory)[0][0].step == 40
    assert "attempt 1 ended with exit code 1" in finished.output
    assert f"newest checkpoint: step {seen['first']}" in finished.output
    assert "attempt 2 ended with exit code 0" in finished.output
