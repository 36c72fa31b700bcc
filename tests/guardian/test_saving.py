"""Periodic checkpoints, copied by a real guardian out of slots of real processes."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import fake_rank
import pytest

from ds_toolkit.checkpoint.manifest import Manifest
from ds_toolkit.checkpoint.newest import survey
from ds_toolkit.checkpoint.verify import verify_crcs
from ds_toolkit.errors import ToolkitError
from ds_toolkit.guardian import writing
from ds_toolkit.guardian.arena import Arena
from ds_toolkit.guardian.deadline import Deadline
from ds_toolkit.guardian.writing import Giving, SlotChangedError, copy_slot

NAMES = [
    "ds_toolkit_rank_00000.pt",
    "ds_toolkit_rank_00001.pt",
    "mp_rank_00_model_states.pt",
    "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "zero_pp_rank_1_mp_rank_00_optim_states.pt",
]


def check_tag(directory: Path, tag: str, step: int) -> Manifest:
    """Every byte of a tag is right, and so is what its manifest says of it."""
    manifest = Manifest.read(directory / tag)
    assert manifest.step == step
    assert sorted(file.name for file in manifest.files) == NAMES
    assert sorted(path.name for path in (directory / tag).iterdir()) == sorted([*NAMES, "manifest.json"])
    for name in NAMES:
        assert (directory / tag / name).read_bytes() == fake_rank.content(name, step)
    assert verify_crcs(directory / tag, manifest.files) == []
    return manifest


def test_all_ranks_ask_and_it_is_committed(tmp_path: Path, root: Path) -> None:
    with fake_rank.FakeJob(fake_rank.job(tmp_path, "0000abcd"), root) as job:
        job.write(4)
        job.save("0000001a", "global_step5", 5)
        for heard in job.hear():
            assert heard["event"] == "saved"
            assert (heard["tag"], heard["step"]) == ("global_step5", 5)
            assert heard["total_bytes"] == len(NAMES) * fake_rank.SHARD_BYTES
            assert heard["write_seconds"] > 0
        assert all(rank.look()["wanted"] == [0, 0, 0] for rank in job.ranks)
    manifest = check_tag(tmp_path, "global_step5", 5)
    assert (manifest.kind, manifest.versions) == ("periodic", {"torch": "none"})
    assert {file.name: file.rank for file in manifest.files}["mp_rank_00_model_states.pt"] == 0
    assert (tmp_path / "latest").read_text() == "global_step5"
    assert [candidate.step for candidate in survey(tmp_path)[0]] == [5]


def test_only_as_many_as_are_kept(tmp_path: Path, root: Path) -> None:
    with fake_rank.FakeJob(fake_rank.job(tmp_path, "0000abcd", keep_last=2), root) as job:
        for step in (1, 2, 3, 4):
            job.save(f"{step:08x}", f"global_step{step}", step)
            job.hear()
        fake_rank.await_gone(tmp_path / "global_step2")
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["global_step3", "global_step4", "latest"]
    check_tag(tmp_path, "global_step4", 4)


def test_two_saves_at_once_are_written_one_after_the_other(tmp_path: Path, root: Path) -> None:
    with fake_rank.FakeJob(fake_rank.job(tmp_path, "0000abcd"), root) as job:
        job.stop_guardian()
        job.save("0000000a", "first", 1)
        job.save("0000000b", "second", 2)
        job.continue_guardian()
        assert [[heard["tag"] for heard in job.hear()] for _ in range(2)] == [["first"] * 2, ["second"] * 2]
    check_tag(tmp_path, "first", 1)
    check_tag(tmp_path, "second", 2)


def test_a_rank_without_the_slot_fails_the_save_and_nothing_else(tmp_path: Path, root: Path) -> None:
    with fake_rank.FakeJob(fake_rank.job(tmp_path, "0000abcd"), root) as job:
        job.ranks[0].write(1, "0000000a")
        job.ranks[1].write(1)
        for rank in job.ranks:
            rank.save("0000000a", "global_step1", 1)
        for heard in job.hear():
            assert heard["event"] == "failed"
            assert "rank 1 has no whole slot of step 1" in heard["why"]
        assert job.ranks[0].look()["wanted"] == [0, 0, 0]
        assert list(tmp_path.glob("*global_step1*")) == []
        job.save("0000000b", "global_step2", 2)
        assert [heard["event"] for heard in job.hear()] == ["saved"] * 2
    check_tag(tmp_path, "global_step2", 2)


@pytest.mark.parametrize("may_mount", [True, False])
def test_a_full_disk_fails_the_save_and_nothing_else(tmp_path: Path, root: Path, may_mount: bool) -> None:
    """A small tmpfs where that may be mounted; else, and besides, a limit on the sizes of files."""
    with (
        small_disk(tmp_path / "disk", may_mount) as is_mounted,
        fake_rank.FakeJob(fake_rank.job(tmp_path / "disk", "0000abcd"), root, start=False) as job,
    ):
        if is_mounted:
            job.start()
            (tmp_path / "disk" / "ballast").write_bytes(bytes(400 * 1024))
        else:
            starter = fake_rank.FakeRank(job.arena, 7)
            starter.limit_file_sizes(fake_rank.SHARD_BYTES - 1)
            starter.start()
            starter.kill()
            job.start()
        job.save("0000000a", "global_step1", 1)
        for heard in job.hear():
            assert heard["event"] == "failed"
            assert ("No space left" if is_mounted else "File too large") in heard["why"]
        assert job.ranks[0].look()["wanted"] == [0, 0, 0]
        assert list((tmp_path / "disk").glob("*global_step*")) == []
        if is_mounted:
            (tmp_path / "disk" / "ballast").unlink()
            job.save("0000000b", "global_step2", 2)
            assert [heard["event"] for heard in job.hear()] == ["saved"] * 2
            check_tag(tmp_path / "disk", "global_step2", 2)


@contextlib.contextmanager
def small_disk(folder: Path, may_mount: bool) -> Iterator[bool]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", folder]
    is_mounted = may_mount and subprocess.run(mount, capture_output=True, timeout=20).returncode == 0
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", folder], check=True, timeout=20)


def test_a_directory_that_is_gone_is_not_made_anew(tmp_path: Path, root: Path) -> None:
    """It may be a mount that was lost: what lies below it is another disk."""
    directory = tmp_path / "checkpoints"
    with fake_rank.FakeJob(fake_rank.job(directory, "0000abcd"), root) as job:
        directory.rename(tmp_path / "lost")
        job.save("0000000a", "global_step1", 1)
        for heard in job.hear():
            assert "the checkpoint directory is gone" in heard["why"]
        assert not directory.exists()
        (tmp_path / "lost").rename(directory)
        job.save("0000000b", "global_step2", 2)
        assert [heard["event"] for heard in job.hear()] == ["saved"] * 2
    check_tag(directory, "global_step2", 2)


def test_scripts_are_laid_beside_the_tags(tmp_path: Path, root: Path) -> None:
    with fake_rank.FakeJob(fake_rank.job(tmp_path, "0000abcd"), root) as job:
        job.arena.scripts_folder.mkdir()
        (job.arena.scripts_folder / "zero_to_fp32.py").write_text("print('new')")
        (tmp_path / "zero_to_fp32.py").write_text("print('old')")
        job.save("0000000a", "global_step1", 1)
        job.hear()
    assert (tmp_path / "zero_to_fp32.py").read_text() == "print('new')"


@pytest.mark.parametrize("moment", ["before", "while"])
def test_a_slot_that_is_written_over_is_not_given(
    tmp_path: Path, root: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = Arena.create(fake_rank.job(tmp_path, "0000abcd"), root)
    rank = fake_rank.Rank(arena, 0, 1)
    rank.write(1)
    giving = Giving(0, rank.page, rank.page.slot(0), rank.page.slot(0).kinds)
    real_copy = writing.copy_file

    def copy(source: Path, target: Path, deadline: Deadline) -> tuple[int, int]:
        copied = real_copy(source, target, deadline)
        rank.write(2)
        return copied

    if moment == "before":
        rank.write(2)
    else:
        monkeypatch.setattr(writing, "copy_file", copy)
    with pytest.raises(SlotChangedError, match="slot 0 of rank 0 was written over"):
        copy_slot(arena, giving, tmp_path / "tag", Deadline())


def test_copying_ends_with_the_deadline(tmp_path: Path, root: Path) -> None:
    arena = Arena.create(fake_rank.job(tmp_path, "0000abcd"), root)
    rank = fake_rank.Rank(arena, 0, 1)
    rank.write(1)
    giving = Giving(0, rank.page, rank.page.slot(0), rank.page.slot(0).kinds)
    with pytest.raises(ToolkitError, match="time for writing"):
        copy_slot(arena, giving, tmp_path / "tag", Deadline(-1.0))


class TestTwoNodes:
    def test_each_copies_its_part_and_one_commits(self, tmp_path: Path, root: Path) -> None:
        with fake_rank.two_nodes(tmp_path, root) as (first, second):
            for job in (first, second):
                job.save("0000000a", "global_step1", 1)
            assert [job.hear()[0]["event"] for job in (first, second)] == ["saved"] * 2
        check_tag(tmp_path, "global_step1", 1)

    def test_what_one_cannot_give_fails_it_for_both(self, tmp_path: Path, root: Path) -> None:
        with fake_rank.two_nodes(tmp_path, root) as (first, second):
            second.ranks[0].save("0000000a", "global_step1", 1)
            first.save("0000000a", "global_step1", 1)
            (heard,) = first.hear()
            assert heard["event"] == "failed"
            assert "node 1 gave up" in heard["why"]
            assert "rank 1 has no whole slot" in heard["why"]
            assert second.hear()[0]["event"] == "failed"
        assert list(tmp_path.glob("*global_step1*")) == []
