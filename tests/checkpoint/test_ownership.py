"""One writer a directory, seen from two processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_toolkit.checkpoint.ownership import GUARDIAN_LOCK_NAME, LOCK_NAME, Ownership, wait_for_guardian
from ds_toolkit.errors import ToolkitError

HOLD = """
import sys, time
from pathlib import Path
from ds_toolkit.checkpoint.ownership import Ownership
ownership = Ownership.acquire(Path(sys.argv[1]))
{then}
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds `tmp_path` (and does something more, by parameter)."""
    then = getattr(request, "param", "")
    command = [sys.executable, "-c", HOLD.format(then=then), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_directory_that_is_held_is_refused_with_the_holder(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    with pytest.raises(ToolkitError, match="another run writes") as caught:
        Ownership.acquire(tmp_path, patience_seconds=0)
    assert f"process {holder.pid} on " in str(caught.value)


def test_a_holder_that_is_killed_holds_nothing(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    os.kill(holder.pid, signal.SIGKILL)
    Ownership.acquire(tmp_path, patience_seconds=10).release()
    assert not (tmp_path / LOCK_NAME).exists()


FORK_A_WORKER = "import os\nif os.fork() == 0:\n    time.sleep(8)\n    os._exit(0)\n"


@pytest.mark.parametrize("holder", [FORK_A_WORKER], indirect=True)
def test_a_forked_worker_does_not_inherit_it(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    """Data loading workers outlive a killed rank for a while."""
    os.kill(holder.pid, signal.SIGKILL)
    Ownership.acquire(tmp_path, patience_seconds=5).release()


AS_GUARDIAN = """
ownership.release()
ownership = Ownership.acquire(Path(sys.argv[1]), 0, ".ds_toolkit.guardian.lock")
"""


@pytest.mark.parametrize("holder", [AS_GUARDIAN], indirect=True, ids=["as guardian"])
def test_the_guardian_of_an_earlier_run_is_waited_for(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    run = Ownership.acquire(tmp_path, patience_seconds=0)
    with pytest.raises(ToolkitError, match="guardian of an earlier run") as caught:
        wait_for_guardian(tmp_path, patience_seconds=0.3)
    assert f"process {holder.pid} on " in str(caught.value)
    threading.Timer(0.5, holder.kill).start()
    wait_for_guardian(tmp_path, patience_seconds=10)
    assert not (tmp_path / GUARDIAN_LOCK_NAME).exists()
    run.release()


def test_twice_in_one_process(tmp_path: Path) -> None:
    first = Ownership.acquire(tmp_path)
    with pytest.raises(ToolkitError, match="this very process"):
        Ownership.acquire(tmp_path / "." / ".." / tmp_path.name)
    first.release()
    first.release()
    second = Ownership.acquire(tmp_path / "new" / "folder")
    assert (tmp_path / "new" / "folder" / LOCK_NAME).exists()
    second.release()


def test_where_there_are_no_locks_it_goes_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.lockf", no_locks)
    ownership = Ownership.acquire(tmp_path)
    with pytest.raises(ToolkitError, match="this very process"):
        Ownership.acquire(tmp_path)
    ownership.release()
