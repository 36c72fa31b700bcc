"""Files that appear whole: written beside their place, flushed to the disk, then renamed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import shutil
import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from ds_toolkit.errors import ToolkitError

CRC_CHUNK_BYTES = 8 * 2**20
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_SYNC_FILE_RANGE_WRITE = 2


def fsync_file(path: Path) -> None:
    """Push a file's bytes to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def fsync_directory(path: Path) -> None:
    """Push a directory's entries (names, renames, removals) to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_utf8(path: Path, noun: str) -> str:
    """The text of a file, its line ends as they are.

    Raises:
        ToolkitError: `the <noun>` cannot be opened, or is not UTF-8 text.
    """
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise ToolkitError(f"the {noun} cannot be read", where=path, why=error.strerror) from error
    except UnicodeDecodeError as error:
        why = f"byte {error.start} is not UTF-8"
        raise ToolkitError(f"the {noun} is not text", where=path, why=why) from error


def make_directory(path: Path) -> None:
    """Make a directory and its parents where they are missing, each entry pushed to the disk."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        fsync_directory(folder.parent)


def remove(path: Path) -> None:
    """Remove a file, a folder with all in it, or a symbolic link without what it points to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def write_whole(path: Path, data: bytes) -> None:
    """Replace `path` by a file with this content; a reader sees the old file or the new one, never a part."""
    with whole_file(path) as partial:
        partial.write_bytes(data)


def write_output(path: Path, data: bytes, *, executable: bool = False) -> None:
    """Write what a person named as output, as a whole: a link to a file stays, and so does the file's mode.

    Devices and pipes are written to. `executable` lets those run the file that may read it.

    Raises:
        ToolkitError: the file cannot be written.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        with whole_output(path, executable=executable) as partial:
            partial.write_bytes(data)
    except OSError as error:
        raise ToolkitError("the file cannot be written", where=path, why=error.strerror) from error


@contextlib.contextmanager
def whole_output(path: Path, *, executable: bool = False) -> Iterator[Path]:
    """`whole_file` for what a person named as output: what a link points to is replaced, its mode kept."""
    target = Path(os.path.realpath(path))
    old_mode = target.stat().st_mode if target.is_file() else None
    with whole_file(target) as partial:
        yield partial
        mode = stat.S_IMODE(partial.stat().st_mode if old_mode is None else old_mode)
        partial.chmod(mode | (mode & 0o444) >> 2 if executable else mode)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path to write to; it takes the place of `path` if the block ends well and is removed if it does not.

    The file is flushed to the disk before the rename, and the rename before this returns.
    """
    # The process id keeps two writers of one file apart; the dot keeps listings clean.
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        fsync_file(partial)
        partial.replace(path)
        fsync_directory(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def crc32_of(path: Path) -> int:
    """CRC-32 (as zlib and zip compute it) of a file's content, read in bounded pieces."""
    crc = 0
    buffer = bytearray(CRC_CHUNK_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(view[:count], crc)
    return crc


def exchange(first: Path, second: Path) -> bool:
    """Swap two names atomically (Linux `renameat2` with `RENAME_EXCHANGE`).

    Returns False where the file system or the C library cannot do it, with nothing changed.
    """
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    status = renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    if status == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), os.fspath(first), None, os.fspath(second))


def start_writing_back(descriptor: int, offset_bytes: int, num_bytes: int) -> None:
    """Let the kernel begin to put a range of a file on the disk, without waiting (Linux `sync_file_range`).

    A hint: nothing is promised, errors are told by the fsync that follows, and elsewhere it does nothing.
    """
    begin = _sync_file_range()
    if begin is not None:
        begin(descriptor, offset_bytes, num_bytes, _SYNC_FILE_RANGE_WRITE)


def reserve(descriptor: int, num_bytes: int) -> None:
    """Let the file system set space aside for the file's first bytes (Linux `fallocate`).

    What is written then needs no search for room, and a disk without it is known at once. Where the file
    system cannot do it nothing happens; `posix_fallocate` would write to every block there.

    Raises:
        OSError: there is no room, or the user may not have so much.
    """
    allocate = _fallocate()
    if allocate is None or num_bytes == 0 or allocate(descriptor, 0, 0, num_bytes) == 0:
        return
    code = ctypes.get_errno()
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        raise OSError(code, os.strerror(code))


@functools.cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    return _of_c_library("sync_file_range", (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint))


@functools.cache
def _fallocate() -> Callable[[int, int, int, int], int] | None:
    return _of_c_library("fallocate", (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64))


def _of_c_library(name: str, argument_types: tuple[type, ...]) -> Callable[[int, int, int, int], int] | None:
    try:
        found = getattr(ctypes.CDLL(None, use_errno=True), name)
    except AttributeError:
        return None
    found.argtypes = argument_types
    function: Callable[[int, int, int, int], int] = found
    return function
