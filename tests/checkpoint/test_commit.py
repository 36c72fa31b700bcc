"""The commit protocol, cut off at every line of code, seen with real files and real processes."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from ds_toolkit import files
from ds_toolkit.checkpoint import commit
from ds_toolkit.checkpoint.manifest import MANIFEST_NAME, Manifest, RankManifest, RunShape
from ds_toolkit.checkpoint.newest import survey
from ds_toolkit.checkpoint.verify import verify_crcs
from ds_toolkit.errors import ToolkitError

SHAPE = RunShape(world_size=2, dp_world_size=2, mp_world_size=1, zero_stage=2, precision="fp32")
CUT_OFF = 77
PROTOCOL = {commit.__file__, sys.modules["ds_toolkit.checkpoint.manifest"].__file__, files.__file__}


def save(directory: Path, tag: str, step: int) -> Manifest:
    """What two ranks do to save: write, seal, commit."""
    folder = commit.begin(directory, tag)
    for rank in (0, 1):
        names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", f"ds_toolkit_rank_{rank:05d}.pt"]
        if rank == 0:
            names.append("mp_rank_00_model_states.pt")
        for name in names:
            (folder / name).write_bytes(f"{name} of step {step}".encode() * 100)
        commit.seal(folder, rank, step, SHAPE, names)
    (folder / "offloaded").mkdir()
    (folder / "offloaded" / "swapped.tensor").write_bytes(b"swapped" * step)
    return commit.commit(directory, tag, kind="periodic", patience_seconds=0)


def whole_steps(directory: Path) -> list[int]:
    """Steps of the tags whose every byte is right, newest first."""
    candidates, _ = survey(directory)
    assert all(candidate.manifest for candidate in candidates)
    return [
        candidate.step
        for candidate in candidates
        if not verify_crcs(candidate.folder, candidate.manifest.files)
    ]


def run_cut_off_at(moment: int, action: Callable[[], object], lines: Path) -> int:
    """Run an action in a child that dies by os._exit before the n-th line of protocol code; its exit code.

    `lines` gets the lines that the child came to, one each, as `file:number`.
    """
    child = os.fork()
    if child == 0:
        seen: list[str] = []

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            if frame.f_code.co_filename not in PROTOCOL:
                return None
            if event == "line":
                seen.append(f"{frame.f_code.co_filename}:{frame.f_lineno}\n")
                if len(seen) == moment:
                    os._exit(CUT_OFF)
            return trace

        exit_code = 1
        with contextlib.suppress(BaseException):
            sys.settrace(trace)
            action()
            sys.settrace(None)
            lines.write_text("".join(seen))
            exit_code = 0
        os._exit(exit_code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def moments_of(action: Callable[[], object], lines: Path) -> list[int]:
    """When to die: before the first and before the last execution of every line that the action comes to."""
    assert run_cut_off_at(-1, action, lines) == 0
    visited = lines.read_text().splitlines()
    first = {line: moment for moment, line in reversed(list(enumerate(visited, start=1)))}
    last = {line: moment for moment, line in enumerate(visited, start=1)}
    assert len(first) > 3
    return sorted({*first.values(), *last.values()})


def cut_off_everywhere(
    action: Callable[[Path], object],
    prepare: Callable[[Path], object],
    check: Callable[[Path, str], None],
    root: Path,
) -> int:
    """Cut the action off at each of its moments; check what is left each time; the number of moments."""
    lines = root / "lines.txt"
    prepare(root / "whole")
    moments = moments_of(lambda: action(root / "whole"), lines)
    for moment in moments:
        directory = root / f"cut_{moment}"
        prepare(directory)
        assert run_cut_off_at(moment, lambda directory=directory: action(directory), lines) == CUT_OFF
        check(directory, lines.read_text().splitlines()[moment - 1])
        shutil.rmtree(directory)
    return len(moments)


def check_what_is_left(directory: Path, line: str) -> None:
    context = f"cut off before {line}"
    steps = whole_steps(directory)
    assert steps[0] in (10, 20), context
    _, passed_over = survey(directory)
    assert passed_over == [], context
    latest = (directory / "latest").read_text()
    assert (directory / latest / MANIFEST_NAME).exists(), context
    commit.sweep(directory)
    assert whole_steps(directory)[0] in (10, 20), context
    assert not [path for path in directory.iterdir() if path.name.startswith(".")], context
    # Whatever happened, the next save works.
    save(directory, "global_step30", 30)
    assert whole_steps(directory)[0] == 30, context


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A folder in memory: thousands of saves, each flushed file by file, would wear out a disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="ds_toolkit_test_") as folder:
        yield Path(folder)


def check_after_a_replacement_in_two_steps(directory: Path, line: str) -> None:
    """Between its two renames the name is free; the next writer's `sweep` closes that gap."""
    commit.sweep(directory)
    check_what_is_left(directory, line)


