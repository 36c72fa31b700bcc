"""`ds-toolkit verify` and `ds-toolkit inspect`, as people and scripts call them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoint_damage import MODEL, RANK_1, TAG, copied, flip, rewrite, write_manifest

STAGE_1 = "stage1-fp32-2ranks"


def call(*arguments: object) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "ds_toolkit", *map(str, arguments)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return finished.returncode, finished.stdout, finished.stderr


def as_json(*arguments: object) -> dict[str, Any]:
    code, out, _ = call(*arguments, "--json")
    data: dict[str, Any] = json.loads(out)
    assert data.pop("schema") == 1
    return {**data, "exit_code": code}


@pytest.fixture
def checkpoints(zoo: Path, tmp_path: Path) -> Path:
    """A committed tag of step 3, and two of DeepSpeed's own, one of them without a shard."""
    directory = tmp_path / "checkpoints"
    folder = copied(zoo, STAGE_1, directory)
    older = shutil.copytree(folder, directory / "global_step2")
    (older / RANK_1).unlink()
    shutil.copytree(zoo / "stage3-bf16-2ranks" / "checkpoints" / TAG, directory / "other")
    write_manifest(folder)
    (directory / ".global_step4.0123abcd.partial").mkdir()
    return directory


def test_verify_prints_findings_and_a_line_for_every_tag(checkpoints: Path) -> None:
    code, out, err = call("verify", checkpoints)
    assert (code, err) == (1, "")
    assert out.startswith(
        f"{checkpoints}/global_step2/{RANK_1}: error DS901 missing-file\n"
        "  the optimizer states of data-parallel rank 1 are missing\n"
        "  fix: use another tag, or bring the file back from another copy\n"
        f"{checkpoints}/.global_step4.0123abcd.partial: info DS915 unfinished-save\n"
        "  this save was not committed\n"
        "global_step2  step 3, 2 files, "
    )
    assert out.endswith("\n1 error, 1 note in 3 tags\n")
    assert ": BROKEN, structure only\n" in out
    assert ": whole, structure only\n" in out
    assert ": whole as far as its shards tell (no manifest), structure only\n" in out


