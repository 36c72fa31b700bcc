"""Start a training run and kill it, again and again, and count what is left (`make cycles CYCLES=200`).

    cycles.py [--cycles 200] [--minutes M] [--table docs/cycles.csv]

Real engines and guardians, one rank. All happens in a mount namespace with a /dev/shm and a TMPDIR of its
own: whatever is there, or runs there, between two cycles was left by one. A row of the table is one call
of this script. Exits with 1 if anything was left or a run was lost.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import getpass
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import jobs
import torch

from ds_toolkit.checkpoint.newest import survey
from ds_toolkit.checkpoint.ownership import GUARDIAN_LOCK_NAME, LOCK_NAME
from ds_toolkit.checkpoint.sweeping import sweep
from ds_toolkit.checkpoint.verify import verify_crcs
from ds_toolkit.errors import ToolkitError
from ds_toolkit.guardian.arena import Arena
from ds_toolkit.guardian.arenas import arenas, sweep_arenas
from ds_toolkit.guardian.control import ControlBlock
from ds_toolkit.guardian.processes import is_alive, start_ticks

TABLE = jobs.REPOSITORY / "docs" / "cycles.csv"
WORKER = Path(__file__).parent / "resilience" / "cycle_worker.py"
WAYS = ("SIGKILL", "SIGTERM", "SIGSEGV", "guardian and rank", "guardian, then rank")
_START_SECONDS, _END_SECONDS = 120.0, 60.0
_LEAKS = ("processes", "segments", "sockets", "descriptors", "files")


class Nursery:
    """Where ranks come from: a process that has imported all they need. Leaving the block ends it.

    Attributes:
        pid: its process id.
    """

    def __init__(self, folder: Path) -> None:
        temporary = folder / "tmp"
        temporary.mkdir()
        with (folder / "nursery.log").open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, WORKER],
                env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.pid = self._process.pid

    def ask(self, order: dict[str, object]) -> str:
        """Order a rank; its process id."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> str:
        """What is a number: DeepSpeed prints a line of its own when it is imported."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip().lstrip("-").isdecimal():
                return line
        raise AssertionError("the process that ranks are forked from has ended")

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate(timeout=10)


class Cycles:
    """Runs in one directory, one after the other.

    Attributes:
        left: how often something was left behind, by what it was.
        lost: runs that did not go on from where they could have.
        num_done: cycles so far.
    """

    def __init__(self, folder: Path, nursery: Nursery) -> None:
        self._nursery = nursery
        self._directory, self._temporary, self._log = folder / "ckpt", folder / "tmp", folder / "worker.log"
        self._at_least = 0
        self._num_descriptors = _num_descriptors()
        self.left: Counter[str] = Counter()
        self.lost: list[str] = []
        self.num_done = 0

    def run(self, way: str) -> None:
        """One start and one death."""
        self._log.write_text("")
        order = {
            "directory": os.fspath(self._directory),
            "port": jobs.free_port(),
            "log": os.fspath(self._log),
        }
        pid = int(self._nursery.ask(order))
        arena, page = self._begun(pid)
        resumed = self._resumed()
        if resumed < self._at_least:
            self.lost.append(f"cycle {self.num_done}: from {resumed}, {self._at_least} was to be had")
        goal = resumed + random.Random(self.num_done).randint(3, 9)
        jobs.wait_until(lambda: page.step >= goal or not is_alive(*page.process), _START_SECONDS, "steps")
        assert is_alive(*page.process), self._log.read_text()[-3000:]
        both = self._kill(way, arena, page)
        assert int(self._nursery.answer()) != 0
        # With both dead, the slots wait for the next run, which makes a checkpoint of them.
        self._at_least = page.step - 1
        page.close()
        if not both:
            jobs.wait_until(lambda: not arena.folder.exists(), _END_SECONDS, "the end of the guardian")
        self._look(may_keep_arena=both, may_keep_partial=way.startswith("guardian"))
        self.num_done += 1

    def end(self) -> None:
        """Tidy as the next run would, and look once more."""
        sweep(self._directory)
        sweep_arenas(self._directory)
        self._look(may_keep_arena=False, may_keep_partial=False)

    def _resumed(self) -> int:
        lines = self._log.read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("RESUMED")))

    def _begun(self, pid: int) -> tuple[Arena, ControlBlock]:
        found: list[tuple[Arena, ControlBlock]] = []

        def look() -> bool:
            assert start_ticks(pid) is not None, f"it has ended\n{self._log.read_text()[-3000:]}"
            for arena in arenas():
                with contextlib.suppress(ToolkitError):
                    page = ControlBlock(arena.rank_folder(0), writable=False)
                    if arena.has_guardian() and page.process[0] == pid:
                        found.append((arena, page))
                        return True
                    page.close()
            return False

        jobs.wait_until(look, _START_SECONDS, "the guardian")
        return found[0]

    def _kill(self, way: str, arena: Arena, page: ControlBlock) -> bool:
        """End the rank; whether its guardian was ended so soon before that nobody speaks last words."""
        pid = page.process[0]
        if way == "guardian and rank":
            os.kill(pid, signal.SIGSTOP)
        if way.startswith("guardian"):
            guardian = arena.guardian()
            assert guardian is not None
            os.kill(guardian[0], signal.SIGKILL)
        if way == "guardian, then rank":
            # Another one is started by then.
            jobs.wait_until(
                lambda: arena.guardian() != guardian and arena.has_guardian(), 30, "a new guardian"
            )
        os.kill(pid, signal.Signals[way] if way in signal.Signals.__members__ else signal.SIGKILL)
        return way == "guardian and rank"

    def _look(self, *, may_keep_arena: bool, may_keep_partial: bool) -> None:
        deadline = time.monotonic() + 5
        while (found := self._found(may_keep_arena, may_keep_partial)) and time.monotonic() < deadline:
            time.sleep(0.05)
        for what, which in found.items():
            print(f"cycle {self.num_done}: {what} left: {which}", flush=True)
        self.left.update(found.keys())

    def _found(self, may_keep_arena: bool, may_keep_partial: bool) -> dict[str, object]:
        folders = [arena.folder.name for arena in arenas()]
        shared = [path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith("ds_toolkit-")]
        sockets = [
            line for line in Path("/proc/net/unix").read_text().splitlines() if "guardian.sock" in line
        ]
        ours = [line for line in sockets if any(name in line for name in folders)]
        hidden = {path.name for path in self._directory.glob(".*")} - {LOCK_NAME, GUARDIAN_LOCK_NAME}
        if may_keep_partial:
            # The next run removes what a guardian was writing, or deleting, when it was killed.
            hidden = {name for name in hidden if not name.endswith((".partial", ".deleted"))}
        # A cache of torch's own, made once.
        files = [
            *hidden,
            *{path.name for path in self._temporary.iterdir()} - {f"torchinductor_{getpass.getuser()}"},
        ]
        whole = [tag for tag in survey(self._directory)[0] if tag.manifest]
        files += [tag.tag for tag in whole if tag.manifest and verify_crcs(tag.folder, tag.manifest.files)]
        files += [tag.tag for tag in whole[4:]]
        found = {
            "processes": _others_in_this_namespace() - {self._nursery.pid},
            "segments": shared + folders[int(may_keep_arena) :],
            "sockets": ours,
            "descriptors": _num_descriptors() - self._num_descriptors,
            "files": files,
        }
        return {what: which for what, which in found.items() if which}


def _num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _others_in_this_namespace() -> set[int]:
    own = Path("/proc/self/ns/mnt").readlink()
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (path / "ns" / "mnt").readlink() == own and int(path.name) not in (os.getpid(), os.getppid()):
                found.add(int(path.name))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no cycle after these")
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--apart", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.apart:
        mounts = "mount -t tmpfs tmpfs /dev/shm"
        command = [sys.executable, Path(__file__).resolve(), "--apart", *sys.argv[1:]]
        return subprocess.run(
            ["unshare", "--mount", "sh", "-c", f'{mounts} && exec "$@"', "sh", *command], check=False
        ).returncode
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cycles-") as folder, Nursery(Path(folder)) as nursery:
        cycles = Cycles(Path(folder), nursery)
        for way in itertools.islice(itertools.cycle(WAYS), arguments.cycles):
            if time.monotonic() - begun > arguments.minutes * 60:
                break
            cycles.run(way)
            print(f"{cycles.num_done} of {arguments.cycles}: {way}", flush=True)
        cycles.end()
    _record(arguments.table, cycles, time.monotonic() - begun)
    return int(bool(cycles.left or cycles.lost))


def _record(table: Path, cycles: Cycles, seconds: float) -> None:
    row: dict[str, object] = {
        "cycles": cycles.num_done,
        "seconds": f"{seconds:.0f}",
        "torch": torch.__version__,
        **{f"{what}_left": cycles.left[what] for what in _LEAKS},
        "runs_lost": len(cycles.lost),
    }
    print(row, *cycles.lost, sep="\n")
    is_new = not table.exists()
    with table.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)


if __name__ == "__main__":
    sys.exit(main())
