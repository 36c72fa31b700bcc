"""Kills from outside, at a moment that is read from shared memory, and what the next job makes of it.

One job of a chain resumes what its predecessor was killed in, trains that to its end, and then begins the run
in which it will be killed itself: each kill costs one start. The undisturbed runs are trained first of all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jobs

from ds_toolkit.checkpoint.incident import incidents
from ds_toolkit.guardian.arena import Arena
from ds_toolkit.guardian.arenas import arenas_into
from ds_toolkit.guardian.control import ControlBlock, Phase
from ds_toolkit.guardian.processes import is_alive

WORKER = Path(__file__).parent / "resilience" / "kill_worker.py"
LAUNCHERS = {"torchrun": jobs.torchrun_command, "deepspeed": jobs.deepspeed_command}
STAGES = (0, 1, 2, 3)
PRECISIONS = ("fp32", "bf16")
VICTIMS = ("first", "last", "middle")
MOMENTS = ("data", "forward", "backward", "step", "copy", "write")
WAYS = ("SIGKILL", "SIGSEGV", "exception", "SIGTERM", "exit")
STEPS = 8
WIDTH = 2048
_SAVE_EVERY = 3
_NEVER = 1000
_PHASES = {"data": Phase.DATA, "forward": Phase.FORWARD, "backward": Phase.BACKWARD, "step": Phase.STEP}
_EXIT_SIGNAL, _RAISE_SIGNAL = signal.SIGRTMIN, signal.SIGRTMIN + 1
_START_SECONDS, _END_SECONDS = 120.0, 90.0


@dataclass(frozen=True)
class Order:
    """A run, as the worker trains it.

    Attributes:
        directory: of the checkpoints; None without a guard.
        stage: of ZeRO.
        precision: fp32 or bf16.
        accumulation: micro-steps of an optimizer step.
        steps: at which it ends.
        save_every: steps between periodic checkpoints.
        seed: of the weights that it begins with.
        in_a_block: whether the guard is used as a context manager.
        result: where losses and fingerprint go; `_rank<R>.json` is put behind it.
        width: of the model.
    """

    directory: str | None
    stage: int
    precision: str
    accumulation: int
    steps: int
    save_every: int
    seed: int
    in_a_block: bool
    result: str
    width: int = WIDTH


@dataclass(frozen=True)
class Cell:
    """One kill.

    Attributes:
        stage: of ZeRO.
        precision: fp32 or bf16.
        victim: `first`, `last` or `middle` rank, whose place is looked at also where all are told to end; of
            random kills also `guardian`, `launcher` and `both` (the guardian and the last rank).
        moment: where the victim is; `random` for any moment.
        way: how it ends.
        launcher: of the job that is killed.
        accumulation: micro-steps of an optimizer step.
        serial: number of a random kill; 0 for one of the matrix.
    """

    stage: int
    precision: str
    victim: str
    moment: str
    way: str
    launcher: str = "torchrun"
    accumulation: int = 2
    serial: int = 0

    def __str__(self) -> str:
        words = (f"stage{self.stage}", self.precision, self.victim, self.moment, self.way, self.launcher)
        return "-".join([*words, *([str(self.serial)] if self.serial else [])])

    @property
    def num_ranks(self) -> int:
        """Two, but a middle needs three."""
        return 3 if self.victim == "middle" else 2

    @property
    def rank(self) -> int:
        """The victim's rank."""
        return {"first": 0, "middle": 1}.get(self.victim, self.num_ranks - 1)

    @property
    def save_every(self) -> int:
        """Steps between periodic checkpoints; most cells have none: nothing but last words can serve."""
        return _SAVE_EVERY if self.moment in ("write", "random") else _NEVER

    @property
    def layout(self) -> tuple[int, str, int]:
        """What the undisturbed run depends on, but for the number of ranks."""
        return self.stage, self.precision, self.accumulation


