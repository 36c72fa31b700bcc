"""Outputs appear whole, whatever instruction the process dies at, and dead runs leave nothing for long."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from ds_toolkit import files
from ds_toolkit.convert import placing
from ds_toolkit.convert.placing import whole_folder, whole_output
from ds_toolkit.convert.targets import FORMATS
from ds_toolkit.errors import ToolkitError

SAFETENSORS = FORMATS["safetensors"]
CUT_OFF = 77
OLD = {SAFETENSORS.shard(number, 3): f"old {number}" for number in (1, 2, 3)} | {
    SAFETENSORS.index: "old index"
}
NEW = {SAFETENSORS.shard(number, 2): f"new {number}" for number in (1, 2)} | {SAFETENSORS.index: "new index"}
OLD_SINGLE, NEW_SINGLE = {SAFETENSORS.single: "old"}, {SAFETENSORS.single: "new"}
OTHERS = {"config.json": "{}", "pytorch_model.bin": "another format"}


def put(folder: Path, contents: dict[str, str]) -> None:
    folder.mkdir(exist_ok=True)
    for name, text in contents.items():
        (folder / name).write_text(text)


def held(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def write_set(folder: Path, contents: dict[str, str], *, force: bool = True) -> None:
    last = SAFETENSORS.index if SAFETENSORS.index in contents else SAFETENSORS.single
    with whole_folder(folder, last=last, replaced=SAFETENSORS.is_own, force=force) as staged:
        for name, text in contents.items():
            (staged / name).write_text(text)


def cut_off(moment: int, action: Callable[[], object], lines: Path) -> int:
    """The exit code of a child that dies before the n-th line of placing.py that it comes to."""
    child = os.fork()
    if child == 0:
        count = 0

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal count
            if frame.f_code.co_filename != placing.__file__:
                return None
            if event == "line":
                count += 1
                if count == moment:
                    os._exit(CUT_OFF)
            return trace

        exit_code = 1
        with contextlib.suppress(BaseException):
            sys.settrace(trace)
            action()
            sys.settrace(None)
            lines.write_text(str(count))
            exit_code = 0
        os._exit(exit_code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture
def without_flushing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies loses nothing of what it wrote: no need to wait for the disk hundreds of times."""
    for name in ("fsync_file", "fsync_directory"):
        monkeypatch.setattr(placing, name, lambda path: None)


@pytest.mark.parametrize(
    ("old", "new"),
    [(OLD, NEW), (OLD, NEW_SINGLE), (OLD_SINGLE, NEW), (OLD_SINGLE, NEW_SINGLE), ({}, NEW), (None, NEW)],
    ids=["shards", "to one", "from one", "one", "other files only", "no folder"],
)
def test_a_folder_is_never_half_of_two_sets(
    tmp_path: Path, old: dict[str, str] | None, new: dict[str, str], without_flushing: None
) -> None:
    kept = {} if old is None else OTHERS
    moment, ended = 0, CUT_OFF
    while ended == CUT_OFF:
        moment += 1
        root = tmp_path / str(moment)
        root.mkdir()
        out = root / "out"
        if old is not None:
            put(out, old | OTHERS)
        ended = cut_off(moment, lambda out=out: write_set(out, new), tmp_path / "lines")
        if out.exists():
            found = held(out)
            makes_whole = {SAFETENSORS.index, SAFETENSORS.single} & set(found)
            whole = {name: text for name, text in found.items() if SAFETENSORS.is_own(name)}
            assert not makes_whole or whole in (old, new), f"moment {moment}"
            assert found.items() >= kept.items()
        # As after a death without --force: what is not whole counts for nothing.
        is_old = old and out.exists() and old.items() <= held(out).items()
        is_new = out.exists() and new.items() <= held(out).items()
        write_set(out, new, force=bool(is_old or is_new))
        assert held(out) == {**kept, **new}, f"moment {moment}"
        assert [path.name for path in root.iterdir()] == ["out"], f"moment {moment}"
        assert not [path for path in out.iterdir() if path.is_dir()], f"moment {moment}"
    assert ended == 0
    assert moment > 20


def test_a_file_is_the_old_one_or_the_new_one(tmp_path: Path, without_flushing: None) -> None:
    def write(path: Path) -> None:
        with whole_output(path, force=True) as partial:
            partial.write_text("ne")
            partial.write_text("new")

    moment, ended = 0, CUT_OFF
    while ended == CUT_OFF:
        moment += 1
        root = tmp_path / str(moment)
        put(root, {"model.bin": "old"})
        ended = cut_off(moment, lambda root=root: write(root / "model.bin"), tmp_path / "lines")
        assert (root / "model.bin").read_text() in ("old", "new")
        write(root / "model.bin")
        assert held(root) == {"model.bin": "new"}
    assert (ended, moment > 10) == (0, True)


