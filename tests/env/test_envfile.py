from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_toolkit.env.envfile import env_file_paths, env_line, parse_env_text, read_env_file
from ds_toolkit.env.rules import lint_env
from ds_toolkit.errors import ToolkitError


def test_lines_are_split_at_the_first_equals_and_stripped() -> None:
    env_file = parse_env_text("A = 1\r\nB=x=y\nC=\nA=2")
    assert env_file.variables == {"A": "2", "B": "x=y", "C": ""}
    assert [line.number for line in env_file.lines] == [1, 2, 3, 4]
    assert [line.text for line in env_file.lines] == ["A = 1", "B=x=y", "C=", "A=2"]


@pytest.mark.parametrize(("text", "number"), [("A=1\n\nB=2\n", 2), ("A=1\n# note\n", 2), ("A\n", 1)])
def test_a_line_without_equals_ends_the_launcher(text: str, number: int) -> None:
    with pytest.raises(ToolkitError) as caught:
        _ = parse_env_text(text, "env").variables
    assert caught.value.where == f"env:{number}"


def test_both_files_are_read_and_the_folder_comes_last(tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "folder"
    for place in (home, folder):
        place.mkdir()
        (place / ".deepspeed_env").write_text("A=1\n")
        (place / "mine").write_text("A=1\n")
    (home / "mine").unlink()
    assert env_file_paths({}, home, folder) == [home / ".deepspeed_env", folder / ".deepspeed_env"]
    assert env_file_paths({"DS_ENV_FILE": "mine"}, home, folder) == [folder / "mine"]


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match="cannot be read"):
        read_env_file(tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"A=\xff\n")
    with pytest.raises(ToolkitError, match="not text"):
        read_env_file(tmp_path / "binary")


@settings(deadline=None)
@given(st.dictionaries(st.from_regex(r"[A-Za-z_]\w{0,8}", fullmatch=True), st.text(max_size=8), max_size=4))
def test_a_line_that_is_written_reads_back_and_is_clean(variables: dict[str, str]) -> None:
    text, written = "", {}
    for name, value in variables.items():
        try:
            text += env_line(name, value)
        except ToolkitError:
            continue
        written[name] = value
    env_file = parse_env_text(text)
    assert env_file.variables == written
    assert lint_env(env_file) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("A", "x y"),
        ("A", '"x"'),
        ("A", "$HOME"),
        ("A", "x\n"),
        ("A", "a;b"),
        ("A", "~"),
        ("1A", "x"),
        ("A B", "x"),
    ],
)
def test_what_a_shell_would_change_is_never_written(name: str, value: str) -> None:
    with pytest.raises(ToolkitError, match=name):
        env_line(name, value)


def test_findings_name_the_line() -> None:
    findings = lint_env(parse_env_text("A=1\n# B=2\n\nC='x'\nexport D=1\n", "env"))
    assert [(finding.code, str(finding.where)) for finding in findings] == [
        ("DS702", "env:2:1"),
        ("DS701", "env:3:1"),
        ("DS703", "env:4:3"),
        ("DS702", "env:5:1"),
    ]
