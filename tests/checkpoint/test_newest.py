"""What a look at a directory finds, tag by tag."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from ds_toolkit.checkpoint import commit
from ds_toolkit.checkpoint.manifest import MANIFEST_NAME, WEIGHTS_ONLY, Manifest, RunShape
from ds_toolkit.checkpoint.newest import survey
from ds_toolkit.checkpoint.tag_folders import committed
from ds_toolkit.checkpoint.verify import verify_crcs, verify_sizes

SHAPE = RunShape(world_size=1, dp_world_size=1, mp_world_size=1, zero_stage=1, precision="fp32")
SHARD = "mp_rank_00_model_states.pt"


def save(directory: Path, step: int, tag: str | None = None) -> Manifest:
    partial = commit.PartialTag(directory, tag or f"global_step{step}", commit.new_save_id())
    commit.begin(partial)
    (partial.folder / SHARD).write_bytes(b"weights" * step)
    commit.seal(partial, 0, step, SHAPE, [SHARD])
    return commit.commit(partial, kind="periodic")


def found(directory: Path) -> tuple[list[str], list[str]]:
    candidates, passed_over = survey(directory)
    return [candidate.tag for candidate in candidates], [broken.tag for broken in passed_over]


def test_newest_first_by_number(tmp_path: Path) -> None:
    for step in (9, 100, 20):
        save(tmp_path, step)
    assert found(tmp_path) == (["global_step100", "global_step20", "global_step9"], [])


def test_of_equal_steps_the_later_commit_comes_first(tmp_path: Path) -> None:
    for tag, created_at in (("b", "2021"), ("a", "2020"), ("c", "2019")):
        manifest = save(tmp_path, 5, tag)
        dataclasses.replace(manifest, created_at=created_at).write(tmp_path / tag)
    assert found(tmp_path)[0] == ["b", "a", "c"]


def test_nothing_there(tmp_path: Path) -> None:
    assert found(tmp_path / "none") == ([], [])
    (tmp_path / "lost+found").mkdir(mode=0o000)
    (tmp_path / ".global_step3.0123abcd.partial").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "zero_to_fp32.py").write_text("")
    assert found(tmp_path) == ([], [])


def test_what_cannot_be_looked_into_is_not_a_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    (tmp_path / "lost+found").mkdir()
    real_iterdir = Path.iterdir

    def iterdir(self: Path) -> object:
        if self.name == "lost+found":
            raise PermissionError(13, "Permission denied", str(self))
        return real_iterdir(self)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert found(tmp_path) == (["global_step1"], [])


@pytest.mark.parametrize("latest", [b"global_step1", b"global_step1\n", b"\xff\xfe", b"gone", b"", b"\0"])
def test_whatever_latest_says_the_tags_are_found(tmp_path: Path, latest: bytes) -> None:
    save(tmp_path, 1)
    (tmp_path / "latest").write_bytes(latest)
    candidates, passed_over = survey(tmp_path)
    assert [candidate.tag for candidate in candidates] == ["global_step1"]
    lost = [broken for broken in passed_over if "no such checkpoint" in str(broken)]
    assert len(lost) == (0 if latest.strip() == b"global_step1" else 1)


def test_a_tag_without_its_shards_is_a_broken_tag(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "global_step1" / SHARD).unlink()
    candidates, (broken,) = survey(tmp_path)
    assert candidates == []
    assert "mp_rank_00_model_states.pt: the file is missing" in str(broken)


def test_weights_alone_are_passed_over_with_the_reason(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    manifest = Manifest.read(tmp_path / "global_step2")
    dataclasses.replace(manifest, kind=WEIGHTS_ONLY).write(tmp_path / "global_step2")
    candidates, (passed_over,) = survey(tmp_path)
    assert [candidate.step for candidate in candidates] == [1]
    assert "holds the weights alone" in str(passed_over)


def test_a_copy_under_another_name_is_not_ours_to_delete(tmp_path: Path) -> None:
    save(tmp_path, 1)
    shutil.copytree(tmp_path / "global_step1", tmp_path / "backup")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / MANIFEST_NAME).write_text("{")
    assert [manifest.tag for manifest in committed(tmp_path)] == ["global_step1"]


def test_sizes_and_crcs_name_the_file_and_both_values(tmp_path: Path) -> None:
    manifest = save(tmp_path, 3)
    folder = tmp_path / "global_step3"
    assert verify_sizes(folder, manifest) == verify_crcs(folder, manifest.files) == []
    (folder / SHARD).write_bytes(b"weighty" * 3)
    assert verify_sizes(folder, manifest) == []
    (finding,) = verify_crcs(folder, manifest.files)
    assert finding.code == "DS903"
    assert f"{manifest.files[0].crc32:08x}" in finding.message
    (folder / SHARD).write_bytes(b"weights")
    for (finding,) in (verify_sizes(folder, manifest), verify_crcs(folder, manifest.files)):
        assert finding.code == "DS902"
        assert "has 7 bytes and was written with 21" in finding.message
        assert finding.where.file == str(folder / SHARD)
