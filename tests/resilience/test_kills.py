"""Ranks are ended from outside wherever it hurts, and the next job ends as if nothing had happened.

A cross-section of what `make chaos` does in full; docs/chaos.csv has the rows that were recorded.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import killing
import pytest

CELLS = killing.cross_section(24)


# Two jobs at a time: while a launcher starts or ends, one alone leaves most of a small machine idle. No
# undisturbed run serves both.
HALVES = ((0, 1), (2, 3))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[killing.Cell, killing.Row]:
    """What came of each kill."""
    root = tmp_path_factory.mktemp("kills")

    def rows_of(stages: tuple[int, ...]) -> list[killing.Row]:
        return [
            row
            for num_ranks in (2, 3)
            for row in killing.Chain(root / f"stage{stages[0]}_{num_ranks}", num_ranks).run(
                [cell for cell in CELLS if cell.num_ranks == num_ranks and cell.stage in stages]
            )
        ]

    with ThreadPoolExecutor(len(HALVES)) as threads:
        return {row.cell: row for half in threads.map(rows_of, HALVES) for row in half}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_killed_run_ends_as_the_undisturbed_one(
    rows: dict[killing.Cell, killing.Row], cell: killing.Cell
) -> None:
    row = rows[cell]
    assert row.failures == [], row
    assert row.phase_seen
    if cell.way in ("SIGKILL", "SIGSEGV") and cell.moment != "write":
        # It died where it was seen: nothing of it has moved since.
        assert row.phase_seen.startswith(row.phase_left), row
    elif cell.way == "exit" and cell.moment != "write":
        # A thread of its own ends it as soon as that has a processor; the others may use theirs until then.
        seen, left = (int(re.findall(r"\+(\d+)", where)[0]) for where in (row.phase_seen, row.phase_left))
        assert seen <= left <= seen + 1, row


def test_the_cross_section_is_wide() -> None:
    assert len(set(CELLS)) == len(CELLS) >= 24
    for name, values in killing.FACTORS.items():
        assert {getattr(cell, name) for cell in CELLS} == set(values)
    pairs = killing.all_pairs()
    covered = set().union(*map(killing.pairs_of, CELLS))
    assert len(covered) > 0.9 * len(pairs), f"{len(covered)} of {len(pairs)} pairs"
