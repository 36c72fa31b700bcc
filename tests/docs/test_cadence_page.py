"""What docs/cadence.md says of settings, defaults and an example is what the code does."""

from __future__ import annotations

import json
import logging
import re

import jobs
import pytest

from ds_toolkit.config.guard_settings import GuardSettings
from ds_toolkit.plan.failures import assumed_mttf_seconds
from ds_toolkit.resilience.cadence import AutoInterval
from ds_toolkit.resilience.overhead import SnapshotPace
from ds_toolkit.units import format_seconds

PAGE = (jobs.REPOSITORY / "docs" / "cadence.md").read_text()


def settings_rows() -> list[str]:
    return [
        f"| `{name}` | `{json.dumps(field.default)}` | {field.description} |"
        for name, field in GuardSettings.model_fields.items()
    ]


def test_the_table_has_every_setting_with_its_default_and_meaning() -> None:
    assert re.findall(r"^\| `[a-z_]+` \| `.*\|$", PAGE, re.MULTILINE) == settings_rows()


def test_the_assumed_times_between_failures_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| ([0-9,]+) \| (.* min) \|$", PAGE, re.MULTILINE)
    assert len(rows) > 5
    for count, shown in rows:
        assert format_seconds(assumed_mttf_seconds(int(count.replace(",", "")))) == shown


def test_the_example_is_what_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    clock_seconds, wall_seconds = [0.0], [0.0]
    cadence = AutoInterval(
        GuardSettings(save_every="auto"),
        num_gpus=8,
        decides=True,
        clock=lambda: clock_seconds[0],
        wall_clock=lambda: wall_seconds[0],
        broadcast=lambda outlook: outlook,
    )
    clock_seconds[0] = wall_seconds[0] = 600.0
    cadence.observe(stall_seconds=0.5, write_seconds=60.0)
    cadence.saved(600)
    clock_seconds[0] += 1.0
    with caplog.at_level(logging.INFO, "ds_toolkit"):
        cadence.due(601)
    (block,) = re.findall(r"```text\n(.*?)\n```", PAGE, re.DOTALL)
    assert caplog.messages == [" ".join(block.split())]


@pytest.mark.parametrize(
    "said",
    [
        f"every {format_seconds(AutoInterval.FIRST_SECONDS)}",
        f"{AutoInterval.SLOWDOWN:.0%} of the time that it is written",
        f"a quarter ({AutoInterval.NEWEST_WEIGHT})",
        f"more than {AutoInterval.WORTH_CHANGING:.0%}",
        f"{AutoInterval.LONGEST_SECONDS / 3600:.0f} hours",
        f"every {SnapshotPace.FIRST_EVERY} steps",
        f"each {SnapshotPace.LEFT_OUT_EVERY}th step",
        f"each {SnapshotPace.LOOK_EVERY} steps",
    ],
)
def test_numbers_in_the_text_are_those_of_the_code(said: str) -> None:
    assert said in " ".join(PAGE.split())
