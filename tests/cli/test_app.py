"""How every command ends when the world is against it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
import typer.main

from ds_toolkit.cli.app import make_app, run

COMMAND = [sys.executable, "-m", "ds_toolkit"]


def big_checkpoint(folder: Path) -> Path:
    """A stage-0 checkpoint of 400 MB, so that a consolidation takes a while."""
    folder.mkdir()
    module = {f"layer{number}": torch.zeros(5_000_000) for number in range(20)}
    state = {
        "module": module,
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": None,
        "frozen_param_shapes": None,
        "shared_params": None,
        "frozen_param_fragments": None,
        "global_steps": 1,
        "global_samples": 1,
        "skipped_steps": 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": "0.19.8",
    }
    torch.save(state, folder / "mp_rank_00_model_states.pt")
    return folder


@pytest.mark.parametrize(("stop", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_command_leaves_nothing(tmp_path: Path, stop: signal.Signals, exit_code: int) -> None:
    checkpoint = big_checkpoint(tmp_path / "tag")
    with subprocess.Popen([*COMMAND, "consolidate", checkpoint, tmp_path / "model.bin"]) as process:
        jobs.wait_until(lambda: list(tmp_path.glob(".model.bin.*")), 60, "the copy")
        os.kill(process.pid, stop)
        assert process.wait(30) == exit_code
    assert [path.name for path in tmp_path.iterdir()] == ["tag"]


AS_NOBODY = """
import contextlib, os, sys
from ds_toolkit.cli.app import make_app, run
with contextlib.suppress(BaseException):
    # Python itself may lie where nobody may look: all modules that will be needed are loaded now.
    make_app()(["consolidate", "nowhere", "model.bin"])
os.setuid(65534)
sys.argv = ["ds-toolkit", *sys.argv[1:]]
run()
"""


@pytest.mark.parametrize("locked", ["checkpoints", "checkpoints/tag", "checkpoints/latest", "out"])
def test_what_may_not_be_read_is_told_without_a_traceback(tmp_path: Path, locked: str) -> None:
    for folder in ("checkpoints/tag", "out"):
        (tmp_path / folder).mkdir(parents=True)
    torch.save({}, tmp_path / "checkpoints" / "tag" / "mp_rank_00_model_states.pt")
    (tmp_path / "checkpoints" / "latest").write_text("tag")
    (tmp_path / locked).chmod(0)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    finished = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, "consolidate", "checkpoints", "out/model.bin", "--json"],
        cwd=tmp_path,
        # Nobody may not write down what coverage has measured.
        env={name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 2, finished.stderr
    assert "Traceback" not in finished.stderr
    assert json.loads(finished.stdout)["error"]["where"]


def test_a_full_standard_output(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        finished = subprocess.run(
            [*COMMAND, "gen-config", "--model", "1M", "--dry-run"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert finished.returncode != 0
    assert "No space left on device" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_defaults_are_shown_in_the_help() -> None:
    assert "[default:" in jobs.run([*COMMAND, "gen-config", "--help"]).check().output


LOADED = """
import contextlib, sys
from ds_toolkit.cli.app import run
with contextlib.suppress(SystemExit):
    run()
print(*sys.modules, sep="\\n")
"""


def test_a_run_of_one_command_loads_no_other(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"train_batch_size": 8, "mine": 1}')
    finished = jobs.run([sys.executable, "-c", LOADED, "lint", tmp_path / "c.json"]).check()
    assert "unknown-key" in finished.output
    loaded = set(finished.output.splitlines())
    assert "ds_toolkit.cli.lint" in loaded
    assert not loaded & {"ds_toolkit.cli.plan", "ds_toolkit.cli.gen_config", "ds_toolkit.env.rules", "rich"}


def test_the_help_names_all_commands() -> None:
    finished = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, check=True)
    for name in (
        "gen-config",
        "gen-env",
        "gen-launch",
        "plan",
        "lint",
        "explain",
        "schema",
        "consolidate",
        "run",
    ):
        assert f"  {name}" in finished.stdout


def machine_readable(command: Any, names: tuple[str, ...] = ()) -> dict[tuple[str, ...], list[str]]:
    """Every command that can print JSON, with the arguments that ask for it."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name, inner in getattr(command, "commands", {}).items():
        found |= machine_readable(inner, (*names, name))
    options = {option for parameter in command.params for option in parameter.opts}
    for asked in (["--json"], ["--format", "json"]):
        if asked[0] in options:
            found[names] = asked
    return found


