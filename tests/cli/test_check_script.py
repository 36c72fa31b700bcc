"""`ds-toolkit check-script`: forms, exit codes, and files that are no scripts."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from ds_toolkit.cli import main

REPOSITORY = Path(__file__).parents[2]
WRONG = """import deepspeed
import torch

engine, *_ = deepspeed.initialize(model=model, config="ds_config.json")
if torch.distributed.get_rank() == 0:
    engine.save_checkpoint("out")
torch.save(engine.module.state_dict(), "model.pt")
"""
WARNING = 'import deepspeed, torch\nä = torch.load("a.pt")\n'


class Command:
    """`ds-toolkit check-script` in this process: exit code, standard output, standard error."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys, self._monkeypatch = capsys, monkeypatch

    def __call__(self, *arguments: object, stdin: bytes = b"") -> tuple[int, str, str]:
        self._monkeypatch.setattr(sys, "argv", ["ds-toolkit", "check-script", *map(str, arguments)])
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as ended:
            main()
        captured = self._capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        assert isinstance(ended.value.code, int)
        return ended.value.code, captured.out, captured.err


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "warning.py").write_text(WARNING)
    (tmp_path / "clean.py").write_text("print('nothing to see')\n")
    return Command(capsys, monkeypatch)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["clean.py"], 0),
        (["warning.py"], 1),
        (["warning.py", "--fail-on", "error"], 0),
        (["warning.py", "--ignore", "DS1001"], 0),
        (["wrong.py", "--ignore", "checkpoint-on-some-ranks"], 0),
        (["clean.py", "wrong.py"], 1),
        (["clean.py", "missing.py"], 2),
        (["wrong.py", "--config", "missing.json"], 2),
        (["clean.py", "--ignore", "DS9999"], 2),
        ([], 2),
    ],
)
def test_exit_codes(check: Command, arguments: list[str], code: int) -> None:
    assert check(*arguments)[0] == code


def test_text_says_where_what_and_how(check: Command) -> None:
    assert check("wrong.py")[1].splitlines() == [
        "wrong.py:6:5: error DS1011 checkpoint-on-some-ranks",
        "  `engine.save_checkpoint` is for every rank, but only rank 0 may come here: "
        "it waits for the rest for ever",
        "  fix: call it on every rank, outside the branch",
        "1 error in 1 file",
    ]


def test_columns_are_characters(check: Command) -> None:
    (finding,) = json.loads(check("warning.py", "--format", "json")[1])["findings"]
    assert (finding["code"], finding["line"], finding["column"]) == ("DS1001", 2, 5)


@pytest.mark.parametrize("form", ["github", "sarif"])
def test_programs_are_told_too(check: Command, form: str) -> None:
    out = check("wrong.py", "--format", form)[1]
    assert "DS1011" in out
    if form == "sarif":
        (run,) = json.loads(out)["runs"]
        assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["DS1011"]


def codes(out: str) -> list[str]:
    return [finding["code"] for finding in json.loads(out)["findings"]]


def test_the_stage_comes_from_the_file_beside_it_or_from_the_option(check: Command, tmp_path: Path) -> None:
    assert codes(check("wrong.py", "--format", "json")[1]) == ["DS1011"]
    (tmp_path / "ds_config.json").write_text('{"zero_optimization": {"stage": 3}}')
    assert codes(check("wrong.py", "--format", "json")[1]) == ["DS1011", "DS1021"]
    (tmp_path / "other.json").write_text('{"zero_optimization": {"stage": 2}}')
    assert codes(check("wrong.py", "--config", "other.json", "--format", "json")[1]) == ["DS1011"]


def test_standard_input_and_notebooks(check: Command, tmp_path: Path) -> None:
    code, out, _ = check("-", "--format", "json", stdin=WRONG.encode())
    assert (code, json.loads(out)["findings"][0]["file"]) == (1, "<stdin>")
    cells = [
        {"cell_type": "markdown", "source": ["# no ( Python"]},
        {"cell_type": "code", "source": ["%%bash\n", "ls ("]},
        {"cell_type": "code", "source": ["!pip list\n", "import deepspeed, torch\n", "torch.load('x')"]},
    ]
    (tmp_path / "n.ipynb").write_text(json.dumps({"cells": cells}))
    (finding,) = json.loads(check("n.ipynb", "--format", "json")[1])["findings"]
    assert (finding["code"], finding["pointer"], finding["line"]) == ("DS1001", "/cells/2/source/2", None)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.py", b"def f(:\n", "a.py:1"),
        ("a.py", b"print 'x'\n", "Python 2"),
        ("a.py", b"x = 1\ny = \0\n", "a.py:2"),
        ("a.py", b"x = 1\n# \xe4\n", "a.py:2"),
        ("a.py", b"# -*- coding: klingon -*-\n", "encoding"),
        ("a.py", "x = 1".encode("utf-16"), "UTF-16"),
        ("a.py", b"x = " + b"(" * 50_000, "nested too deeply"),
        ("a.py", b"x = " + b"-" * 200_000 + b"1", "nested too deeply"),
        ("a.py", b"#" * 5_000_001, "too long for a script"),
        ("a.ipynb", b"[]", "the notebook cannot be read"),
        ("a.ipynb", b'{"cells": [{"cell_type": "code", "source": ["x = ("]}]}', "/cells/0/source/0"),
    ],
)
def test_what_cannot_be_read_ends_with_two(
    check: Command, tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    (tmp_path / name).write_bytes(content)
    code, out, err = check(name, "warning.py", "--format", "json")
    assert code == 2
    assert says in err
    assert codes(out) == ["DS1001"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"# -*- coding: latin-1 -*-\nx = '\xe4'\n",
        b"\xef\xbb\xbfx = 1\n",
        b"x = " + b"1 + " * 300 + b"1\n",
    ],
    ids=["empty", "latin-1", "a byte order mark", "a long sum"],
)
def test_what_is_strange_and_python_is_read(check: Command, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "odd.py").write_bytes(content)
    assert check("odd.py")[0] == 0


def test_a_folder_is_no_script(check: Command, tmp_path: Path) -> None:
    code, _, err = check(tmp_path)
    assert code == 2
    assert "Is a directory" in err


def test_nothing_is_executed(check: Command, tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("import deepspeed\nopen('made', 'w')\nimport no_such_module\n")
    assert check("evil.py")[0] == 0
    assert not (tmp_path / "made").exists()


def test_the_examples_of_this_repository_are_clean(check: Command) -> None:
    scripts = sorted(REPOSITORY.glob("examples/**/*.py"))
    assert scripts
    assert check(*scripts)[:2] == (0, f"nothing found in {len(scripts)} files\n")