def test_the_index_comes_when_all_else_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "out", OLD)
    order: list[str] = []
    for name in ("fsync_file", "fsync_directory"):
        real = getattr(files, name)
        monkeypatch.setattr(
            placing,
            name,
            lambda path, name=name, real=real: (order.append(f"{name} {path.name}"), real(path)),
        )
    for name in ("replace", "unlink"):
        real = getattr(Path, name)

        def seen(self: Path, *rest: Any, name: str = name, real: Any = real, **more: Any) -> Any:
            order.append(f"{name} {self.name}")
            return real(self, *rest, **more)

        monkeypatch.setattr(Path, name, seen)
    write_set(tmp_path / "out", NEW)
    # The end of `order` is the removal of the hidden folder.
    steps = [step for step in order if "lock" not in step]
    shards = [SAFETENSORS.shard(number, 2) for number in (1, 2)]
    flushed = [steps.index(f"fsync_file {name}") for name in NEW]
    removed = steps.index(f"unlink {SAFETENSORS.index}")
    placed = steps.index(f"replace {SAFETENSORS.index}")
    assert max(flushed) < removed
    assert steps[removed + 1] == "fsync_directory out"
    assert steps[placed - 1] == steps[placed + 1] == "fsync_directory out"
    assert all(removed < steps.index(f"replace {name}") < placed for name in shards)


def test_a_failed_set_leaves_the_old_one(tmp_path: Path) -> None:
    put(tmp_path / "out", OLD | OTHERS)

    def write_half() -> None:
        replaced = SAFETENSORS.is_own
        with whole_folder(tmp_path / "out", last="x", replaced=replaced, force=True) as staged:
            (staged / "x").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert held(tmp_path / "out") == OLD | OTHERS
    assert len(list((tmp_path / "out").iterdir())) == len(OLD | OTHERS)


HOLD = """
import sys, time
from pathlib import Path
from ds_toolkit.convert.placing import whole_folder, whole_output
path = Path(sys.argv[1])
if sys.argv[2] == "file":
    held = whole_output(path, force=True)
else:
    held = whole_folder(path, last="model.safetensors", replaced=lambda name: False, force=True)
with held as partial:
    (partial / "model.safetensors" if sys.argv[2] == "folder" else partial).write_text("theirs")
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_a_live_run_writes_is_left_alone(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-c", HOLD, str(out), kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        (partial,) = tmp_path.iterdir()
        assert not placing.remove_remains(tmp_path, "out")
        assert list(tmp_path.iterdir()) == [partial]
        other.stdin.close()
        assert other.wait(30) == 0
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_a_killed_run_wrote_is_removed_by_the_next(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    (tmp_path / ".outer.1.partial").write_text("of another output")
    command = [sys.executable, "-c", HOLD, str(out), kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        other.kill()
    assert len(list(tmp_path.glob(".out.*.partial"))) == 1
    with whole_output(tmp_path / "out", force=False) as partial:
        partial.write_text("ours")
    assert held(tmp_path) == {"out": "ours", ".outer.1.partial": "of another output"}


def test_two_runs_at_once_do_not_replace_each_other(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"

    def overtaken() -> None:
        with whole_output(path, force=False) as partial:
            partial.write_text("ours")
            path.write_text("theirs")

    with pytest.raises(ToolkitError, match="made by another run meanwhile"):
        overtaken()
    assert held(tmp_path) == {"model.bin": "theirs"}


def test_two_threads_take_turns(tmp_path: Path) -> None:
    inside: list[str] = []

    def write(text: str) -> None:
        with whole_output(tmp_path / "model.bin", force=True) as partial:
            inside.append(text)
            partial.write_text(text)
            time.sleep(0.05)
            assert partial.read_text() == text

    threads = [threading.Thread(target=write, args=(text,)) for text in ("one", "other")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert held(tmp_path) == {"model.bin": inside[-1]}


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_stop_while_the_hidden_place_is_made_leaves_nothing(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object) -> bool:
        assert list(tmp_path.glob(".out.*.partial"))
        raise KeyboardInterrupt

    monkeypatch.setattr(placing, "_is_at", stopped)

    def write() -> None:
        if kind == "folder":
            write_set(tmp_path / "out", NEW)
        else:
            whole_output(tmp_path / "out", force=True).__enter__()

    with pytest.raises(KeyboardInterrupt):
        write()
    assert not list(tmp_path.iterdir())
