"""How many slots fit, what too few cost, and where they lie. Ranks are played: only their number counts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ds_toolkit.config.guard_settings import GuardSettings
from ds_toolkit.errors import ToolkitError
from ds_toolkit.guardian.arena import arena_root
from ds_toolkit.guardian.pieces import Coordinates, Sharding
from ds_toolkit.resilience import agreement, enlisting
from ds_toolkit.resilience.enlisting import Berth, arena_roots, choose_num_slots, free_bytes

GIGABYTE = 10**9


def choose(
    monkeypatch: pytest.MonkeyPatch, offers: list[tuple[int, int]], nodes: tuple[int, ...], stage: int = 2
) -> tuple[int, str | None]:
    """What rank 0 decides if each rank needs and has so many bytes."""
    monkeypatch.setattr(agreement, "gather", lambda _: offers)
    monkeypatch.setattr(agreement, "rank", lambda: 0)
    monkeypatch.setattr(enlisting, "free_bytes", lambda _: offers[0][1])
    sharding = Sharding(tuple(Coordinates(dp) for dp in range(len(offers))), stage)
    berth = Berth(nodes, is_first=True, keeps_model=False, shared_params=None)
    return choose_num_slots(sharding, berth, offers[0][0], Path("/memory"), 50)


@pytest.mark.parametrize(
    ("free", "stage", "num_slots", "told"),
    [
        (12, 2, 3, None),
        (6, 2, 3, None),
        (5, 2, 2, "while a periodic checkpoint is written"),
        (4, 2, 2, "2.0 GB a slot on this node, 4.0 GB free in /memory"),
        (3, 2, 1, "one slot only"),
        (8, 0, 4, None),
        (7, 0, 3, "one slot less"),
        (5, 0, 1, "one slot only"),
    ],
)
def test_as_many_slots_as_fit(
    monkeypatch: pytest.MonkeyPatch, free: int, stage: int, num_slots: int, told: str | None
) -> None:
    offers = [(GIGABYTE, free * GIGABYTE)] * 2
    found, loss = choose(monkeypatch, offers, (0, 0), stage)
    assert found == num_slots
    assert (loss is None) == (told is None)
    assert told is None or told in str(loss)
    assert loss is None or "(`save_every` is 50); a folder on a fast local disk as `arena`" in loss


def test_none_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ToolkitError, match="no room for a snapshot") as caught:
        choose(monkeypatch, [(GIGABYTE, GIGABYTE)] * 2, (0, 0))
    assert "2.0 GB a slot on this node, 1.0 GB free in /memory" in str(caught.value)
    assert "`snapshot_every` to 0" in str(caught.value)


def test_the_poorest_node_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    offers = [(GIGABYTE, 99 * GIGABYTE), (GIGABYTE, 99 * GIGABYTE), (GIGABYTE, 2 * GIGABYTE)]
    assert choose(monkeypatch, offers, (0, 0, 1))[0] == 2


def test_a_place_on_a_disk_is_not_limited_by_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enlisting, "free_memory_bytes", lambda: 1000)
    assert free_bytes(tmp_path / "not" / "there") > 10**6
    assert free_bytes(Path("/dev/shm")) == 900


def test_where_arenas_lie() -> None:
    assert arena_roots(GuardSettings()) == [arena_root()]
    assert arena_roots(GuardSettings(arena="memory")) == [arena_root()]
    own = Path("/fast/disk") / f"ds_toolkit-{os.getuid()}"
    assert arena_roots(GuardSettings(arena="/fast/disk")) == [own, arena_root()]
