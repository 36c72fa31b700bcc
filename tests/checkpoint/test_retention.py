"""Which tags go after a commit."""

from __future__ import annotations

import dataclasses

import pytest

from ds_toolkit.checkpoint.manifest import WEIGHTS_ONLY, Manifest, RunShape
from ds_toolkit.checkpoint.retention import expired

SHAPE = RunShape(world_size=1, dp_world_size=1, mp_world_size=1, zero_stage=1, precision="fp32")


def manifest(step: int, *, tag: str | None = None, protected: bool = False, created_at: str = "") -> Manifest:
    return Manifest(tag or f"step{step}", step, "periodic", SHAPE, (), protected, created_at=created_at)


STEPS = [manifest(step) for step in (10, 9, 2, 20, 100)]


def test_the_newest_are_kept_by_number_and_not_by_name() -> None:
    assert expired(STEPS, keep_last=2, newest=manifest(100)) == ["step10", "step9", "step2"]
    assert expired(STEPS, keep_last=5, newest=manifest(100)) == []


def test_the_commit_just_made_is_never_deleted() -> None:
    assert "step2" not in expired(STEPS, keep_last=1, newest=manifest(2))
    tied = [manifest(5, tag="a", created_at="2030"), manifest(5, tag="b", created_at="2020")]
    # A clock that was set back.
    assert expired(tied, keep_last=1, newest=tied[1]) == ["a"]


def test_later_steps_are_left_alone_and_not_counted() -> None:
    assert expired(STEPS, keep_last=2, newest=manifest(10)) == ["step2"]


def test_protected_tags_are_left_alone_and_not_counted() -> None:
    tags = [manifest(1, protected=True), manifest(2), manifest(3), manifest(4)]
    assert expired(tags, keep_last=2, newest=manifest(4)) == ["step2"]
    assert expired(tags, keep_last=2, newest=manifest(4, protected=True)) == []


def test_broken_tags_are_left_alone_and_not_counted() -> None:
    assert expired(STEPS, keep_last=2, newest=manifest(20), broken=["step10"]) == ["step2"]


def test_weights_alone_do_not_take_the_place_of_a_checkpoint() -> None:
    weights = dataclasses.replace(manifest(30), kind=WEIGHTS_ONLY)
    assert expired([*STEPS, weights], keep_last=2, newest=manifest(100)) == ["step10", "step9", "step2"]


def test_of_equal_steps_the_older_goes() -> None:
    tied = [manifest(5, tag="old", created_at="2020"), manifest(5, tag="new", created_at="2021"), manifest(6)]
    assert expired(tied, keep_last=2, newest=manifest(6)) == ["old"]


def test_keeping_none_is_refused() -> None:
    with pytest.raises(ValueError, match="never deleted"):
        expired(STEPS, keep_last=0, newest=manifest(100))
    with pytest.raises(ValueError, match="counts steps"):
        expired(STEPS, keep_last=1, newest=manifest(100), keep_every=0)


def test_multiples_of_keep_every_are_left_alone_and_not_counted() -> None:
    steps = [manifest(step) for step in range(10, 80, 10)]
    assert expired(steps, keep_last=2, newest=manifest(70), keep_every=30) == ["step40", "step20", "step10"]
    # The newest is kept for its step, so two others are kept as the last.
    assert expired(steps, keep_last=2, newest=manifest(60), keep_every=30) == ["step20", "step10"]
    assert expired(steps, keep_last=1, newest=manifest(70), keep_every=1) == []
    assert expired(steps, keep_last=6, newest=manifest(70), keep_every=1000) == ["step10"]
