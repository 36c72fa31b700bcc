"""What the installed launcher makes of the hostfiles that the rules speak of."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_toolkit.env.hostfile import parse_hostfile_text
from ds_toolkit.env.hostfile_rules import RULES, lint_hostfile
from ds_toolkit.errors import ToolkitError
from ds_toolkit.findings import has_errors

REFUSED = {"DS751", "DS752", "DS753"}
LINES = st.sampled_from(
    [
        "a slots=2",
        "b slots=0",
        "a",
        "",
        "# a slots=1",
        "c  slots=3 # note",
        "slots=1",
        "d slots = 1",
        " e slots=4",
    ]
)


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    import deepspeed.launcher.runner as runner
    from deepspeed.utils import logger

    logger.disabled = True
    yield runner  # type: ignore[misc]
    logger.disabled = False


@pytest.mark.parametrize("rule", list(RULES), ids=lambda rule: rule.code)
def test_the_launcher_refuses_what_the_manuals_say_it_refuses(rule: Any, runner: ModuleType) -> None:
    for example in rule.bad:
        lines = example.text.splitlines(keepends=True)
        if rule.code in REFUSED:
            with pytest.raises(ValueError, match="Hostfile"):
                runner._parse_hostfile(lines)
        else:
            runner._parse_hostfile(lines)
    for example in rule.good:
        runner._parse_hostfile(example.text.splitlines(keepends=True))


@settings(max_examples=300, deadline=None)
@given(st.lists(LINES, max_size=5))
def test_hosts_and_slots_are_those_that_the_launcher_reads(runner: ModuleType, lines: list[str]) -> None:
    hostfile = parse_hostfile_text("".join(f"{line}\n" for line in lines))
    try:
        expected = dict(runner._parse_hostfile([f"{line}\n" for line in lines]))
    except ValueError:
        assert has_errors(lint_hostfile(hostfile))
        with pytest.raises(ToolkitError):
            _ = hostfile.slots
    else:
        assert hostfile.slots == expected
