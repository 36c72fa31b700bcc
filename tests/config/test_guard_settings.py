from __future__ import annotations

import pytest
from pydantic import ValidationError

from ds_toolkit.config.guard_settings import GuardSettings, guard_settings, settings_problems
from ds_toolkit.errors import ToolkitError


def test_defaults() -> None:
    settings = guard_settings(None, None)
    assert settings == GuardSettings()
    assert (settings.save_every_seconds, settings.save_every_steps) == (600.0, None)
    assert (settings.keep_last, settings.on_save_failure, settings.verify_on_resume) == (3, "raise", "crc32")


def test_defaults_of_snapshots_and_of_last_words() -> None:
    settings = GuardSettings()
    assert (settings.snapshot_every, settings.overhead_budget, settings.takes_snapshots) == (1, 0.03, True)
    assert (settings.mttf, settings.mttf_seconds, settings.keep_every) == (None, None, None)
    assert (settings.on_hang, settings.hang_after, settings.hang_after_seconds) == ("report", "auto", None)
    assert (settings.deadline_seconds, settings.arena) == (25.0, "auto")


def test_what_is_automatic_has_no_number() -> None:
    settings = GuardSettings(save_every="auto", snapshot_every="auto", hang_after="auto")
    assert (settings.save_every_steps, settings.save_every_seconds) == (None, None)
    assert settings.hang_after_seconds is None
    assert settings.takes_snapshots


def test_what_is_given_has_one() -> None:
    settings = GuardSettings(mttf="8h", hang_after="10min", snapshot_every=0, arena="/dev/shm/ours")
    assert (settings.mttf_seconds, settings.hang_after_seconds) == (28_800.0, 600.0)
    assert (
        GuardSettings(hang_after=5).hang_after_seconds,
        GuardSettings(hang_after=0.5).hang_after_seconds,
    ) == (
        5.0,
        0.5,
    )
    assert not settings.takes_snapshots
    assert GuardSettings(arena="memory", overhead_budget=0.5, deadline_seconds=10).deadline_seconds == 10


def test_one_mistake_is_told_once() -> None:
    for wrong in ({"snapshot_every": "often"}, {"keep_every": -1}, {"mttf": "x"}, {"save_every": []}):
        assert len(settings_problems(wrong)) == 1


def test_an_interval_is_steps_or_time_and_never_both() -> None:
    assert GuardSettings(save_every=50).save_every_steps == 50
    assert GuardSettings(save_every=50).save_every_seconds is None
    assert GuardSettings(save_every="1.5h").save_every_seconds == 5400.0


def test_arguments_beat_settings_beat_the_section() -> None:
    section = {"save_every": 10, "keep_last": 10, "on_save_failure": "continue"}
    merged = guard_settings(section, {"save_every": 20, "keep_last": 20}, save_every=30, keep_last=None)
    assert (merged.save_every, merged.keep_last, merged.on_save_failure) == (30, 20, "continue")


def test_of_a_settings_object_only_what_was_set_counts() -> None:
    merged = guard_settings({"keep_last": 10, "save_every": 10}, GuardSettings(keep_last=3))
    assert (merged.keep_last, merged.save_every) == (3, 10)


@pytest.mark.parametrize(
    ("section", "key", "says"),
    [
        ({"save_evry": 50}, "save_evry", "did you mean `save_every`?"),
        ({"colour": 1}, "colour", "the settings are save_every"),
        ({"save_every": 0}, "save_every", "give 1 or more"),
        ({"save_every": True}, "save_every", "neither steps"),
        ({"save_every": 2.5}, "save_every", "neither steps"),
        ({"save_every": "50"}, "save_every", "not a duration"),
        ({"save_every": "0s"}, "save_every", "not a positive duration"),
        ({"save_every": None}, "save_every", "neither steps"),
        ({"keep_last": 0}, "keep_last", "greater than or equal to 1"),
        ({"keep_last": "3"}, "keep_last", "valid integer"),
        ({"on_save_failure": "ignore"}, "on_save_failure", "'raise' or 'continue'"),
        ({"save_every": "Auto"}, "save_every", "not a duration"),
        ({"snapshot_every": -1}, "snapshot_every", "0 for no snapshots"),
        ({"snapshot_every": True}, "snapshot_every", "neither a number of steps"),
        ({"snapshot_every": "1"}, "snapshot_every", "nor `auto`"),
        ({"snapshot_every": 1.0}, "snapshot_every", "nor `auto`"),
        ({"overhead_budget": 0}, "overhead_budget", "greater than 0"),
        ({"overhead_budget": 1}, "overhead_budget", "less than 1"),
        ({"overhead_budget": float("nan")}, "overhead_budget", "`overhead_budget`"),
        ({"overhead_budget": "3%"}, "overhead_budget", "valid number"),
        ({"mttf": "8"}, "mttf", "not a duration"),
        ({"mttf": "auto"}, "mttf", "not a duration"),
        ({"mttf": "0h"}, "mttf", "not a positive duration"),
        ({"mttf": 8}, "mttf", "valid string"),
        ({"on_hang": "kill"}, "on_hang", "'report' or 'last-words'"),
        ({"hang_after": "0s"}, "hang_after", "not a positive duration"),
        ({"hang_after": "soon"}, "hang_after", "write it as 90s"),
        ({"hang_after": None}, "hang_after", "neither seconds (300)"),
        ({"hang_after": True}, "hang_after", "neither seconds (300)"),
        ({"hang_after": 0}, "hang_after", "not a positive duration"),
        ({"hang_after": float("inf")}, "hang_after", "not a positive duration"),
        ({"deadline_seconds": 0}, "deadline_seconds", "greater than 0"),
        ({"deadline_seconds": float("inf")}, "deadline_seconds", "finite"),
        ({"keep_every": 0}, "keep_every", "greater than or equal to 1"),
        ({"keep_every": True}, "keep_every", "valid integer"),
        ({"arena": "snapshots"}, "arena", "nor an absolute path"),
        ({"arena": ""}, "arena", "nor an absolute path"),
        ([50], "section `ds_toolkit`", "must be an object"),
    ],
)
def test_a_bad_section_is_refused_by_the_name_of_the_key(section, key, says) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ToolkitError) as caught:
        guard_settings(section, None)
    assert key in str(caught.value.where)
    assert "section `ds_toolkit`" in str(caught.value.where)
    assert says in str(caught.value)


def test_a_bad_argument_is_refused_even_where_a_good_one_stands_elsewhere() -> None:
    with pytest.raises(ToolkitError, match="save_every") as caught:
        guard_settings({"save_every": 5}, None, save_every="5 parsecs")
    assert "arguments" in str(caught.value.where)
    with pytest.raises(ToolkitError) as caught:
        guard_settings({"save_every": -5}, None, save_every=5)
    assert "section" in str(caught.value.where)


def test_settings_are_frozen_and_described() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        GuardSettings().keep_last = 4  # type: ignore[misc]
    assert all(field.description for field in GuardSettings.model_fields.values())