class TestCutOff:
    def test_a_new_tag(self, memory_path: Path) -> None:
        moments = cut_off_everywhere(
            lambda directory: save(directory, "global_step20", 20),
            lambda directory: save(directory, "global_step10", 10),
            check_what_is_left,
            memory_path,
        )
        # A tracer that sees nothing of the protocol would make this test an empty one.
        assert moments > 100

    def test_a_tag_that_replaces_one_of_its_name(self, memory_path: Path) -> None:
        moments = cut_off_everywhere(
            lambda directory: save(directory, "best", 20),
            lambda directory: save(directory, "best", 10),
            check_what_is_left,
            memory_path,
        )
        assert moments > 100

    def test_replacing_without_an_atomic_exchange(
        self, memory_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(commit, "exchange", lambda first, second: False)
        moments = cut_off_everywhere(
            lambda directory: save(directory, "best", 20),
            lambda directory: save(directory, "best", 10),
            check_after_a_replacement_in_two_steps,
            memory_path,
        )
        assert moments > 100

    def test_deleting(self, memory_path: Path) -> None:
        def prepare(directory: Path) -> None:
            save(directory, "global_step5", 5)
            save(directory, "global_step10", 10)

        moments = cut_off_everywhere(
            lambda directory: commit.delete(directory / "global_step5"),
            prepare,
            check_what_is_left,
            memory_path,
        )
        assert moments > 5


class TestDurability:
    def test_everything_is_flushed_before_it_becomes_visible(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        flushed: set[str] = set()
        renamed: list[tuple[str, str]] = []
        real_fsync, real_rename = os.fsync, os.rename

        def fsync(descriptor: int) -> None:
            real_fsync(descriptor)
            flushed.add(str(Path(f"/proc/self/fd/{descriptor}").readlink()))

        def rename(source: Any, target: Any, **kwargs: Any) -> None:
            if Path(target) == tmp_path / "global_step20":
                content = [str(path) for path in Path(source).rglob("*")]
                assert content
                not_flushed = set(content) - flushed - {str(source / Path(MANIFEST_NAME))}
                assert not not_flushed, "renamed before all of it was flushed"
                assert str(source) in flushed
                assert any(name.startswith(f"{source}/.{MANIFEST_NAME}") for name in flushed)
            real_rename(source, target, **kwargs)
            renamed.append((str(source), str(target)))

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "rename", rename)
        save(tmp_path, "global_step20", 20)
        assert (str(tmp_path / ".global_step20.partial"), str(tmp_path / "global_step20")) in renamed
        assert str(tmp_path) in flushed


class TestAgreement:
    def test_a_missing_rank_is_named(self, tmp_path: Path) -> None:
        folder = commit.begin(tmp_path, "global_step1")
        commit.seal(folder, 0, 1, SHAPE, [])
        with pytest.raises(ToolkitError, match="rank 1 has not sealed") as caught:
            commit.commit(tmp_path, "global_step1", kind="periodic", patience_seconds=0)
        assert "shared" in str(caught.value) or "share" in str(caught.value)
        assert not (tmp_path / "global_step1").exists()
        assert not (tmp_path / "latest").exists()

    def test_ranks_of_different_steps_are_refused(self, tmp_path: Path) -> None:
        folder = commit.begin(tmp_path, "global_step1")
        commit.seal(folder, 0, 1, SHAPE, [])
        commit.seal(folder, 1, 2, SHAPE, [])
        with pytest.raises(ToolkitError, match="step is 1 on rank 0 and 2 on rank 1"):
            commit.commit(tmp_path, "global_step1", kind="periodic", patience_seconds=0)

    def test_the_manifest_covers_every_file(self, tmp_path: Path) -> None:
        manifest = save(tmp_path, "global_step3", 3)
        on_disk = {
            path.relative_to(tmp_path / "global_step3").as_posix()
            for path in (tmp_path / "global_step3").rglob("*")
            if path.is_file()
        }
        assert {file.name for file in manifest.files} == on_disk - {MANIFEST_NAME}
        assert Manifest.read(tmp_path / "global_step3") == manifest
        ranks = {file.name: file.rank for file in manifest.files}
        assert ranks["ds_toolkit_rank_00001.pt"] == 1
        assert ranks["offloaded/swapped.tensor"] is None

    def test_the_place_of_something_else_is_not_taken(self, tmp_path: Path) -> None:
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "corpus.txt").write_text("irreplaceable")
        with pytest.raises(ToolkitError, match="not a checkpoint"):
            commit.begin(tmp_path, "data")
        assert (tmp_path / "data" / "corpus.txt").read_text() == "irreplaceable"

    @pytest.mark.parametrize("tag", ["", ".hidden", "a/b", "..", "latest", "two words", "x" * 201])
    def test_names_that_cannot_be_tags(self, tmp_path: Path, tag: str) -> None:
        with pytest.raises(ToolkitError, match="cannot be a tag"):
            commit.begin(tmp_path, tag)
        assert list(tmp_path.iterdir()) == []


