from __future__ import annotations

import re
from pathlib import Path

import typer.main

from ds_toolkit.cli.app import make_app
from ds_toolkit.env.launchers import Launcher

PAGE = (Path(__file__).parents[2] / "docs" / "environment.md").read_text()


def test_the_options_in_the_table_are_options_of_the_command() -> None:
    command = typer.main.get_command(make_app()).commands["gen-launch"]  # type: ignore[attr-defined]
    options = {name for parameter in command.params for name in parameter.opts}
    listed = re.findall(r"^\| `(--[a-z-]+)", PAGE, re.MULTILINE)
    assert set(listed) <= options
    assert {"--for", "--launcher"} <= set(listed)


def test_the_scripts_that_set_variables_themselves_are_those_of_the_page() -> None:
    for launcher in (Launcher.PDSH, Launcher.OPENMPI, Launcher.SLURM, Launcher.TORCHRUN):
        row = f"| the script of `gen-launch --launcher {launcher.value}` | the script's shell"
        assert (row in PAGE) == launcher.script_sets_variables
