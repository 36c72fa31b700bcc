from __future__ import annotations

import re
from pathlib import Path

import typer.main

from ds_toolkit.cli.app import make_app
from ds_toolkit.doctor.preflight.judging import CHECKS

PAGE = (Path(__file__).parents[2] / "docs" / "preflight.md").read_text()


def test_the_options_in_the_table_are_those_of_the_command() -> None:
    command = typer.main.get_command(make_app()).commands["preflight"]  # type: ignore[attr-defined]
    options = {name for parameter in command.params for name in parameter.opts}
    assert set(re.findall(r"^\| `(--[a-z-]+)", PAGE, re.MULTILINE)) == options - {"--help"}


def test_the_columns_are_those_of_the_report() -> None:
    rows = PAGE.partition("| column | is wrong when |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| ([a-z/, ]+?) \|", rows, re.MULTILINE) == [check.name for check in CHECKS]
