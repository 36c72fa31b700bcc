"""A rank without torch: real process, page, slots and connection, and plain bytes in place of shards.

As a script it obeys one command a line (methods of `Rank`) and answers each with a line of JSON. As a module
it is the test's end of that: small jobs, and `FakeRank` to command such a process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ds_toolkit.checkpoint.manifest import RunShape
from ds_toolkit.guardian.arena import Arena, Job, SlotFile, write_contents
from ds_toolkit.guardian.client import GuardianClient, start_guardian
from ds_toolkit.guardian.control import ControlBlock, Leaving, Phase
from ds_toolkit.guardian.pieces import Coordinates, PieceKind, Sharding
from ds_toolkit.guardian.processes import is_alive
from ds_toolkit.guardian.stacks import offer_stacks

REPOSITORY = Path(__file__).resolve().parents[1]
SHARD_BYTES = 50_000


def job(directory: Path, job_id: str, *, nodes: tuple[int, ...] = (0, 0), **changes: Any) -> Job:
    """A data-parallel job; `stage`, `node`, `deadline_seconds`, `keep_last` by name."""
    stage = changes.pop("stage", 2)
    kinds = frozenset({PieceKind.MODEL, PieceKind.OPTIMIZER, PieceKind.RANK_STATE})
    if stage == 0:
        kinds -= {PieceKind.OPTIMIZER}
    values: dict[str, Any] = {
        "job_id": job_id,
        "directory": directory,
        "node": 0,
        "nodes": nodes,
        "sharding": Sharding(tuple(Coordinates(dp) for dp in range(len(nodes))), stage),
        "kinds": (kinds,) * len(nodes),
        "shape": RunShape(len(nodes), len(nodes), 1, stage, "fp32"),
        "versions": {"torch": "none"},
        "deadline_seconds": 20.0,
        "keep_last": 3,
    }
    return Job(**{**values, **changes})


def slot_files(sharding: Sharding, rank: int, kinds: frozenset[PieceKind]) -> list[SlotFile]:
    """DeepSpeed's names of what a rank of such a job has."""
    model = f"zero_pp_rank_{rank}_mp_rank_00" if sharding.stage == 3 else "mp_rank_00"
    names = {
        PieceKind.MODEL: f"{model}_model_states.pt",
        PieceKind.OPTIMIZER: f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        PieceKind.RANK_STATE: f"ds_toolkit_rank_{rank:05d}.pt",
    }
    return [SlotFile(names[kind], kind) for kind in sorted(kinds, key=lambda kind: kind.name)]


def content(name: str, step: int) -> bytes:
    """What stands in a file at a step, whichever rank wrote it."""
    line = f"{name} of step {step}\n".encode()
    return (line * (SHARD_BYTES // len(line) + 1))[:SHARD_BYTES]


class Rank:
    """The process: each method is a command."""

    def __init__(self, arena: Arena, rank: int, num_slots: int) -> None:
        self.arena, self.rank, self.job = arena, rank, arena.job()
        for index in range(num_slots):
            arena.slot_folder(rank, index).mkdir(parents=True)
        self.page = ControlBlock.create(arena.rank_folder(rank), rank, num_slots)
        self.client: GuardianClient | None = None

    def start(self) -> None:
        start_guardian(self.arena)

    def limit_file_sizes(self, max_bytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, max_bytes))

    def connect(self) -> None:
        self.client = GuardianClient(self.arena.socket_path)
        self.send("hello", rank=self.rank, pid=os.getpid())

    def send(self, event: str, **values: object) -> None:
        assert self.client is not None
        self.client.send({"event": event, **values})

    def phase(self, name: str, step: int, batches: int = 0) -> None:
        self.page.enter(Phase[name], step, batches, time.monotonic_ns())

    def offer_stacks(self) -> None:
        offer = offer_stacks()
        assert offer is not None
        self.page.stacks = offer

    def listen(self) -> None:
        self.listener = GuardianClient(self.arena.socket_path)
        self.listener.send({"event": "listen", "rank": self.rank})

    def hear_said(self, timeout_seconds: float) -> dict[str, Any] | None:
        return self.listener.receive(timeout_seconds)

    def stuck(self, seconds: float) -> None:
        # As in a collective: no bytecode of the main thread runs until then.
        lock = threading.Lock()
        lock.acquire()
        lock.acquire(timeout=seconds)

    def begin(self, step: int, wanted: str = "0") -> int:
        free = [slot for slot in self.page.slots() if not slot.wanted]
        index = min(free, key=lambda slot: (slot.sequence > 0, slot.step)).index
        self.page.begin_slot(index, step, self.job.kinds[self.rank], int(wanted, 16))
        return index

    def write(self, step: int, wanted: str = "0") -> None:
        index = self.begin(step, wanted)
        folder = self.arena.slot_folder(self.rank, index)
        files = slot_files(self.job.sharding, self.rank, self.job.kinds[self.rank])
        for file in files:
            (folder / file.name).write_bytes(content(file.name, step))
        write_contents(folder, files)
        self.page.end_slot(index)
        self.phase("DATA", step)

    def save(self, save_id: str, tag: str, step: int, protect: bool = False) -> None:
        self.send("save", save_id=save_id, tag=tag, step=step, protect=protect, micro_steps=0)

    def leave(self, why: str, detail: str = "") -> None:
        self.page.leaving = Leaving[why.upper()]
        self.send("leaving", why=why, detail=detail)

    def hear(self, timeout_seconds: float) -> dict[str, Any] | None:
        assert self.client is not None
        return self.client.receive(timeout_seconds)

    def goodbye(self) -> None:
        self.page.leaving = Leaving.GOODBYE
        self.send("goodbye")

    def fork(self, seconds: float) -> int:
        child = os.fork()
        if child == 0:
            time.sleep(seconds)
            os._exit(0)
        return child

    def disconnect(self) -> None:
        assert self.client is not None
        self.client.close()

    def look(self) -> dict[str, Any]:
        wanted = [slot.wanted for slot in self.page.slots()]
        return {"frozen": self.page.frozen, "wanted": wanted}


def main() -> None:
    rank = Rank(Arena(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]))
    print("null", flush=True)
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        try:
            answer = getattr(rank, command)(*arguments)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


