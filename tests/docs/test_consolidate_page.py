from __future__ import annotations

import re
from pathlib import Path

import typer.main

from ds_toolkit.cli.app import make_app

PAGE = (Path(__file__).parents[2] / "docs" / "consolidate.md").read_text()


def test_the_options_in_the_table_are_those_of_the_command() -> None:
    command = typer.main.get_command(make_app()).commands["consolidate"]  # type: ignore[attr-defined]
    options = {name for parameter in command.params for name in parameter.opts if name.startswith("--")}
    rows = re.findall(r"^\| `(--[^`]+)`", PAGE, re.MULTILINE)
    assert {option for row in rows for option in re.findall(r"--[a-z-]+", row)} == options
