"""The commit protocol, cut off at every line of code, seen with real files and real processes."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from ds_toolkit import files
from ds_toolkit.checkpoint import commit
from ds_toolkit.checkpoint.manifest import MANIFEST_NAME, Manifest, ManifestFile, RankManifest, RunShape
from ds_toolkit.checkpoint.newest import survey
from ds_toolkit.checkpoint.sweeping import AGREEMENT_FOLDER, sweep
from ds_toolkit.checkpoint.verify import verify_crcs
from ds_toolkit.errors import ToolkitError

SHAPE = RunShape(world_size=2, dp_world_size=2, mp_world_size=1, zero_stage=2, precision="fp32")
CUT_OFF = 77
PROTOCOL = {commit.__file__, sys.modules["ds_toolkit.checkpoint.manifest"].__file__, files.__file__}


def save(directory: Path, tag: str, step: int, *, protected: bool = False) -> Manifest:
    """What two ranks do to save: write, seal, commit."""
    partial = commit.PartialTag(directory, tag, commit.new_save_id())
    commit.begin(partial)
    for rank in (0, 1):
        names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", f"ds_toolkit_rank_{rank:05d}.pt"]
        if rank == 0:
            names.append("mp_rank_00_model_states.pt")
        for name in names:
            (partial.folder / name).write_bytes(f"{name} of step {step}".encode() * 100)
        commit.seal(partial, rank, step, SHAPE, names)
    (partial.folder / "offloaded").mkdir()
    (partial.folder / "offloaded" / "swapped.tensor").write_bytes(b"swapped" * step)
    return commit.commit(partial, kind="periodic", protected=protected, patience_seconds=0)


def begun(directory: Path, tag: str = "global_step1") -> commit.PartialTag:
    partial = commit.PartialTag(directory, tag, commit.new_save_id())
    commit.begin(partial)
    return partial


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
    sweep(directory)
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
    sweep(directory)
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
    @pytest.fixture
    def events(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
        """What happens, in order: (`flush`, path), (`rename` or `exchange`, target), (`remove`, path)."""
        recorded: list[tuple[str, str]] = []
        real_fsync, real_rename, real_replace, real_exchange = os.fsync, os.rename, os.replace, files.exchange

        def fsync(descriptor: int) -> None:
            real_fsync(descriptor)
            recorded.append(("flush", str(Path(f"/proc/self/fd/{descriptor}").readlink())))

        def rename(source: Any, target: Any, **kwargs: Any) -> None:
            real_rename(source, target, **kwargs)
            recorded.append(("rename", str(target)))

        def replace(source: Any, target: Any, **kwargs: Any) -> None:
            real_replace(source, target, **kwargs)
            recorded.append(("rename", str(target)))

        def exchange(first: Path, second: Path) -> bool:
            done = real_exchange(first, second)
            recorded.append(("exchange", str(second)))
            return done

        real_remove = commit.remove

        def remove(path: Path) -> None:
            recorded.append(("remove", str(path)))
            real_remove(path)

        monkeypatch.setattr(commit, "remove", remove)
        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "rename", rename)
        monkeypatch.setattr(os, "replace", replace)
        monkeypatch.setattr(commit, "exchange", exchange)
        return recorded

    def test_everything_is_flushed_before_it_becomes_visible(
        self, tmp_path: Path, events: list[tuple[str, str]]
    ) -> None:
        save(tmp_path, "global_step20", 20)
        target = str(tmp_path / "global_step20")
        visible = events.index(("rename", target))
        flushed = {path for event, path in events[:visible] if event == "flush"}
        (folder,) = {path for path in flushed if path.endswith(".partial") and Path(path).parent == tmp_path}
        for path in (tmp_path / "global_step20").rglob("*"):
            name = path.relative_to(target)
            as_written = Path(folder) / name
            # A file that came by rename was flushed under its temporary name, and its folder after that.
            by_rename = [old for old in flushed if Path(old).name.startswith(f".{path.name}.")]
            assert str(as_written) in flushed or by_rename, name
        last_change = max(events.index(event) for event in events[:visible] if event[0] == "rename")
        assert ("flush", folder) in events[last_change:visible]

    @pytest.mark.parametrize("replaces", [False, True])
    def test_each_name_is_flushed_before_the_next_one_relies_on_it(
        self, tmp_path: Path, events: list[tuple[str, str]], replaces: bool
    ) -> None:
        if replaces:
            save(tmp_path, "best", 10)
            events.clear()
        save(tmp_path, "best", 20)
        visible = events.index(("exchange" if replaces else "rename", str(tmp_path / "best")))
        latest = events.index(("rename", str(tmp_path / "latest")))
        assert visible < latest
        if replaces:
            # The old checkpoint goes only when the new one is sure to stay.
            (removed,) = (number for number, event in enumerate(events) if event[0] == "remove")
            assert ("flush", str(tmp_path)) in events[visible:removed]
        assert ("flush", str(tmp_path)) in events[visible:latest]
        assert ("flush", str(tmp_path)) in events[latest:]

    def test_a_new_directory_is_flushed_into_its_parent(
        self, tmp_path: Path, events: list[tuple[str, str]]
    ) -> None:
        save(tmp_path / "deep" / "down", "global_step1", 1)
        assert ("flush", str(tmp_path)) in events
        assert ("flush", str(tmp_path / "deep")) in events

    def test_a_deleted_tag_is_hidden_and_flushed_before_its_files_go(
        self, tmp_path: Path, events: list[tuple[str, str]]
    ) -> None:
        save(tmp_path, "global_step5", 5)
        events.clear()
        commit.delete(tmp_path / "global_step5")
        hidden = str(tmp_path / ".global_step5.deleted")
        assert events == [("rename", hidden), ("flush", str(tmp_path)), ("remove", hidden)]


class TestAgreement:
    def test_a_missing_rank_is_named(self, tmp_path: Path) -> None:
        partial = begun(tmp_path)
        commit.seal(partial, 0, 1, SHAPE, [])
        with pytest.raises(ToolkitError, match="rank 1 has not sealed") as caught:
            commit.commit(partial, kind="periodic", patience_seconds=0)
        assert "storage that all nodes share" in str(caught.value)
        assert not (tmp_path / "global_step1").exists()
        assert not (tmp_path / "latest").exists()

    def test_a_rank_whose_manifest_becomes_visible_late(self, tmp_path: Path) -> None:
        partial = begun(tmp_path)
        commit.seal(partial, 0, 1, SHAPE, [])
        late = threading.Timer(0.4, lambda: commit.seal(partial, 1, 1, SHAPE, []))
        late.start()
        assert commit.commit(partial, kind="periodic", patience_seconds=20).step == 1
        late.join()

    def test_ranks_of_different_steps_are_refused(self, tmp_path: Path) -> None:
        partial = begun(tmp_path)
        commit.seal(partial, 0, 1, SHAPE, [])
        commit.seal(partial, 1, 2, SHAPE, [])
        with pytest.raises(ToolkitError, match="step is 1 on rank 0 and 2 on rank 1"):
            commit.commit(partial, kind="periodic", patience_seconds=0)

    def test_ranks_of_different_runs_are_refused(self, tmp_path: Path) -> None:
        partial = begun(tmp_path)
        commit.seal(partial, 0, 1, SHAPE, [])
        commit.seal(partial, 1, 1, dataclasses.replace(SHAPE, precision="bf16"), [])
        with pytest.raises(ToolkitError, match="precision is fp32 on rank 0 and bf16 on rank 1"):
            commit.commit(partial, kind="periodic", patience_seconds=0)

    def test_two_saves_of_one_tag_never_share_a_folder(self, tmp_path: Path) -> None:
        first, second = begun(tmp_path), begun(tmp_path)
        assert first.folder != second.folder
        for partial, content in ((first, b"first"), (second, b"second")):
            for rank in (0, 1):
                (partial.folder / f"shard{rank}.pt").write_bytes(content)
                commit.seal(partial, rank, 1, SHAPE, [f"shard{rank}.pt"])
        for partial, content in ((first, b"first"), (second, b"second")):
            commit.commit(partial, kind="periodic", patience_seconds=0)
            assert {path.read_bytes() for path in partial.target.glob("shard*")} == {content}

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
            begun(tmp_path, "data")
        assert (tmp_path / "data" / "corpus.txt").read_text() == "irreplaceable"

    @pytest.mark.parametrize("tag", ["", ".hidden", "a/b", "..", "latest", "two words", "x" * 201])
    def test_names_that_cannot_be_tags(self, tmp_path: Path, tag: str) -> None:
        with pytest.raises(ToolkitError, match="cannot be a tag"):
            begun(tmp_path, tag)
        assert list(tmp_path.iterdir()) == []


class TestWithoutLatest:
    def test_latest_stays_as_it_is(self, tmp_path: Path) -> None:
        save(tmp_path, "global_step1", 1)
        partial = begun(tmp_path, "weights-only-step2")
        for rank in (0, 1):
            commit.seal(partial, rank, 2, SHAPE, [])
        commit.commit(partial, kind="weights-only", patience_seconds=0, point_latest=False)
        assert (tmp_path / "latest").read_text() == "global_step1"
        assert (tmp_path / "weights-only-step2" / MANIFEST_NAME).exists()


class TestSealing:
    def test_known_crcs_are_not_computed_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        partial = begun(tmp_path)
        (partial.folder / "shard.pt").write_bytes(b"123456789")
        monkeypatch.setattr(commit, "crc32_of", lambda path: pytest.fail(f"{path} is read"))
        file = ManifestFile("shard.pt", 9, 0xCBF43926, 0)
        commit.seal_flushed(partial, 0, 1, SHAPE, [file])
        commit.seal_flushed(partial, 1, 1, SHAPE, [])
        assert commit.commit(partial, kind="periodic", patience_seconds=0).files == (file,)


class TestManifest:
    def test_a_name_that_leads_out_of_the_tag_is_refused(self, tmp_path: Path) -> None:
        manifest = save(tmp_path, "global_step3", 3)
        outside = dataclasses.replace(manifest.files[0], name="../../etc/passwd")
        dataclasses.replace(manifest, files=(outside,)).write(tmp_path / "global_step3")
        with pytest.raises(ToolkitError, match=r"leads out of the tag"):
            Manifest.read(tmp_path / "global_step3")

    def test_a_tag_that_leads_out_of_the_directory_is_refused(self, tmp_path: Path) -> None:
        manifest = save(tmp_path, "global_step3", 3)
        dataclasses.replace(manifest, tag="../victim").write(tmp_path / "global_step3")
        with pytest.raises(ToolkitError, match="cannot be a tag"):
            Manifest.read(tmp_path / "global_step3")

    def test_a_changed_digit_is_noticed(self, tmp_path: Path) -> None:
        save(tmp_path, "global_step3", 3)
        path = tmp_path / "global_step3" / MANIFEST_NAME
        path.write_text(path.read_text().replace('"step": 3', '"step": 8'))
        with pytest.raises(ToolkitError, match="content has changed"):
            Manifest.read(tmp_path / "global_step3")

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("", "cannot be read"),
            ("[]", "not a JSON object"),
            ('{"format": 2}', "format 2"),
            ('{"format": 1}', "content has changed"),
        ],
    )
    def test_what_is_no_manifest(self, tmp_path: Path, text: str, said: str) -> None:
        (tmp_path / MANIFEST_NAME).write_text(text)
        with pytest.raises(ToolkitError, match=said) as caught:
            Manifest.read(tmp_path)
        assert str(tmp_path / MANIFEST_NAME) in str(caught.value)

    def test_a_rank_manifest_reads_back(self, tmp_path: Path) -> None:
        partial = begun(tmp_path)
        (partial.folder / "shard.pt").write_bytes(b"123456789")
        sealed = commit.seal(partial, 1, 7, SHAPE, ["shard.pt"])
        assert RankManifest.read(partial.folder, 1) == sealed
        # The check value of CRC-32 for these nine digits.
        assert sealed.files[0].crc32 == 0xCBF43926
        assert sealed.files[0].size_bytes == 9


class TestReplacing:
    def test_a_protected_tag_stays_protected(self, tmp_path: Path) -> None:
        save(tmp_path, "best", 1, protected=True)
        assert save(tmp_path, "best", 2).protected
        assert Manifest.read(tmp_path / "best").step == 2

    def test_a_tag_that_lies_elsewhere(self, tmp_path: Path) -> None:
        """Old tags are moved to another disk and linked; a link may go, what it points to may not."""
        directory = tmp_path / "checkpoints"
        for step in (1, 2):
            save(directory, f"global_step{step}", step)
            (directory / f"global_step{step}").rename(attic := tmp_path / f"attic{step}")
            (directory / f"global_step{step}").symlink_to(attic)
        commit.delete(directory / "global_step1")
        save(directory, "global_step2", 2)
        assert (tmp_path / "attic1" / MANIFEST_NAME).exists()
        assert (tmp_path / "attic2" / MANIFEST_NAME).exists()
        assert sorted(path.name for path in directory.iterdir()) == ["global_step2", "latest"]
        assert not (directory / "global_step2").is_symlink()


class TestFailures:
    def test_a_full_disk_leaves_nothing_under_the_final_name(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save(tmp_path, "global_step10", 10)
        before = sorted(path.name for path in tmp_path.iterdir())
        partial = begun(tmp_path, "global_step20")
        for rank in (0, 1):
            commit.seal(partial, rank, 20, SHAPE, [])
        fail_to_rename_to(MANIFEST_NAME, monkeypatch)
        with pytest.raises(OSError, match="No space left"):
            commit.commit(partial, kind="periodic", patience_seconds=0)
        commit.abandon(partial)
        assert sorted(path.name for path in tmp_path.iterdir()) == before
        assert (tmp_path / "latest").read_text() == "global_step10"

    def test_only_latest_cannot_be_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        save(tmp_path, "global_step10", 10)
        fail_to_rename_to("latest", monkeypatch)
        with pytest.raises(ToolkitError, match="is whole and in its place, but `latest` cannot be written"):
            save(tmp_path, "global_step20", 20)
        assert whole_steps(tmp_path) == [20, 10]
        assert (tmp_path / "latest").read_text() == "global_step10"

    def test_sweeping_removes_what_guardians_agreed_on(self, tmp_path: Path) -> None:
        folder = tmp_path / AGREEMENT_FOLDER / "0000abcd"
        folder.mkdir(parents=True)
        (folder / "decision.json").write_text("{}")
        (line,) = sweep(tmp_path)
        assert "job 0000abcd" in line
        assert list(tmp_path.iterdir()) == []

    def test_sweeping_takes_only_what_saves_leave(self, tmp_path: Path) -> None:
        save(tmp_path, "global_step10", 10)
        begun(tmp_path, "global_step20")
        for name in (".model.bin.4711.partial", ".git.partial", ".notes", "x.partial"):
            (tmp_path / name).mkdir()
        (tmp_path / ".latest.123.partial").write_text("global")
        lines = sweep(tmp_path)
        assert len(lines) == 2
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            ".git.partial",
            ".model.bin.4711.partial",
            ".notes",
            "global_step10",
            "latest",
            "x.partial",
        ]


def fail_to_rename_to(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real_replace = Path.replace

    def replace(self: Path, target: Any) -> Path:
        if Path(target).name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        return real_replace(self, target)

    monkeypatch.setattr(Path, "replace", replace)
