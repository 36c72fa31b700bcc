"""Kill jobs in every way and at every moment, and write down what came of it (`make chaos SHARD=k/n`).

    chaos.py [--shard K/N] [--random-kills 300] [--minutes M] [--rows docs/chaos.csv]

A row that is there and says nothing of a failure is not made again, so that a run may be ended and continued,
and parts of it may run on several machines. Exits with 1 if a kill was not survived.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jobs
import killing
from killing import Cell, Chain, Row

from ds_toolkit.errors import ToolkitError
from ds_toolkit.guardian.arenas import arenas

ROWS = jobs.REPOSITORY / "docs" / "chaos.csv"
_CELL = [field.name for field in dataclasses.fields(Cell)]
_ROW = [field.name for field in dataclasses.fields(Row) if field.name != "cell"]
_CELLS_OF_A_CHAIN = 6
_NUM_COVERING = 60


def matrix() -> list[Cell]:
    """Every cell; those that cover the pairs of factors come first."""
    first = killing.cross_section(_NUM_COVERING)
    values = [killing.FACTORS[name] for name in ("stage", "precision", "victim", "moment", "way")]
    launchers = itertools.cycle(killing.FACTORS["launcher"])
    rest = [Cell(*cell, launcher=next(launchers)) for cell in itertools.product(*values)]
    random.Random(0).shuffle(rest)
    known = {dataclasses.replace(cell, launcher="") for cell in first}
    return list(dict.fromkeys(first)) + [
        cell for cell in rest if dataclasses.replace(cell, launcher="") not in known
    ]


def random_cell(serial: int) -> Cell:
    """A kill of anything at any moment; the same one for a number."""
    chooser = random.Random(serial)
    victim = chooser.choice(["first", "last", "first", "last", "guardian", "launcher", "both"])
    is_rank = victim in ("first", "last")
    return Cell(
        stage=chooser.choice(killing.STAGES),
        precision=chooser.choice(killing.PRECISIONS),
        victim=victim,
        moment="random",
        way=chooser.choice(killing.WAYS) if is_rank else "SIGKILL",
        launcher=chooser.choice(list(killing.LAUNCHERS)),
        accumulation=chooser.choice([1, 4]),
        serial=serial,
    )


class Table:
    """The rows on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows: dict[tuple[str, ...], dict[str, str]] = {}
        if path.exists():
            with path.open(newline="") as file:
                for row in csv.DictReader(file):
                    self.rows[tuple(row[name] for name in _CELL)] = row

    def survived(self, cell: Cell) -> bool:
        """Whether there is a row of it that has no failures."""
        row = self.rows.get(_key(cell))
        return row is not None and not row["failures"]

    def append(self, row: Row) -> None:
        """At once, so that nothing is lost when the run is ended."""
        values = {name: str(getattr(row, name)) for name in _ROW}
        values["failures"] = "; ".join(" ".join(why.split()) for why in row.failures)[:500]
        values["seconds"] = f"{row.seconds:.1f}"
        line = {**dict(zip(_CELL, _key(row.cell), strict=True)), **values}
        is_new = not self._path.exists()
        with self._path.open("a", newline="") as file:
            writer = csv.DictWriter(file, _CELL + _ROW, lineterminator="\n")
            if is_new:
                writer.writeheader()
            writer.writerow(line)
        self.rows[_key(row.cell)] = line

    def summary(self) -> str:
        """What is covered and what is not."""
        cells = matrix()
        done = [cell for cell in cells if self.survived(cell)]
        missing = killing.all_pairs() - set().union(*map(killing.pairs_of, done))
        is_random = [row for row in self.rows.values() if row["serial"] != "0"]
        failed = [row for row in self.rows.values() if row["failures"]]
        lines = [
            f"matrix: {len(done)} of {len(cells)} cells survived",
            f"pairs of factors: {len(missing)} of {len(killing.all_pairs())} are not covered",
            *(f"  {one[0]} {one[1]}, {other[0]} {other[1]}" for one, other in sorted(missing, key=str)[:20]),
            f"random kills: {len([row for row in is_random if not row['failures']])} survived",
            f"failed: {len(failed)}",
            *(f"  {', '.join(row[name] for name in _CELL)}: {row['failures']}" for row in failed),
        ]
        return "\n".join(lines)


def _key(cell: Cell) -> tuple[str, ...]:
    return tuple(str(getattr(cell, name)) for name in _CELL)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shard", default="1/1", help="which part of how many")
    parser.add_argument("--random-kills", type=int, default=300, help="of all parts together")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing new after these")
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--summary", action="store_true", help="run nothing, say what is covered")
    arguments = parser.parse_args()
    shard, num_shards = map(int, arguments.shard.split("/"))
    if not 1 <= shard <= num_shards:
        parser.error(f"--shard {arguments.shard}: there is no such part")
    table = Table(arguments.rows)
    if not arguments.summary:
        cells = matrix()[shard - 1 :: num_shards]
        kills = [random_cell(serial) for serial in range(shard, arguments.random_kills + 1, num_shards)]
        # A run that is ended early has some of both; what covers no new pair comes last.
        covering = set(matrix()[:_NUM_COVERING])
        first, rest = ([cell for cell in cells if (cell in covering) == early] for early in (True, False))
        mixed = [cell for pair in itertools.zip_longest(first, kills) for cell in pair if cell is not None]
        todo = [cell for cell in [*mixed, *rest] if not table.survived(cell)]
        end = time.monotonic() + arguments.minutes * 60
        with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
            for number, row in enumerate(_rows(Path(folder), todo, end), 1):
                table.append(row)
                verdict = "; ".join(row.failures) or (
                    "went on" if row.went_on else f"from {row.resumed_step}"
                )
                print(f"{number} of {len(todo)}: {row.cell}: {row.phase_seen}: {verdict}", flush=True)
            _free_memory(Path(folder))
    print(table.summary())
    return int(any(row["failures"] for row in table.rows.values()))


def _free_memory(folder: Path) -> None:
    """Where a job and its guardian were killed, the slots wait for a next run, and here is none."""
    for arena in arenas():
        with contextlib.suppress(ToolkitError):
            if arena.job().directory.is_relative_to(folder) and arena.is_dead():
                arena.remove()


def _rows(folder: Path, todo: list[Cell], end: float) -> Iterator[Row]:
    chains = {num_ranks: Chain(folder / str(num_ranks), num_ranks) for num_ranks in (2, 3)}
    for num_ranks in itertools.cycle(chains):
        of_these = [cell for cell in todo if cell.num_ranks == num_ranks]
        batch = of_these[: _CELLS_OF_A_CHAIN * (2 if num_ranks == 2 else 1)]
        todo = [cell for cell in todo if cell not in batch]
        if not todo and not batch:
            return
        if batch:
            if time.monotonic() > end:
                return
            yield from chains[num_ranks].run(batch)


if __name__ == "__main__":
    sys.exit(main())
