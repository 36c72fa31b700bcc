"""Run alone: a file system that is another folder, and takes what is written slowly.

    slow_disk.py FOLDER MOUNT_POINT BYTES_PER_SECOND

Whoever writes waits in the system call, as in that of a disk or a server that is overloaded; the number may
be changed while it runs, by writing another one to FOLDER/.bytes_per_second. It ends when it is unmounted.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from typing import Any

from fuse import FUSE, FuseOSError, Operations

RATE_NAME = ".bytes_per_second"
_SEEN = ("st_atime", "st_ctime", "st_gid", "st_mode", "st_mtime", "st_nlink", "st_size", "st_uid", "st_ino")


class SlowDisk(Operations):  # type: ignore[misc]
    """Every operation is that of the folder; after a write it waits."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, operation: str, path: str, *arguments: Any) -> Any:
        try:
            if operation in (
                "getattr",
                "readdir",
                "rename",
                "link",
                "statfs",
                "create",
                "open",
                "read",
                "write",
            ):
                return getattr(self, operation)(path, *arguments)
            return self._pass_on(operation, path, *arguments)
        except OSError as error:
            raise FuseOSError(error.errno or errno.EIO) from error

    def _at(self, path: str) -> str:
        return f"{self._folder}{path}"

    def _pass_on(self, operation: str, path: str, *arguments: Any) -> Any:
        if operation in ("mkdir", "rmdir", "unlink", "chmod", "chown"):
            return getattr(os, operation)(self._at(path), *arguments)
        if operation == "truncate":
            return os.truncate(self._at(path), arguments[0])
        if operation == "utimens":
            return os.utime(self._at(path), arguments[0])
        if operation == "fsync":
            return os.fsync(arguments[1])
        if operation == "release":
            return os.close(arguments[0])
        if operation in ("flush", "fsyncdir", "opendir", "releasedir", "init", "destroy", "access"):
            return 0
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    def getattr(self, path: str, handle: int | None = None) -> dict[str, Any]:
        """As lstat(2)."""
        status = os.lstat(self._at(path))
        return {name: getattr(status, name) for name in _SEEN}

    def readdir(self, path: str, handle: int) -> list[str]:
        """Names."""
        return [".", "..", *(entry.name for entry in Path(self._at(path)).iterdir())]

    def rename(self, old: str, new: str) -> None:
        """As rename(2)."""
        Path(self._at(old)).rename(self._at(new))

    def link(self, target: str, source: str) -> None:
        """As link(2)."""
        os.link(self._at(source), self._at(target))

    def statfs(self, path: str) -> dict[str, int]:
        """As statvfs(3)."""
        status = os.statvfs(self._at(path))
        return {
            name: getattr(status, name) for name in dir(status) if name.startswith("f_") and name != "f_fsid"
        }

    def create(self, path: str, mode: int, info: object = None) -> int:
        """A descriptor."""
        return os.open(self._at(path), os.O_RDWR | os.O_CREAT, mode)

    def open(self, path: str, flags: int) -> int:
        """A descriptor."""
        return os.open(self._at(path), flags & ~os.O_APPEND)

    def read(self, path: str, size: int, offset: int, handle: int) -> bytes:
        """As pread(2)."""
        return os.pread(handle, size, offset)

    def write(self, path: str, data: bytes, offset: int, handle: int) -> int:
        """As pwrite(2), slowly."""
        count = os.pwrite(handle, data, offset)
        time.sleep(count / float((self._folder / RATE_NAME).read_text()))
        return count


def main() -> None:
    folder, mount_point = Path(sys.argv[1]), sys.argv[2]
    (folder / RATE_NAME).write_text(sys.argv[3])
    FUSE(SlowDisk(folder), mount_point, foreground=True, big_writes=True, use_ino=True)


if __name__ == "__main__":
    main()
