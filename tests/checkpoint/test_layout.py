"""File names, and which folder a person means."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_toolkit.checkpoint.layout import (
    ShardKind,
    find_tag_folder,
    list_tags,
    parse_shard_name,
    refuse_unsupported,
    shard_files,
)
from ds_toolkit.errors import ToolkitError

MODEL_FILE = "mp_rank_00_model_states.pt"


def make_tag(directory: Path, tag: str, *names: str) -> Path:
    folder = directory / tag
    folder.mkdir(parents=True)
    for name in names or (MODEL_FILE,):
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("name", "kind", "dp_rank", "mp_rank", "bf16"),
    [
        ("mp_rank_00_model_states.pt", ShardKind.MODEL, None, 0, False),
        ("mp_rank_13_model_states.pt", ShardKind.MODEL, None, 13, False),
        ("zero_pp_rank_11_mp_rank_02_model_states.pt", ShardKind.MODEL, 11, 2, False),
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", ShardKind.OPTIMIZER, 0, 0, False),
        ("bf16_zero_pp_rank_128_mp_rank_00_optim_states.pt", ShardKind.OPTIMIZER, 128, 0, True),
        ("layer_03-model_states.pt", ShardKind.LAYER, None, 0, False),
        ("layer_03-model_01-model_states.pt", ShardKind.LAYER, None, 1, False),
        ("layer_0_expert_7_mp_rank_01_model_states.pt", ShardKind.EXPERT, None, 1, False),
        ("expp_rank_1_mp_rank_00_optim_states.pt", ShardKind.EXPERT, None, 0, False),
    ],
)
def test_names_of_deepspeed_are_read(
    name: str, kind: ShardKind, dp_rank: int | None, mp_rank: int, bf16: bool
) -> None:
    file = parse_shard_name(Path("tag") / name)
    assert file is not None
    assert (file.kind, file.dp_rank, file.mp_rank, file.bf16) == (kind, dp_rank, mp_rank, bf16)


@pytest.mark.parametrize(
    "name",
    [
        "manifest.json",
        "ds_toolkit_rank_00000.pt",
        "zero_to_fp32.py",
        "mp_rank_00_model_states.pt.tmp",
        "bf16_zero_pp_rank_0_mp_rank_00_model_states.pt",
        "zero_pp_rank_x_mp_rank_00_optim_states.pt",
    ],
)
def test_other_names_are_nobodys(name: str) -> None:
    assert parse_shard_name(Path(name)) is None


def test_ranks_sort_as_numbers(tmp_path: Path) -> None:
    names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(12)]
    folder = make_tag(tmp_path, "tag", *reversed(names), "ds_toolkit_rank_00000.pt")
    assert [file.path.name for file in shard_files(folder)] == names


def test_tags_sort_as_numbers_and_hidden_folders_are_none(tmp_path: Path) -> None:
    for tag in ("global_step10", "global_step9", "final", ".global_step11.partial"):
        make_tag(tmp_path, tag)
    (tmp_path / "logs").mkdir()
    assert list_tags(tmp_path) == ["final", "global_step9", "global_step10"]


def test_latest_decides(tmp_path: Path) -> None:
    make_tag(tmp_path, "global_step1")
    wanted = make_tag(tmp_path, "global_step2")
    (tmp_path / "latest").write_text("global_step2\n")
    assert find_tag_folder(tmp_path) == wanted


def test_a_named_tag_beats_latest(tmp_path: Path) -> None:
    wanted = make_tag(tmp_path, "global_step1")
    make_tag(tmp_path, "global_step2")
    (tmp_path / "latest").write_text("global_step2")
    assert find_tag_folder(tmp_path, "global_step1") == wanted
    assert find_tag_folder(wanted) == wanted
    assert find_tag_folder(wanted, "global_step1") == wanted


def test_the_only_tag_needs_no_latest(tmp_path: Path) -> None:
    wanted = make_tag(tmp_path, "global_step1")
    assert find_tag_folder(tmp_path) == wanted


def test_a_directory_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match="does not exist") as caught:
        find_tag_folder(tmp_path / "nowhere")
    assert caught.value.where == str(tmp_path / "nowhere")


def test_a_shard_instead_of_a_directory(tmp_path: Path) -> None:
    folder = make_tag(tmp_path, "tag")
    with pytest.raises(ToolkitError, match="is a file, not a directory"):
        find_tag_folder(folder / MODEL_FILE)


def test_a_directory_without_a_tag(tmp_path: Path) -> None:
    make_tag(tmp_path, ".global_step1.partial")
    with pytest.raises(ToolkitError, match="no checkpoint in this directory") as caught:
        find_tag_folder(tmp_path)
    assert "never committed" in str(caught.value.why)


def test_other_kinds_of_checkpoint_are_named(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").touch()
    with pytest.raises(ToolkitError) as caught:
        find_tag_folder(tmp_path)
    assert "DCP" in str(caught.value.why)


def test_several_tags_and_no_latest(tmp_path: Path) -> None:
    make_tag(tmp_path, "global_step1")
    make_tag(tmp_path, "global_step2")
    with pytest.raises(ToolkitError, match="no file `latest`") as caught:
        find_tag_folder(tmp_path)
    assert "global_step1, global_step2" in str(caught.value.fix)


@pytest.mark.parametrize(
    "content", ["global_step9", "", "../elsewhere", "/etc", ".global_step1.partial", "a\0b"]
)
def test_latest_names_a_tag_that_is_not_there(tmp_path: Path, content: str) -> None:
    save_directory = tmp_path / "checkpoints"
    make_tag(save_directory, "global_step1")
    make_tag(save_directory, ".global_step1.partial")
    make_tag(tmp_path, "elsewhere")
    (save_directory / "latest").write_text(content)
    with pytest.raises(ToolkitError, match="`latest` names the tag") as caught:
        find_tag_folder(save_directory)
    assert caught.value.where == str(save_directory / "latest")
    assert caught.value.why == "there are global_step1"


@pytest.mark.parametrize("tag", ["global_step9", "../elsewhere", ".global_step1.partial"])
def test_a_named_tag_that_is_not_there(tmp_path: Path, tag: str) -> None:
    save_directory = tmp_path / "checkpoints"
    make_tag(save_directory, "global_step1")
    make_tag(save_directory, ".global_step1.partial")
    make_tag(tmp_path, "elsewhere")
    with pytest.raises(ToolkitError, match="there is no tag") as caught:
        find_tag_folder(save_directory, tag)
    assert caught.value.why == "there are global_step1"


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (
            (MODEL_FILE, "layer_00-model_states.pt", "layer_0_expert_0_mp_rank_00_model_states.pt"),
            "experts that a pipeline",
        ),
        (
            (MODEL_FILE, "mp_rank_01_model_states.pt", "layer_0_expert_0_mp_rank_00_model_states.pt"),
            "tensor parallelism",
        ),
        (("zero_pp_rank_0_mp_rank_00_optim_states.pt",), "no model states"),
    ],
)
def test_layouts_that_cannot_be_read_are_named(tmp_path: Path, names: tuple[str, ...], what: str) -> None:
    folder = make_tag(tmp_path, "tag", *names)
    with pytest.raises(ToolkitError, match=what):
        refuse_unsupported(folder, shard_files(folder))
