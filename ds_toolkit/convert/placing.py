"""Outputs that appear whole, and nothing left behind by a run that was killed.

What is not complete lies under `.<name>.<process id>.partial`, held by a lock of the process that writes it.
The lock goes with its process, however that ends; the next run to the same place removes what nobody holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ds_toolkit.errors import ToolkitError
from ds_toolkit.files import fsync_directory, fsync_file, remove

_LOCK = "lock"
_FILES = "files"
_MOVING = "moving"


def real_path(path: Path) -> Path:
    """What is written: of a link, the place that it leads to."""
    return Path(os.path.realpath(path))


def partial_path(path: Path) -> Path:
    """Where an output of this process is made; the dot keeps listings clean."""
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


@contextlib.contextmanager
def whole_output(path: Path, *, force: bool) -> Iterator[Path]:
    """A file to write to; it takes the place of `path` if the block ends well, else it is removed.

    Of a link, what it points to is replaced; a file that is replaced gives its mode to the new one.

    Raises:
        ToolkitError: another run has made `path` meanwhile, and `force` is not given.
    """
    path = real_path(path)
    remove_remains(path.parent, path.name)
    partial = partial_path(path)
    try:
        with _held(lambda: os.open(partial, os.O_RDWR | os.O_CREAT, 0o666), partial):
            yield partial
            fsync_file(partial)
            if not force and path.exists():
                raise _came_meanwhile(path)
            if path.is_file():
                partial.chmod(stat.S_IMODE(path.stat().st_mode))
            partial.replace(path)
            fsync_directory(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def whole_folder(path: Path, *, last: str, replaced: Callable[[str], bool], force: bool) -> Iterator[Path]:
    """A folder to write files to; if the block ends well they are moved to `path`, else removed.

    A folder that is not there appears by one rename. One that is there keeps its other files; those that
    `replaced` names are removed before the new ones come, unless a file takes its own place.

    Args:
        path: where the files go.
        last: the file that makes the set whole; it goes first from an older set, and comes last.
        replaced: whether a file of this name belongs to an older set.
        force: whether there may be an older set.

    Raises:
        ToolkitError: another run has put a set there meanwhile, and `force` is not given.
    """
    path = real_path(path)
    remove_remains(path.parent, path.name)
    is_there = path.is_dir()
    if is_there:
        # Inside, for it may be another file system than its parent's.
        remove_remains(path, path.name, lambda: _remove_half_moved(path, replaced))
    holder = (path / path.name if is_there else path).with_name(partial_path(path).name)

    def opened() -> int:
        holder.mkdir(exist_ok=True)
        return os.open(holder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)

    # The outer one is for a signal that comes while the folder is made.
    with _removed_on_failure(holder), _held(opened, holder / _LOCK):
        try:
            staged = holder / _FILES
            staged.mkdir()
            yield staged
            for file in staged.iterdir():
                fsync_file(file)
            fsync_directory(staged)
            if is_there:
                if not force and any(replaced(other.name) for other in path.iterdir()):
                    raise _came_meanwhile(path)
                _move_in(staged, path, last, replaced)
            else:
                staged.rename(path)
                fsync_directory(path.parent)
        except BaseException:
            if (holder / _MOVING).exists():
                _remove_half_moved(path, replaced)
            raise
        finally:
            remove(holder)


@contextlib.contextmanager
def _removed_on_failure(folder: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _move_in(staged: Path, path: Path, last: str, replaced: Callable[[str], bool]) -> None:
    new = sorted(file.name for file in staged.iterdir())
    old = [file.name for file in path.iterdir() if replaced(file.name)]
    if new == [last] and old in ([], new):
        (staged / last).replace(path / last)
        fsync_directory(path)
        return
    (staged.parent / _MOVING).touch()
    fsync_directory(staged.parent)
    # From here to the last line there is no index: a reader finds no set, neither the old nor a mixed one.
    for name in sorted(old, key=lambda name: not name.endswith(".json")):
        (path / name).unlink()
        if name.endswith(".json"):
            fsync_directory(path)
    for name in new:
        if name != last:
            (staged / name).replace(path / name)
    fsync_directory(path)
    (staged / last).replace(path / last)
    fsync_directory(path)


def _remove_half_moved(path: Path, replaced: Callable[[str], bool]) -> None:
    """Shards without an index are what a run left that died while it moved them in."""
    own = [file for file in path.iterdir() if replaced(file.name)]
    if not any(file.name.endswith(".json") for file in own):
        for file in own:
            if "-of-" in file.name:
                file.unlink()


def remove_remains(folder: Path, name: str, half_moved: Callable[[], None] | None = None) -> Sequence[Path]:
    """Remove what runs to `folder`/`name` left behind that are dead; those of live ones stay.

    Args:
        folder: where partial outputs lie.
        name: of the output.
        half_moved: called where a dead run had begun to move its files in.

    Returns:
        What was removed.
    """
    pattern = re.compile(rf"\.{re.escape(name)}\.\d+\.partial")
    removed = []
    for path in sorted(folder.iterdir()):
        if pattern.fullmatch(path.name):
            with _lock_of_nobody(path) as is_dead:
                if is_dead:
                    if half_moved is not None and (path / _MOVING).exists():
                        half_moved()
                    remove(path)
                    removed.append(path)
    return removed


@contextlib.contextmanager
def _lock_of_nobody(path: Path) -> Iterator[bool]:
    """Whether nobody holds a partial output; if so, it is held meanwhile."""
    lock = path / _LOCK if path.is_dir() else path
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        yield False
        return
    try:
        yield _can_be_locked(descriptor, fcntl.LOCK_NB) and _is_at(lock, descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _held(opened: Callable[[], int], lock: Path) -> Iterator[None]:
    descriptor = opened()
    try:
        while True:
            _can_be_locked(descriptor)
            if _is_at(lock, descriptor):
                break
            # Another run took it for a dead one's between its making and its lock.
            os.close(descriptor)
            descriptor = opened()
        yield
    finally:
        os.close(descriptor)


def _can_be_locked(descriptor: int, flags: int = 0) -> bool:
    # A file system without locks refuses as well: what nobody can tell to be dead stays.
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | flags)
    except OSError:
        return False
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _came_meanwhile(path: Path) -> ToolkitError:
    return ToolkitError(
        "the output was made by another run meanwhile",
        where=path,
        fix="name another place, or replace it with --force",
    )