@dataclass
class Row:
    """What came of a kill: a row of docs/chaos.csv.

    Attributes:
        cell: the kill.
        phase_seen: read from the victim's page while it was stopped, just before the kill; with the state of
            its slots or of the checkpoint where that was the moment.
        phase_left: what stood in its page when it was gone.
        last_step: the newest step that every rank had done when the kill was sent.
        committed_step: the newest periodic checkpoint at that moment; 0 if there was none.
        resumed_step: from which the new job went on.
        went_on: whether the job came to its end in spite of the kill, so that nothing had to be resumed.
        undisturbed_sha256: final weights of the run that nobody disturbed.
        resumed_sha256: final weights of the run that was killed and resumed.
        same_losses: whether all losses since the resume are those of the undisturbed run, bit for bit.
        outcome: what the guardian wrote down.
        failures: what is wrong; empty for a kill that was survived.
        seconds: from the kill until the guardian was gone.
    """

    cell: Cell
    phase_seen: str = ""
    phase_left: str = ""
    last_step: int = 0
    committed_step: int = 0
    resumed_step: int | None = None
    undisturbed_sha256: str = ""
    resumed_sha256: str = ""
    went_on: bool = False
    same_losses: bool = False
    outcome: str = ""
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def judge(self) -> None:
        """Say what is wrong with it."""
        cell = self.cell
        if self.resumed_step is None:
            self.failures.append("the new job did not come to its end")
            return
        at_least = self.last_step - (0 if cell.way in ("exception", "SIGTERM") else 1)
        if cell.victim == "both":
            # Nobody was there to speak last words: the newest periodic checkpoint serves.
            at_least = self.committed_step
        if cell.victim == "guardian" and not self.went_on:
            self.failures.append("training did not go on")
        if self.resumed_step < at_least and not self.went_on:
            self.failures.append(f"resumed from step {self.resumed_step}: {at_least} was to be had")
        if not self.same_losses:
            self.failures.append("the losses are not those of the undisturbed run")
        if self.resumed_sha256 != self.undisturbed_sha256:
            self.failures.append("the final weights are not those of the undisturbed run")


FACTORS = {
    "stage": STAGES,
    "precision": PRECISIONS,
    "victim": VICTIMS,
    "moment": MOMENTS,
    "way": WAYS,
    "launcher": tuple(LAUNCHERS),
}
Pair = tuple[tuple[str, object], tuple[str, object]]


def pairs_of(cell: Cell) -> set[Pair]:
    """Every two factors with the values that they have in a cell."""
    values = [(name, getattr(cell, name)) for name in FACTORS]
    return set(itertools.combinations(values, 2))


def all_pairs() -> set[Pair]:
    """Every two factors with every two values that they can have."""
    return {
        ((one, a), (other, b))
        for one, other in itertools.combinations(FACTORS, 2)
        for a, b in itertools.product(FACTORS[one], FACTORS[other])
    }


def cross_section(num_cells: int, seed: int = 0) -> list[Cell]:
    """Cells that have as many pairs among them as a greedy choice finds; the same ones for a seed.

    A third of the victims is in the middle, which takes three ranks; the others share jobs of two.
    """
    chooser = random.Random(seed)
    missing, cells = all_pairs(), []
    while len(cells) < num_cells:
        victims = ["middle"] if len(cells) % 3 == 2 else ["first", "last"]
        values = {**FACTORS, "victim": victims}
        candidates = [Cell(**{name: chooser.choice(values[name]) for name in FACTORS}) for _ in range(500)]
        best = max(candidates, key=lambda cell: len(pairs_of(cell) & missing))
        cells.append(best)
        missing -= pairs_of(best)
    return cells


class Watched:
    """A job that runs, seen through its arena."""

    def __init__(self, job: jobs.Job, arena: Arena, num_ranks: int) -> None:
        self.job, self.arena = job, arena
        self.pages: list[ControlBlock] = []
        deadline = time.monotonic() + _START_SECONDS
        while len(self.pages) < num_ranks and time.monotonic() < deadline:
            with contextlib.suppress(Exception):
                page = ControlBlock(arena.rank_folder(len(self.pages)), writable=False)
                self.pages.append(page)

    @property
    def last_step(self) -> int:
        """The newest step that every rank has done."""
        return min(page.step for page in self.pages)

    @property
    def committed_step(self) -> int:
        """The newest checkpoint on disk."""
        manifests = self.arena.job().directory.glob("*/manifest.json")
        return max((int(json.loads(path.read_text())["step"]) for path in manifests), default=0)

    def await_end(self, timeout_seconds: float) -> None:
        """Wait for the ranks, which may outlive their launcher."""
        for page in self.pages:
            process = page.process
            jobs.wait_until(lambda process=process: not is_alive(*process), timeout_seconds, "a rank's end")

    def place(self, rank: int) -> str:
        """Where a rank is, in words."""
        page = self.pages[rank]
        return f"{page.phase.name.lower()} of step {page.step}+{page.micro_step}"

    def odd_slots(self, rank: int) -> list[int]:
        """Steps that are being copied."""
        return [slot.step for slot in self.pages[rank].slots() if slot.sequence % 2]

    def written_tags(self) -> list[str]:
        """Periodic checkpoints that the guardian is writing: files of theirs are there, and slots kept."""
        if not any(slot.wanted for page in self.pages for slot in page.slots()):
            return []
        return [path.parent.name for path in self.arena.job().directory.glob(".*.partial/*.pt")]