def test_verify_in_json(checkpoints: Path) -> None:
    flip(checkpoints / TAG / MODEL, (checkpoints / TAG / MODEL).stat().st_size // 2)
    data = as_json("verify", checkpoints, "--deep")
    assert data["exit_code"] == 1
    assert [(finding["code"], finding["severity"]) for finding in data["findings"]] == [
        ("DS901", "error"),
        ("DS903", "error"),
        ("DS915", "info"),
    ]
    assert data["findings"][0]["file"] == f"{checkpoints}/global_step2/{RANK_1}"
    told = [(tag["tag"], tag["is_whole"], tag["has_manifest"], tag["codes"]) for tag in data["tags"]]
    assert told == [
        ("global_step2", False, False, ["DS901"]),
        (TAG, False, True, ["DS903"]),
        ("other", True, False, []),
    ]


def test_verify_exits_with_0_if_there_is_nothing_but_notes(checkpoints: Path) -> None:
    shutil.rmtree(checkpoints / "global_step2")
    code, out, _ = call("verify", checkpoints, "--deep")
    assert code == 0
    assert "1 note in 2 tags" in out
    assert call("verify", checkpoints, "--tag", "other")[0] == 0


def test_verify_that_cannot_look_exits_with_2(tmp_path: Path) -> None:
    code, out, err = call("verify", tmp_path / "none")
    assert (code, out) == (2, "")
    assert "does not exist" in err


def test_inspect_shows_what_there_is(checkpoints: Path) -> None:
    code, out, err = call("inspect", checkpoints)
    assert (code, err) == (0, "")
    assert f"{TAG}  <- latest\n  step 3, ZeRO stage 1, fp32, DeepSpeed 0.19.8\n" in out
    assert (
        "other\n  step 3, ZeRO stage 3, bf16, DeepSpeed 0.19.8\n  ranks       dp 2 x tp 1 x pp 1, ep 1\n"
        in out
    )
    assert "304 parameters, 60 of them frozen, 1 tied name, 6 buffers" in out
    assert "committed   by ds_toolkit (periodic, " in out
    assert "committed   by DeepSpeed: not proven to be whole" in out
    assert f"broken      {RANK_1}: the optimizer states of data-parallel rank 1 are missing" in out
    assert out.endswith("`latest` names global_step3\nnot committed: .global_step4.0123abcd.partial\n")


def test_inspect_in_json_with_tensors(checkpoints: Path) -> None:
    (checkpoints / "latest").write_text("gone")
    data = as_json("inspect", checkpoints, "--tensors")
    assert (data["exit_code"], data["latest"], data["unfinished"]) == (
        0,
        "gone",
        [".global_step4.0123abcd.partial"],
    )
    broken, whole, other = data["tags"]
    assert (broken["is_whole"], whole["is_whole"], other["is_whole"]) == (False, True, None)
    assert (broken["committed_by"], whole["committed_by"]) == ("DeepSpeed", "ds_toolkit")
    # What the headers tell is shown of a broken tag, too.
    assert (broken["step"], broken["stage"], broken["dp_world_size"], broken["precision"]) == (
        3,
        1,
        2,
        "fp32",
    )
    assert broken["tensors"] is None
    assert broken["num_parameters"] == 244
    counts = ("num_parameters", "num_frozen", "num_tied", "num_buffers")
    assert [whole[name] for name in counts] == [304, 60, 1, 6]
    assert [whole[f"{way}_world_size"] for way in ("dp", "tp", "pp", "ep")] == [2, 1, 1, 1]
    assert {file["name"] for file in whole["files"]} >= {MODEL, RANK_1, "manifest.json"}
    assert whole["num_bytes"] == sum(file["size_bytes"] for file in whole["files"])
    tensors = {tensor["name"]: tensor for tensor in whole["tensors"]}
    assert tensors["up.weight"] == {
        "name": "up.weight",
        "shape": [11, 7],
        "dtype": "float32",
        "role": "trained",
        "tied_to": None,
        "files": [RANK_1.replace("rank_1", "rank_0"), RANK_1],
    }
    assert tensors["head.weight"]["tied_to"] == "embedding.weight"
    assert tensors["frozen.bias"]["role"] == "frozen"
    assert tensors["norm.num_batches_tracked"]["shape"] == []


def test_inspect_of_one_tag_and_of_tensors_as_text(checkpoints: Path) -> None:
    code, out, _ = call("inspect", checkpoints / TAG, "--tensors")
    assert code == 0
    assert "global_step2" not in out
    assert "\nhead.weight               13x7    float32   = embedding.weight" in out


def test_inspect_shows_headers_of_a_layout_that_cannot_be_read(checkpoints: Path) -> None:
    rewrite(checkpoints / TAG / MODEL, lambda root: root.update(autoep_layers=[1]))
    (checkpoints / TAG / "manifest.json").unlink()
    (tag,) = as_json("inspect", checkpoints, "--tag", TAG)["tags"]
    assert (tag["step"], tag["stage"], tag["dp_world_size"], tag["tp_world_size"]) == (3, 1, 2, 1)
    assert (tag["is_whole"], tag["problems"]) == (None, [])
    assert "automatic expert parallelism" in tag["notes"][0]


def test_neither_command_loads_torch_and_only_deep_loads_numpy(zoo: Path) -> None:
    checkpoint = zoo / STAGE_1 / "checkpoints"
    for arguments, expected in (
        (["inspect", "--tensors"], set()),
        (["verify"], set()),
        (["verify", "--deep"], {"numpy"}),
    ):
        code = (
            "import sys\nfrom ds_toolkit.cli.app import make_app\n"
            f"make_app()([*{arguments!r}, {str(checkpoint)!r}], standalone_mode=False)\n"
            "print({'torch', 'deepspeed', 'numpy'} & set(sys.modules))"
        )
        finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert finished.stdout.splitlines()[-1] == str(expected or set())


def test_status_judges_what_deepspeed_alone_wrote_and_loads_neither_torch_nor_numpy(
    zoo: Path, tmp_path: Path
) -> None:
    checkpoint = zoo / STAGE_1 / "checkpoints"
    code = (
        "import sys\nfrom ds_toolkit.cli.app import make_app\n"
        f"make_app()(['status', {str(checkpoint)!r}, '--arena', {str(tmp_path)!r}], standalone_mode=False)\n"
        "print({'torch', 'deepspeed', 'numpy'} & set(sys.modules))"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert re.search(rf"{TAG} +3 +deepspeed .* by its shards", finished.stdout)
    assert finished.stdout.splitlines()[-1] == "set()"