MACHINE_READABLE = machine_readable(typer.main.get_command(make_app()))


def test_the_commands_that_print_json_are_these() -> None:
    assert {" ".join(names) for names in MACHINE_READABLE} == {
        *(
            "gen-config",
            "gen-env",
            "lint",
            "check-script",
            "consolidate",
            "inspect",
            "verify",
            "status",
            "diagnose",
            "preflight",
            "run",
        ),
        *("plan memory", "plan comm", "plan interval", "plan batch"),
    }


def answer(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    """The error object that a wrong call prints, and nothing else."""
    monkeypatch.setattr(sys, "argv", ["ds-toolkit", *arguments])
    with pytest.raises(SystemExit) as end:
        run()
    printed = capsys.readouterr()
    assert end.value.code == 2
    assert printed.err == ""
    told = json.loads(printed.out)
    assert list(told) == ["schema", "error"]
    assert list(told["error"]) == ["what", "where", "why", "fix"]
    error: dict[str, str] = told["error"]
    return error


@pytest.mark.parametrize(("names", "asked"), MACHINE_READABLE.items(), ids=" ".join)
def test_a_wrong_call_is_told_in_json_where_json_is_asked_for(
    names: tuple[str, ...],
    asked: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = answer([*names, *asked, "--no-such-flag"], capsys, monkeypatch)
    assert error["what"].startswith("No such option: --no-such-flag")
    assert error["where"] == f"ds-toolkit {' '.join(names)}"
    assert error["fix"] == f"see `ds-toolkit {' '.join(names)} --help`"


@pytest.mark.parametrize(
    ("arguments", "what", "where"),
    [
        ("lint --format json", "Missing argument 'FILE...'", "ds-toolkit lint"),
        ("lint --format=json", "Missing argument 'FILE...'", "ds-toolkit lint"),
        ("consolidate --json", "Missing argument 'CKPT'", "ds-toolkit consolidate"),
        ("plan memory --json", "Missing option '--model'", "ds-toolkit plan memory"),
        ("plan memory --json --model", "Option '--model' requires an argument", "ds-toolkit plan"),
        (
            "lint c.json --for everyone --format json",
            "Invalid value for '--for': 'everyone' is not one of 'native', 'hf', 'accelerate', 'lightning'",
            "ds-toolkit lint",
        ),
        ("plan nothing --json", "No such command 'nothing'", "ds-toolkit plan"),
        ("nothing --json", "No such command 'nothing'", "ds-toolkit"),
        ("lint c.json --ignore DS999 --format json", "there is no rule `DS999`", None),
    ],
)
def test_every_kind_of_wrong_call_has_its_json(
    arguments: str,
    what: str,
    where: str | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = answer(arguments.split(), capsys, monkeypatch)
    assert error["what"] == what
    assert error["where"] == where


@pytest.mark.parametrize("arguments", ["lint --nope", "lint --nope --format sarif", "lint --nope -- --json"])
def test_a_wrong_call_is_told_to_people_as_ever(
    arguments: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["ds-toolkit", *arguments.split()])
    with pytest.raises(SystemExit) as end:
        run()
    printed = capsys.readouterr()
    assert end.value.code == 2
    assert printed.out == ""
    assert printed.err.startswith("Usage: ")


def test_right_calls_end_with_their_own_codes_when_json_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for text, code in (('{"train_batch_size": 8}', 0), ('{"mine": 1}', 1)):
        (tmp_path / "c.json").write_text(text)
        monkeypatch.setattr(sys, "argv", ["ds-toolkit", "lint", str(tmp_path / "c.json"), "--format", "json"])
        with pytest.raises(SystemExit) as end:
            run()
        assert end.value.code == code
        assert "findings" in json.loads(capsys.readouterr().out)