def stop(pid: int) -> None:
    """SIGSTOP, and all threads have stopped when this returns."""
    os.kill(pid, signal.SIGSTOP)
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            while (task / "stat").read_text().rpartition(")")[2].split()[0] not in "TtZX":
                pass


def kill_at_the_moment(watched: Watched, cell: Cell, at_step: int) -> Row:
    """Wait until the victim is where it is to die, stop it there, look again, and end it.

    Raises:
        AssertionError: the job ended without having been there.
    """
    row = Row(cell)
    page = watched.pages[cell.rank]
    pid, _ = page.process
    if cell.moment == "random":
        chooser = random.Random(cell.serial)
        while page.step < at_step and watched.job.process.poll() is None:
            time.sleep(0.0002)
        time.sleep(chooser.random() * 0.25)
    while True:
        assert watched.job.process.poll() is None, "the job ended before it could be killed"
        assert page.step < STEPS, f"the moment {cell.moment} was not seen"
        if page.step < at_step or not _seen(watched, cell):
            # Enough for the other processes of a small machine, and less than the shortest moment.
            time.sleep(0.0002)
            continue
        stop(pid)
        seen = _seen(watched, cell)
        if seen:
            break
        os.kill(pid, signal.SIGCONT)
    row.phase_seen, row.last_step = f"{watched.place(cell.rank)}{seen}".strip(), watched.last_step
    row.committed_step = watched.committed_step
    _end(watched, cell, pid)
    return row


def _seen(watched: Watched, cell: Cell) -> str:
    """What tells that the moment is now; empty if it is not."""
    page = watched.pages[cell.rank]
    if cell.moment == "copy":
        steps = watched.odd_slots(cell.rank)
        return f", copying step {steps[0]}" if steps else ""
    if cell.moment == "write":
        tags = watched.written_tags()
        return f", the guardian writing {tags[0]}" if tags else ""
    return " " if cell.moment == "random" or page.phase is _PHASES[cell.moment] else ""


def _end(watched: Watched, cell: Cell, pid: int) -> None:
    if cell.victim in ("guardian", "both"):
        guardian = watched.arena.guardian()
        assert guardian is not None
        os.kill(guardian[0], signal.SIGKILL)
    if cell.victim == "launcher":
        watched.job.process.kill()
    elif cell.victim == "guardian":
        pass
    elif cell.way == "SIGTERM":
        ranks = [page.process[0] for page in watched.pages]
        for process in (*ranks, watched.job.process.pid):
            os.kill(process, signal.SIGTERM)
    else:
        ways = {"exception": _RAISE_SIGNAL, "exit": _EXIT_SIGNAL}
        os.kill(pid, ways[cell.way] if cell.way in ways else signal.Signals[cell.way])
    # Whatever was sent to a process that is stopped waits for this, but for SIGKILL.
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


