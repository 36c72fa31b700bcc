from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main

from ds_toolkit.cli.app import make_app

PAGE = (Path(__file__).parents[2] / "docs" / "configs.md").read_text()


def test_the_options_in_the_table_are_those_of_the_command() -> None:
    command = typer.main.get_command(make_app()).commands["lint"]  # type: ignore[attr-defined]
    options = {name for parameter in command.params for name in parameter.opts if name.startswith("--")}
    cells = re.findall(r"^\| (`--[^|]*)\|", PAGE, re.MULTILINE)
    listed = {name for cell in cells for name in re.findall(r"`(--[a-z-]+)", cell)}
    assert listed == options - {"--kind"}
    assert "`--kind`" in PAGE


def test_the_example_is_what_the_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        '{\n  "train_batch_size": 8,\n  "bf16": {"enabled": true},\n  "zero_optimisation": {"stage": 3}\n}\n'
    )
    (tmp_path / "ds_config.json").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        make_app()(["lint", "ds_config.json"])
    printed = capsys.readouterr().out
    assert "".join(f"    {line}\n" for line in printed.splitlines()) in PAGE