class FakeRank:
    """The test's end: `rank.write(3)` is done by the process before the call returns."""

    def __init__(self, arena: Arena, rank: int, *, num_slots: int = 3) -> None:
        self.rank = rank
        self.process = subprocess.Popen(
            [sys.executable, "-S", __file__, arena.folder, str(rank), str(num_slots)],
            env={**os.environ, "PYTHONPATH": os.fspath(REPOSITORY)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._answer()

    def __getattr__(self, command: str) -> Callable[..., Any]:
        def obey(*arguments: object) -> Any:
            self.order(command, *arguments)
            return self._answer()

        return obey

    def order(self, command: str, *arguments: object) -> None:
        """Command without waiting for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, *arguments]) + "\n")
        self.process.stdin.flush()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"rank {self.rank} has ended"
        return json.loads(line)

    def kill(self) -> None:
        """SIGKILL, and gone when this returns."""
        self.process.kill()
        self.process.wait(timeout=10)
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()

    def end(self) -> None:
        """Come to the end of the program."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=10)

    def stop(self) -> None:
        """SIGSTOP."""
        os.kill(self.process.pid, signal.SIGSTOP)


class FakeJob:
    """Ranks of one node with their guardian; leaving the block leaves no process and no arena."""

    def __init__(self, of_job: Job, root: Path, *, start: bool = True, num_slots: int = 3) -> None:
        self.job = of_job
        self.arena = Arena.create(of_job, root)
        self.ranks = [FakeRank(self.arena, rank, num_slots=num_slots) for rank in of_job.local_ranks]
        if start:
            self.start()

    def start(self) -> None:
        """Start the guardian (`guardian`: its process id and start), and let all ranks say hello."""
        start_guardian(self.arena)
        for rank in self.ranks:
            assert rank.connect() is None
        signed = self.arena.guardian()
        assert signed is not None
        self.guardian = signed

    def write(self, step: int, wanted: str = "0") -> None:
        """All ranks fill a slot."""
        for rank in self.ranks:
            rank.write(step, wanted)

    def save(self, save_id: str, tag: str, step: int) -> None:
        """All ranks fill a slot and ask for it to be saved."""
        self.write(step, save_id)
        for rank in self.ranks:
            rank.save(save_id, tag, step)

    def hear(self, timeout_seconds: float = 15.0) -> list[dict[str, Any]]:
        """One event of each rank that lives; None where there is none."""
        return [rank.hear(timeout_seconds) for rank in self.ranks if rank.process.poll() is None]

    def stop_guardian(self) -> None:
        """SIGSTOP."""
        os.kill(self.guardian[0], signal.SIGSTOP)

    def continue_guardian(self) -> None:
        """SIGCONT."""
        os.kill(self.guardian[0], signal.SIGCONT)

    def __enter__(self) -> FakeJob:
        return self

    def __exit__(self, *_: object) -> None:
        guardian = self.arena.guardian()
        if guardian is not None and is_alive(*guardian):
            os.kill(guardian[0], signal.SIGKILL)
            await_end(*guardian)
        for rank in self.ranks:
            rank.kill()
        self.arena.remove()


def await_end(pid: int, ticks: int, timeout_seconds: float = 15.0) -> None:
    """Wait until a process that is no child of ours has ended."""
    for _ in _looks(timeout_seconds):
        if not is_alive(pid, ticks):
            return
    raise AssertionError(f"process {pid} is still there after {timeout_seconds} s")


def await_file(path: Path, timeout_seconds: float = 15.0) -> None:
    """Wait until there is something at a path."""
    for _ in _looks(timeout_seconds):
        if path.exists():
            return
    raise AssertionError(f"nothing at {path} after {timeout_seconds} s")


def await_gone(path: Path, timeout_seconds: float = 15.0) -> None:
    """Wait until there is nothing at a path."""
    for _ in _looks(timeout_seconds):
        if not path.exists():
            return
    raise AssertionError(f"{path} is still there after {timeout_seconds} s")


def make_older(arena: Arena, seconds: float) -> None:
    """As if the arena had been made so much earlier."""
    birth = arena.birth()
    dataclasses.replace(birth, monotonic_seconds=birth.monotonic_seconds - seconds).write(arena.folder)


@contextlib.contextmanager
def two_nodes(directory: Path, root: Path, **changes: Any) -> Iterator[tuple[FakeJob, FakeJob]]:
    """One job of two ranks on two nodes: two arenas under two roots, and one checkpoint directory."""
    of_nodes = [job(directory, "0000abcd", nodes=(0, 1), node=node, **changes) for node in (0, 1)]
    with FakeJob(of_nodes[0], root / "0") as first, FakeJob(of_nodes[1], root / "1") as second:
        yield first, second


def _looks(timeout_seconds: float) -> Iterator[None]:
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        yield
        time.sleep(0.01)


if __name__ == "__main__":
    main()