class Chain:
    """Kills one after the other, with the same number of ranks."""

    def __init__(self, folder: Path, num_ranks: int, *, seed: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._num_ranks = folder, num_ranks
        self._random = random.Random(seed)
        self._undisturbed: dict[tuple[int, str, int], Path] = {}
        self._num_jobs = 0

    def run(self, cells: Sequence[Cell]) -> Iterator[Row]:
        """The row of each cell, when it is known."""
        waiting: tuple[Row, Order] | None = None
        new = [cell for cell in cells if cell.layout not in self._undisturbed]
        orders = [self._undisturbed_order(layout) for layout in dict.fromkeys(cell.layout for cell in new)]
        for cell in [*cells, None]:
            resuming, waiting = waiting, None
            first = None if cell is None else self._first_order(cell)
            launcher = cell.launcher if cell else (resuming[0].cell.launcher if resuming else "torchrun")
            if resuming and not resuming[0].went_on:
                orders.append(resuming[1])
            for attempt in (1, 2):
                try:
                    if orders or first:
                        waiting = self._run_job(launcher, [*orders, *([first] if first else [])], cell, first)
                    break
                except AssertionError as error:
                    # It was the resume that failed, which its row will say, or the moment was not met.
                    print(f"{cell}: {error}", flush=True)
                    orders = []
                    if attempt == 2 and cell is not None:
                        yield Row(cell, failures=[str(error)[-2000:]])
            orders = []
            if resuming:
                yield self._judged(*resuming)

    def _run_job(
        self, launcher: str, orders: list[Order], cell: Cell | None, first: Order | None
    ) -> tuple[Row, Order] | None:
        self._num_jobs += 1
        orders_file = self._folder / f"orders_{self._num_jobs}.json"
        orders_file.write_text(json.dumps([dataclasses.asdict(order) for order in orders]))
        command = LAUNCHERS[launcher](WORKER, orders_file, num_ranks=self._num_ranks)
        log = self._folder / f"job_{self._num_jobs}.log"
        with jobs.Job(command, log=log) as job:
            if cell is None or first is None:
                job.wait(_START_SECONDS + len(orders) * _END_SECONDS).check()
                return None
            assert first.directory is not None
            arena = await_arena(job, Path(first.directory), _START_SECONDS + len(orders) * 30)
            watched = Watched(job, arena, self._num_ranks)
            row = kill_at_the_moment(watched, cell, self._random.randint(2, STEPS - 3))
            killed = time.monotonic()
            job.wait(_END_SECONDS)
            watched.await_end(_END_SECONDS)
            row.went_on = all(_path(Path(first.result), rank).exists() for rank in range(self._num_ranks))
            if cell.victim != "both":
                await_gone(arena, _END_SECONDS)
            row.seconds = time.monotonic() - killed
            row.phase_left = watched.place(cell.rank)
        row.outcome = "; ".join(incident.outcome for incident in incidents(Path(first.directory)))
        if row.went_on:
            if cell.victim not in ("guardian", "launcher"):
                row.failures.append("the job took no notice of the kill")
            return row, first
        result = f"{first.result}_resumed"
        # Another seed: all that counts must come from the checkpoint. Where there may be none, it cannot.
        seed = 0 if cell.victim == "both" else 99
        return row, dataclasses.replace(first, seed=seed, result=result, save_every=_NEVER)

    def _judged(self, row: Row, order: Order) -> Row:
        with contextlib.suppress(OSError):
            resumed = self._results(Path(order.result))
            row.resumed_step = resumed[0]["resumed"] or 0
            row.resumed_sha256 = _sha256(resumed)
            undisturbed = self._results(self._undisturbed[row.cell.layout])
            row.undisturbed_sha256 = _sha256(undisturbed)
            num_losses = (STEPS - row.resumed_step) * row.cell.accumulation
            row.same_losses = all(
                one["losses"] == other["losses"][-num_losses:]
                for one, other in zip(resumed, undisturbed, strict=True)
            )
        row.judge()
        if not row.failures:
            assert order.directory is not None
            shutil.rmtree(order.directory)
        return row

    def _results(self, path: Path) -> list[Any]:
        return [json.loads(_path(path, rank).read_text()) for rank in range(self._num_ranks)]

    def _undisturbed_order(self, layout: tuple[int, str, int]) -> Order:
        stage, precision, accumulation = layout
        path = self._folder / f"undisturbed_stage{stage}_{precision}_{accumulation}"
        self._undisturbed[layout] = path
        return Order(None, stage, precision, accumulation, STEPS, _NEVER, 0, False, os.fspath(path))

    def _first_order(self, cell: Cell) -> Order:
        name = f"{self._num_jobs + 1:03d}_{cell}"
        return Order(
            directory=os.fspath(self._folder / name),
            stage=cell.stage,
            precision=cell.precision,
            accumulation=cell.accumulation,
            steps=STEPS,
            save_every=cell.save_every,
            seed=0,
            in_a_block=self._random.random() < 0.5,
            result=os.fspath(self._folder / f"{name}_result"),
        )


def _path(result: Path, rank: int) -> Path:
    return Path(f"{result}_rank{rank}.json")


def _sha256(results: list[Any]) -> str:
    """Over the final weights, moments and buffers of all ranks."""
    return hashlib.sha256("".join(result["fingerprint"] for result in results).encode()).hexdigest()


def await_arena(job: jobs.Job, directory: Path, timeout_seconds: float) -> Arena:
    """The arena of the job that saves into a directory, once its guardian serves it.

    Raises:
        AssertionError: the job has ended, or time is up.
    """
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        for arena in arenas_into(directory):
            if arena.has_guardian():
                return arena
        assert job.process.poll() is None, f"the job ended early:\n{job.output()[-5000:]}"
        time.sleep(0.005)
    raise AssertionError(f"no guardian within {timeout_seconds} s:\n{job.output()[-5000:]}")


def await_gone(arena: Arena, timeout_seconds: float) -> None:
    """Wait until nothing of an arena is left, its guardian included."""
    guardian = arena.guardian()
    jobs.wait_until(lambda: not arena.folder.exists(), timeout_seconds, f"the end of {arena.folder.name}")
    if guardian is not None:
        jobs.wait_until(lambda: not is_alive(*guardian), timeout_seconds, "the end of the guardian")
