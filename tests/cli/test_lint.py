from __future__ import annotations

import io
import json
import re
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_toolkit.cli import main
from ds_toolkit.cli.catalogue import all_rules
from ds_toolkit.config import linter
from ds_toolkit.env import fabric

CLEAN = '{"train_batch_size": 8}\n'
WARNING = '{"train_batch_size": 8, "mine": 1}\n'
BROKEN = '{\n  "train_batch_size": "8",\n  "zero_optimisation": {}\n}\n'


class Command:
    """`ds-toolkit` in this process: exit code, standard output, standard error."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys, self._monkeypatch = capsys, monkeypatch

    def __call__(self, *arguments: object, stdin: bytes = b"") -> tuple[int, str, str]:
        self._monkeypatch.setattr(sys, "argv", ["ds-toolkit", *map(str, arguments)])
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        try:
            main()
        except SystemExit as end:
            code = end.code
        captured = self._capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        assert isinstance(code, int)
        return code, captured.out, captured.err


@pytest.fixture
def ds_toolkit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Command:
    monkeypatch.chdir(tmp_path)
    for name, text in (("clean.json", CLEAN), ("warning.json", WARNING), ("broken.json", BROKEN)):
        (tmp_path / name).write_text(text)
    return Command(capsys, monkeypatch)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["clean.json"], 0),
        (["warning.json"], 1),
        (["warning.json", "--fail-on", "error"], 0),
        (["warning.json", "--ignore", "DS002"], 0),
        (["warning.json", "--ignore", "unknown-key"], 0),
        (["broken.json", "--fail-on", "error"], 1),
        (["broken.json", "--ignore", "DS001", "--ignore", "DS014"], 0),
        (["clean.json", "broken.json"], 1),
        (["clean.json", "missing.json"], 2),
        (["clean.json", "--world-size", "3"], 1),
        (["clean.json", "--world-size", "0"], 2),
        (["clean.json", "--ignore", "DS999"], 2),
        (["clean.json", "--for", "everyone"], 2),
        ([], 2),
    ],
)
def test_exit_codes(ds_toolkit: Command, arguments: list[str], code: int) -> None:
    assert ds_toolkit("lint", *arguments)[0] == code


def test_text_says_where_what_and_how(ds_toolkit: Command) -> None:
    _, out, err = ds_toolkit("lint", "broken.json")
    assert out.splitlines() == [
        "broken.json:2:3 /train_batch_size: error DS014 number-as-string",
        '  `train_batch_size` is the text "8", not a number',
        "  fix: write 8",
        "broken.json:3:3 /zero_optimisation: error DS001 misspelt-key",
        "  DeepSpeed does not know `zero_optimisation` and ignores it",
        "  fix: did you mean `zero_optimization`?",
        "2 errors in 1 file",
    ]
    assert err == ""
    assert ds_toolkit("lint", "clean.json", "warning.json")[1].splitlines()[-1] == "1 warning in 2 files"
    assert ds_toolkit("lint", "clean.json")[1] == "nothing found in 1 file\n"


def test_a_terminal_gets_the_same_words_in_colours(
    ds_toolkit: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ds_toolkit("lint", "broken.json", "warning.json")[1]
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = ds_toolkit("lint", "broken.json", "warning.json")[1]
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain


def test_json_has_its_version_and_its_keys(ds_toolkit: Command) -> None:
    _, out, _ = ds_toolkit("lint", "broken.json", "clean.json", "--format", "json")
    report = json.loads(out)
    assert report["schema"] == 1
    assert list(report) == ["schema", "findings"]
    assert report["findings"][1] == {
        "code": "DS001",
        "severity": "error",
        "file": "broken.json",
        "pointer": "/zero_optimisation",
        "line": 3,
        "column": 3,
        "message": "DeepSpeed does not know `zero_optimisation` and ignores it",
        "fix": "did you mean `zero_optimization`?",
    }
    assert json.loads(ds_toolkit("lint", "clean.json", "--format", "json")[1]) == {
        "schema": 1,
        "findings": [],
    }


def test_github_annotations_are_escaped(ds_toolkit: Command, tmp_path: Path) -> None:
    (tmp_path / "a,b%.json").write_text('{"train_batch_size": 8, "5% of\\nit": 1}')
    code, out, _ = ds_toolkit("lint", "a,b%.json", "missing.json", "--format", "github")
    assert code == 2
    assert out.splitlines() == [
        # A key that is written with escapes is placed at its value.
        "::warning file=a%2Cb%25.json,line=1,col=38,title=DS002 unknown-key::"
        "DeepSpeed does not know `5%25 of\\nit` and ignores it; remove it, or call it `x-5%25 of\\nit`",
        "::error file=missing.json,title=unreadable::the file cannot be read%0A  where: missing.json%0A"
        "  why:   No such file or directory",
    ]


def test_sarif_is_what_the_standard_asks_for(ds_toolkit: Command) -> None:
    _, out, _ = ds_toolkit("lint", "broken.json", "missing.json", "--format", "sarif")
    log = json.loads(out)
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == ["DS001", "DS014"]
    assert all(rule["shortDescription"]["text"] and rule["help"]["text"] for rule in rules)
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] == "error"
        (location,) = result["locations"]
        assert location["physicalLocation"]["artifactLocation"]["uri"] == "broken.json"
        assert location["logicalLocations"][0]["fullyQualifiedName"].startswith("/")
    region = run["results"][1]["locations"][0]["physicalLocation"]["region"]
    assert region == {"startLine": 3, "startColumn": 3}
    (invocation,) = run["invocations"]
    assert invocation["executionSuccessful"] is False
    assert "cannot be read" in invocation["toolExecutionNotifications"][0]["message"]["text"]


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        (".deepspeed_env", "NCCL_DEBUG=INFO\n", "DS724"),
        ("nccl.env", "\n", "DS701"),
        ("hostfile", "worker-0\n", "DS751"),
        ("hosts", "worker-0 slots=0\nworker-1 slots=1\n", "DS754"),
        ("config.hjson", "mine: 1", "DS002"),
        ("conf", '{"mine": 1}', "DS002"),
        ("conf", "# ours\nworker-0 slots=0\nworker-1 slots=8\n", "DS754"),
        ("conf", "NCCL_DEBUG=INFO\n", "DS724"),
        ("-", '{"mine": 1}', "DS002"),
        ("-", "NCCL_DEBUG=INFO\n", "DS724"),
    ],
)
def test_kinds_are_told_by_name_and_then_by_content(
    ds_toolkit: Command, tmp_path: Path, name: str, text: str, code: str
) -> None:
    if name != "-":
        (tmp_path / name).write_text(text)
    _, out, _ = ds_toolkit("lint", name, "--format", "json", stdin=text.encode())
    findings = json.loads(out)["findings"]
    assert code in [finding["code"] for finding in findings]
    assert {finding["file"] for finding in findings} == {"<stdin>" if name == "-" else name}


def test_rules_of_other_files_can_be_ignored_too(ds_toolkit: Command, tmp_path: Path) -> None:
    (tmp_path / ".deepspeed_env").write_text("NCCL_DEBUG=INFO\n")
    assert ds_toolkit("lint", ".deepspeed_env", "--ignore", "debugging-left-on")[0] == 0


def test_the_kind_can_be_said(ds_toolkit: Command, tmp_path: Path) -> None:
    (tmp_path / "env.json").write_text("NCCL_DEBUG=INFO\n")
    assert "DS724" in ds_toolkit("lint", "env.json", "--kind", "env")[1]
    assert "DS751" in ds_toolkit("lint", "env.json", "--kind", "hostfile")[1]


def test_options_reach_the_rules(
    ds_toolkit: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "env").write_text("A=1,2\nNCCL_IB_HCA=mlx5_0\n")
    monkeypatch.setattr(fabric, "has_infiniband", lambda: False)
    out = ds_toolkit("lint", "env", "--kind", "env", "--launcher", "slurm")[1]
    assert "DS704" in out
    assert "DS725" in out
    (tmp_path / "c.json").write_text('{"gradient_accumulation_steps": 2}')
    assert "DS801" in ds_toolkit("lint", "c.json", "--for", "lightning")[1]


def test_on_a_newer_deepspeed_unknown_keys_are_warnings(
    ds_toolkit: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "c.json").write_text(
        '{"train_batch_size": 8, "zero_optimisation": {}, "zero_optimization": {"x": 1}, "aio": {"y": 1}}'
    )
    unknown = ["--ignore", "DS409", "--fail-on", "error"]
    assert ds_toolkit("lint", "c.json", *unknown)[0] == 1
    monkeypatch.setattr(linter, "SUPPORTED_DEEPSPEED", ("0.1.0", "0.1.0"))
    code, out, _ = ds_toolkit("lint", "c.json", *unknown)
    assert code == 0
    assert out.splitlines()[-1] == "3 warnings in 1 file"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"a" 1}', "bad.json:1:6"),
        (b'{"a": [1,', "the end of the text"),
        (b"[1]", "expected an object"),
        (b"\x80\x81\x82", "byte 0 is not UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "it is UTF-16"),
        (b'{"a":' * 20000, "nested too deeply"),
        (b" " * (50 * 10**6), "too long for a configuration"),
        (b'{"a": "\x00"}', "neither JSON nor HJSON"),
    ],
    ids=["not JSON", "cut off", "a list", "binary", "UTF-16", "deep", "50 MB", "a null byte"],
)
def test_what_cannot_be_read_ends_with_two(
    ds_toolkit: Command, tmp_path: Path, content: bytes, says: str
) -> None:
    (tmp_path / "bad.json").write_bytes(content)
    for form in ("text", "json", "github", "sarif"):
        code, _, err = ds_toolkit("lint", "bad.json", "--format", form)
        assert code == 2
        assert says in err
        assert "bad.json" in err


def test_folders_are_no_configurations(ds_toolkit: Command, tmp_path: Path) -> None:
    code, _, err = ds_toolkit("lint", tmp_path)
    assert code == 2
    assert "Is a directory" in err


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "DS101"),
        (b"{\n  train_batch_size: 8\n  log_level: info, steps_per_print: 10\n}", "DS010"),
        (b'{"train_batch_size": 8, "train_batch_size": 8}', "DS007"),
        (b'\xef\xbb\xbf{"mine": 1}', "DS002"),
    ],
    ids=["empty", "a swallowed line", "a key twice", "a byte order mark"],
)
def test_what_can_be_read_but_is_strange_is_a_finding(
    ds_toolkit: Command, tmp_path: Path, content: bytes, code: str
) -> None:
    (tmp_path / "odd.json").write_bytes(content)
    exit_code, out, _ = ds_toolkit("lint", "odd.json")
    assert exit_code == 1
    assert code in out


def test_fix_shows_a_diff_then_mends_and_reports_the_rest(ds_toolkit: Command, tmp_path: Path) -> None:
    path = tmp_path / "real.json"
    path.write_text(BROKEN)
    path.chmod(0o640)
    (tmp_path / "link.json").symlink_to(path)
    code, out, _ = ds_toolkit("lint", "link.json", "--fix")
    assert code == 1
    assert out.splitlines()[:8] == [
        "--- link.json (before)",
        "+++ link.json (after)",
        "@@ -1,4 +1,4 @@",
        " {",
        '-  "train_batch_size": "8",',
        '+  "train_batch_size": 8,',
        '   "zero_optimisation": {}',
        " }",
    ]
    assert "DS014" not in out
    assert path.read_text() == BROKEN.replace('"8"', "8")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert (tmp_path / "link.json").is_symlink()


def test_fix_leaves_a_machine_its_report_and_clean_files_alone(ds_toolkit: Command, tmp_path: Path) -> None:
    before = (tmp_path / "clean.json").stat()
    identity = (before.st_ino, before.st_mtime_ns)
    _, out, err = ds_toolkit("lint", "clean.json", "broken.json", "--fix", "--format", "json")
    assert [finding["code"] for finding in json.loads(out)["findings"]] == ["DS001"]
    assert '+  "train_batch_size": 8,' in err
    after = (tmp_path / "clean.json").stat()
    assert (after.st_ino, after.st_mtime_ns) == identity
    assert ds_toolkit("lint", "broken.json", "--fix", "--ignore", "DS001")[0] == 0


def test_an_ignored_rule_mends_nothing(ds_toolkit: Command, tmp_path: Path) -> None:
    ds_toolkit("lint", "broken.json", "--fix", "--ignore", "DS014")
    assert (tmp_path / "broken.json").read_text() == BROKEN


def test_standard_input_cannot_be_mended(ds_toolkit: Command) -> None:
    code, _, err = ds_toolkit("lint", "-", "--fix", stdin=b"{}")
    assert code == 2
    assert "standard input cannot be mended" in err


@pytest.mark.parametrize("word", ["DS104", "ds104", "ranks-do-not-divide", "ranks_do_not_divide"])
def test_explain_prints_the_manual(ds_toolkit: Command, word: str) -> None:
    code, out, _ = ds_toolkit("explain", word)
    assert code == 0
    assert out.startswith("DS104 ranks-do-not-divide (error)\n\nThe number of ranks")
    assert out.rstrip().endswith(all_rules()["DS104"].manual.splitlines()[-1].strip())


def test_explain_names_the_nearest_rule(ds_toolkit: Command) -> None:
    code, _, err = ds_toolkit("explain", "missspelt-key")
    assert code == 2
    assert "did you mean `misspelt-key`?" in err


def test_schema_is_printed_or_written(ds_toolkit: Command, tmp_path: Path) -> None:
    code, out, _ = ds_toolkit("schema")
    assert code == 0
    schema: dict[str, Any] = json.loads(out)
    assert "zero_optimization" in schema["properties"]
    assert ds_toolkit("schema", "-o", "s.json")[0] == 0
    assert json.loads((tmp_path / "s.json").read_text()) == schema
    assert ds_toolkit("schema", "-o", "missing/s.json")[0] == 2


def test_codes_and_names_of_all_rooms_are_their_own() -> None:
    rules = all_rules()
    assert len(rules) > 100
    assert len({rule.name for rule in rules.values()}) == len(rules)


HOSTILE = '{"train_batch_size": 8, "\\ud800": 1, "a\\n::error::b\\u001b[31m": 1}'


@pytest.mark.parametrize("form", ["text", "github", "json", "sarif"])
@pytest.mark.parametrize("name", ["c\n::error::\x1b[31m.json", "c\udcff.json"])
def test_no_name_or_key_speaks_to_the_terminal(ds_toolkit: Command, form: str, name: str) -> None:
    Path(name).write_text(HOSTILE)
    code, out, err = ds_toolkit("lint", name, "missing\n::error::\x1b.json", "--format", form)
    assert code == 2
    for stream in (out, err):
        assert "\x1b" not in stream
        assert "\n::error::" not in stream
        stream.encode()


def test_the_shown_changes_are_escaped_too(ds_toolkit: Command) -> None:
    name = "c\x1b\udcff.json"
    Path(name).write_text('{"train_batch_size": "8"} // \x1b[31m\n')
    _, out, _ = ds_toolkit("lint", name, "--fix")
    assert '+{"train_batch_size": 8} // \\x1b[31m' in out
    assert "\x1b" not in out


def test_github_annotations_of_odd_errors_stay_one_line(ds_toolkit: Command) -> None:
    _, out, _ = ds_toolkit("lint", "m\n::error::.json", "--format", "github")
    assert len(out.splitlines()) == 1


def test_fixing_twice_changes_nothing_the_second_time(ds_toolkit: Command) -> None:
    # The key is moved first, and what is wrong with its value is seen only then.
    text = '{"train_batch_size": 8, "partition_activations": "false"}'
    Path("twice.json").write_text(text)
    out = ds_toolkit("lint", "twice.json", "--fix")[1]
    assert out.count("twice.json (before)") == 1
    first = Path("twice.json").read_text()
    assert first != text
    out = ds_toolkit("lint", "twice.json", "--fix")[1]
    assert "(before)" not in out
    assert Path("twice.json").read_text() == first


STAGE_3 = '{"train_batch_size": 16,\n "bf16": {"enabled": true},\n "zero_optimization": {\n  "stage": 3}}\n'


def test_files_are_held_against_a_model_and_a_machine(ds_toolkit: Command, tmp_path: Path) -> None:
    (tmp_path / "three.json").write_text(STAGE_3)
    (tmp_path / "hostfile").write_text("h1 slots=8\nh2 slots=8\n")
    (tmp_path / "my.env").write_text("NCCL_DEBUG=WARN\nNCCL_IB_HCA=mlx5_0\n")
    files = ["three.json", "my.env", "hostfile"]
    assert ds_toolkit("lint", *files)[0] == 0
    files += ["--model", "7B", "--interconnect", "10GbE", "--gpu-memory", "80GB"]
    code, out, _ = ds_toolkit("lint", *files, "--format", "json")
    assert code == 1
    found = json.loads(out)["findings"]
    assert [(each["code"], each["file"], each["line"], each["column"]) for each in found] == [
        ("DS552", "three.json", 4, 3),
        ("DS556", "my.env", 2, 1),
    ]
    code, out, _ = ds_toolkit("lint", *files, "--num-nodes", "1", "--gpus-per-node", "16")
    assert (code, out) == (0, "nothing found in 3 files\n")
    arguments = ["three.json", "--model", "70B", "--gpus-per-node", "8", "--gpu-memory", "80GB"]
    code, out, _ = ds_toolkit("lint", *arguments)
    assert code == 1
    assert out.startswith("three.json:4:3 /zero_optimization/stage: error DS557 more-than-a-gpu-holds\n")
    assert ds_toolkit("lint", *arguments, "--ignore", "DS557")[0] == 0
    log = json.loads(ds_toolkit("lint", *arguments, "--format", "sarif")[1])
    assert [rule["id"] for rule in log["runs"][0]["tool"]["driver"]["rules"]] == ["DS557"]


@pytest.mark.parametrize(
    ("hostfile", "code"),
    [
        ("h1 slots=8\nh2 slots=8\n", 0),
        ("h1 slots=4\nh2 slots=3\n", 1),
        # What cannot be read, or holds no ranks, says nothing about batches.
        ("h1 slots=8\nh1 slots=7\n", 1),
    ],
)
def test_a_hostfile_says_how_many_ranks_there_are(
    ds_toolkit: Command, tmp_path: Path, hostfile: str, code: int
) -> None:
    (tmp_path / "hostfile").write_text(hostfile)
    (tmp_path / "sixteen.json").write_text('{"train_batch_size": 16}')
    result, out, _ = ds_toolkit("lint", "sixteen.json", "hostfile")
    assert result == code
    assert ("DS102" in out) is ("slots=3" in hostfile)
    assert ("DS102" in ds_toolkit("lint", "sixteen.json", "hostfile", "--world-size", "7")[1]) is True


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "7B", "--gpus-per-node", "8", "--gpu-memory", "80"], "did you mean 80GB?"),
        (["--gpu-memory", "80GB"], "the model is not known"),
        (["--model", "7B", "--gpu-memory", "80GB"], "the number of GPUs is not known"),
        (["--model", "7B", "--interconnect", "10GbE"], "the number of hosts is not known"),
        (["--model", "seven"], "`seven` is not a count"),
        (["--interconnect", "fast"], "`fast` is not a network"),
        (["--world-size", "9", "--num-nodes", "2"], "9 ranks do not fill 2 hosts"),
    ],
)
def test_flags_that_say_nothing_are_refused(ds_toolkit: Command, arguments: list[str], says: str) -> None:
    code, out, err = ds_toolkit("lint", "clean.json", *arguments)
    assert (code, out) == (2, "")
    assert says in err


def test_gpus_with_nvlink_are_seen_on_this_host(
    ds_toolkit: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771'\n")
    driver.chmod(0o755)
    (tmp_path / "my.env").write_text("NCCL_DEBUG=WARN\nNCCL_P2P_DISABLE=1\n")
    assert ds_toolkit("lint", "my.env")[0] == 0
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    code, out, _ = ds_toolkit("lint", "my.env")
    assert code == 1
    assert out.startswith("my.env:2:1: warning DS554 peer-access-off-on-nvlink\n")
