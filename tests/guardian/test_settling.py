"""When slots may be taken to change no more, seen on pages that a test moves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import fake_rank
import pytest

from ds_toolkit.guardian.arena import Arena
from ds_toolkit.guardian.control import Leaving
from ds_toolkit.guardian.ranks import LocalRank
from ds_toolkit.guardian.settling import settle


@pytest.fixture
def pair(tmp_path: Path, root: Path) -> list[tuple[fake_rank.Rank, LocalRank]]:
    """Two ranks, each with what a guardian knows of it."""
    arena = Arena.create(fake_rank.job(tmp_path, "0000abcd"), root)
    ranks = [(fake_rank.Rank(arena, number, 2), LocalRank(number, arena)) for number in (0, 1)]
    for rank, known in ranks:
        known.meet()
        rank.write(1)
    return ranks


def seconds(ranks: list[tuple[fake_rank.Rank, LocalRank]], **keywords: object) -> float:
    begun = time.monotonic()
    settle([known for _, known in ranks], **{"at_most_seconds": 2.0, **keywords})  # type: ignore[arg-type]
    assert all(rank.page.frozen for rank, _ in ranks)
    return time.monotonic() - begun


def test_the_dead_are_not_waited_for(pair: list[tuple[fake_rank.Rank, LocalRank]]) -> None:
    for rank, known in pair:
        rank.begin(2)
        known.ended()
    assert seconds(pair) < 0.25


def test_those_that_have_stopped_are_not_waited_for(pair: list[tuple[fake_rank.Rank, LocalRank]]) -> None:
    pair[0][0].phase("PARKED", 1)
    pair[1][0].page.leaving = Leaving.SIGNAL
    assert seconds(pair) < 0.28


def test_those_that_are_blocked_are_seen_not_to_move(pair: list[tuple[fake_rank.Rank, LocalRank]]) -> None:
    assert 0.3 < seconds(pair) < 1.5


def moving(rank: fake_rank.Rank, done: threading.Event) -> Callable[[], None]:
    def move() -> None:
        step = 1
        while not done.wait(0.05):
            step += 1
            rank.phase("FORWARD", step)

    return move


def test_one_that_goes_on_is_frozen_in_the_end(pair: list[tuple[fake_rank.Rank, LocalRank]]) -> None:
    done = threading.Event()
    mover = threading.Thread(target=moving(pair[0][0], done))
    mover.start()
    waited = seconds(pair, at_most_seconds=1.0)
    done.set()
    mover.join()
    assert 0.9 < waited < 1.9


def test_a_slot_that_is_written_is_waited_for(pair: list[tuple[fake_rank.Rank, LocalRank]]) -> None:
    index = pair[0][0].begin(2)
    for rank, _ in pair:
        rank.phase("PARKED", 2)
    threading.Timer(0.7, pair[0][0].page.end_slot, [index]).start()
    assert 0.6 < seconds(pair) < 1.9
    assert pair[0][1].slots()[index].is_whole


def test_ranks_that_come_to_their_end_are_waited_for(pair: list[tuple[fake_rank.Rank, LocalRank]]) -> None:
    pair[0][0].page.leaving = Leaving.END
    assert seconds(pair, at_most_seconds=1.0, all_leave=lambda: True) > 0.9