class TestManifest:
    def test_a_name_that_leads_out_of_the_tag_is_refused(self, tmp_path: Path) -> None:
        save(tmp_path, "global_step3", 3)
        path = tmp_path / "global_step3" / MANIFEST_NAME
        path.write_text(path.read_text().replace("mp_rank_00_model_states.pt", "../../etc/passwd"))
        with pytest.raises(ToolkitError, match=r"leads out of the tag"):
            Manifest.read(tmp_path / "global_step3")

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("", "cannot be read"),
            ("[]", "not a JSON object"),
            ('{"format": 2}', "format 2"),
            ('{"format": 1}', "it has no 'tag'"),
            ('{"format": 1, "tag": "a", "step": "x"}', "invalid literal"),
        ],
    )
    def test_what_is_no_manifest(self, tmp_path: Path, text: str, said: str) -> None:
        (tmp_path / MANIFEST_NAME).write_text(text)
        with pytest.raises(ToolkitError, match=said) as caught:
            Manifest.read(tmp_path)
        assert str(tmp_path / MANIFEST_NAME) in str(caught.value)

    def test_a_rank_manifest_reads_back(self, tmp_path: Path) -> None:
        (tmp_path / "shard.pt").write_bytes(b"123456789")
        sealed = commit.seal(tmp_path, 1, 7, SHAPE, ["shard.pt"])
        assert RankManifest.read(tmp_path, 1) == sealed
        # The check value of CRC-32 for these nine digits.
        assert sealed.files[0].crc32 == 0xCBF43926
        assert sealed.files[0].size_bytes == 9


def test_a_full_disk_leaves_nothing_under_the_final_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, "global_step10", 10)
    before = sorted(path.name for path in tmp_path.iterdir())
    real_replace = Path.replace

    def replace(self: Path, target: Any) -> Path:
        if Path(target).name == MANIFEST_NAME:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        return real_replace(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, "global_step20", 20)
    commit.abandon(tmp_path, "global_step20")
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert (tmp_path / "latest").read_text() == "global_step10"
