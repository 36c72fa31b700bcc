"""What reading every byte of a tag shows: changed content, values that are no numbers, copies that differ.

A few threads, each with one buffer and one file at a time: memory does not depend on the checkpoint's size.
"""

from __future__ import annotations

import os
import threading
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from ds_toolkit.checkpoint.examining.examined import ExaminedTag
from ds_toolkit.checkpoint.examining.named_ranges import NamedRange, named_ranges
from ds_toolkit.checkpoint.examining.values import count_not_finite
from ds_toolkit.checkpoint.legacy import is_legacy, read_legacy
from ds_toolkit.checkpoint.manifest import ManifestFile
from ds_toolkit.checkpoint.ziparchive import MalformedArchiveError, Member, read_members
from ds_toolkit.errors import ToolkitError

PIECE_BYTES = 2 * 2**20
MAX_THREADS = 8

Progress = Callable[[int, int], None]


@dataclass
class NotFinite:
    """Values of one tensor that are no numbers, and the files that they lie in."""

    range_: NamedRange
    num_nan: int = 0
    num_infinite: int = 0
    paths: list[Path] = field(default_factory=list)


@dataclass(frozen=True)
class Contents:
    """By file: why it could not be read to its end, and which content has changed; by tensor: odd values.

    `differing` holds the optimizer states whose fp32 weights are not the model's, and how many are not.
    """

    unreadable: Mapping[Path, str]
    changed: Mapping[Path, str]
    not_finite: Sequence[NotFinite]
    differing: Mapping[Path, str]


@dataclass(frozen=True)
class _Job:
    path: Path
    size_bytes: int
    listed: ManifestFile | None
    ranges: Sequence[NamedRange]


@dataclass
class _Read:
    path: Path
    unreadable: str | None = None
    changed: str | None = None
    counts: list[tuple[NamedRange, int, int]] = field(default_factory=list)


def read_contents(
    tag: ExaminedTag, *, num_threads: int | None = None, progress: Progress | None = None
) -> Contents:
    """Read all files of a tag that can be read.

    Args:
        progress: called with bytes read so far and bytes in all, from several threads, one at a time.
    """
    from ds_toolkit.checkpoint.examining.masters_compared import differing_masters

    jobs = list(_jobs(tag))
    stopped = threading.Event()
    tick = _ticking(progress, sum(job.size_bytes for job in jobs), stopped)
    # The largest first, so that no thread is left alone with it at the end.
    jobs.sort(key=lambda job: -job.size_bytes)
    with ThreadPoolExecutor(num_threads or min(len(os.sched_getaffinity(0)), MAX_THREADS)) as pool:
        try:
            read = list(pool.map(lambda job: _read(job, tick), jobs))
        except BaseException:
            # Ctrl-C: leaving the block waits for the threads, which are in the middle of large files.
            stopped.set()
            pool.shutdown(cancel_futures=True)
            raise
    read.sort(key=lambda one: one.path)
    changed = {one.path: one.changed for one in read if one.changed is not None}
    unreadable = {one.path: one.unreadable for one in read if one.unreadable is not None}
    return Contents(
        unreadable=unreadable,
        changed=changed,
        not_finite=_by_tensor(one for one in read if one.path not in changed),
        differing=differing_masters(tag, set(changed) | set(unreadable)),
    )


def _jobs(tag: ExaminedTag) -> Iterator[_Job]:
    listed = {file.name: file for file in tag.manifest.files} if tag.manifest is not None else {}
    ranges = named_ranges(tag)
    known = {file.file.path: file for file in tag.files}
    for path in dict.fromkeys([*known, *(tag.folder / name for name in listed)]):
        entry = listed.get(path.relative_to(tag.folder).as_posix())
        try:
            size_bytes = path.stat().st_size
        except OSError:
            continue
        # What is cut short is known to be; what cannot be parsed has no ranges, but may have a CRC.
        if entry is not None and entry.size_bytes != size_bytes:
            continue
        if entry is not None or (path in known and known[path].error is None):
            yield _Job(path, size_bytes, entry, ranges.get(path, ()))


def _ticking(progress: Progress | None, total_bytes: int, stopped: threading.Event) -> Callable[[int], None]:
    lock, done_bytes = threading.Lock(), 0

    def tick(num_bytes: int) -> None:
        nonlocal done_bytes
        if stopped.is_set():
            raise InterruptedError("stopped")
        if progress is not None:
            with lock:
                done_bytes += num_bytes
                progress(min(done_bytes, total_bytes), total_bytes)

    return tick


def _read(job: _Job, tick: Callable[[int], None]) -> _Read:
    result = _Read(job.path)
    counter = _Counter(job.ranges)
    try:
        descriptor = os.open(job.path, os.O_RDONLY)
    except OSError as error:
        result.unreadable = f"the file cannot be read: {error.strerror}"
        return result
    try:
        if job.listed is not None:
            crc32 = _crc32(descriptor, 0, job.size_bytes, counter.add, tick)
            if crc32 != job.listed.crc32:
                where = _where_changed(descriptor, job.path)
                saved = f"its CRC-32 is {crc32:08x}, and the manifest says {job.listed.crc32:08x}"
                result.changed = f"{saved}{f' ({where})' if where else ''}"
        else:
            result.changed = _changed_members(descriptor, job.path, counter.add, tick)
    except (OSError, MalformedArchiveError, ToolkitError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        result.unreadable = f"the file cannot be read to its end: {why}"
    finally:
        os.close(descriptor)
    result.counts = counter.found()
    return result


def _where_changed(descriptor: int, path: Path) -> str | None:
    """Which member it is, of a file that is known to have changed; reads it once more."""
    try:
        return _changed_members(descriptor, path, lambda *_: None, lambda _: None)
    except (MalformedArchiveError, ToolkitError):
        return None


def _changed_members(
    descriptor: int, path: Path, add: Callable[[int, memoryview], None], tick: Callable[[int], None]
) -> str | None:
    # torch's old format has no checksums: its storages are read for their values.
    places = read_legacy(descriptor, path)[1] if is_legacy(descriptor) else read_members(descriptor)
    members = places.values()
    changed = [member for member in members if _is_changed(descriptor, member, add, tick)]
    if not changed:
        return None
    more = f" and {len(changed) - 1} more of its members" if len(changed) > 1 else ""
    return f"the content of {changed[0].name}{more} is not what its CRC-32 was computed from"


def _is_changed(
    descriptor: int, member: Member, add: Callable[[int, memoryview], None], tick: Callable[[int], None]
) -> bool:
    end = member.data_offset + member.size_bytes
    crc32 = _crc32(descriptor, member.data_offset, end, add, tick)
    # Zero is what torch writes where it was told to compute none (`set_crc32_options(False)`).
    return member.crc32 != 0 and crc32 != member.crc32


def _crc32(
    descriptor: int,
    position: int,
    end: int,
    add: Callable[[int, memoryview], None],
    tick: Callable[[int], None],
) -> int:
    """CRC-32 of a byte range, every piece of which is handed to `add`."""
    crc32, buffer = 0, memoryview(bytearray(PIECE_BYTES))
    while position < end:
        wanted = min(PIECE_BYTES, end - position)
        count = 0
        while count < wanted:
            num_read = os.preadv(descriptor, [buffer[count:wanted]], position + count)
            if num_read == 0:
                raise OSError(0, "it became shorter while it was read")
            count += num_read
        crc32 = zlib.crc32(buffer[:wanted], crc32)
        add(position, buffer[:wanted])
        position += wanted
        tick(wanted)
    return crc32


class _Counter:
    """Counts odd values of a file's tensors while the file goes by, in pieces that follow each other."""

    def __init__(self, ranges: Sequence[NamedRange]) -> None:
        self._ranges = ranges
        self._begins = [range_.begin for range_ in ranges]
        self._counts: dict[int, tuple[int, int]] = {}
        # The first bytes of an element that the last piece ended in, and whose range it is.
        self._begun: tuple[int, bytes] = (-1, b"")

    def add(self, position: int, piece: memoryview) -> None:
        end = position + len(piece)
        index = max(bisect_right(self._begins, position) - 1, 0)
        while index < len(self._ranges) and self._begins[index] < end:
            range_ = self._ranges[index]
            first, last = max(range_.begin, position), min(range_.end, end)
            if first < last:
                self._count(index, piece[first - position : last - position])
            index += 1

    def _count(self, index: int, data: memoryview) -> None:
        dtype = self._ranges[index].dtype
        begun = self._begun[1] if self._begun[0] == index else b""
        num_first = -len(begun) % dtype.size_bytes
        if begun and len(data) >= num_first:
            self._count_whole(index, begun + bytes(data[:num_first]))
            data, begun = data[num_first:], b""
        if begun:
            self._begun = (index, begun + bytes(data))
            return
        num_whole = len(data) // dtype.size_bytes * dtype.size_bytes
        self._begun = (index, bytes(data[num_whole:]))
        self._count_whole(index, data[:num_whole])

    def _count_whole(self, index: int, data: bytes | memoryview) -> None:
        num_nan, num_infinite = count_not_finite(data, self._ranges[index].dtype)
        if num_nan or num_infinite:
            nan, infinite = self._counts.get(index, (0, 0))
            self._counts[index] = (nan + num_nan, infinite + num_infinite)

    def found(self) -> list[tuple[NamedRange, int, int]]:
        return [(self._ranges[index], *counts) for index, counts in sorted(self._counts.items())]


def _by_tensor(read: Iterator[_Read]) -> list[NotFinite]:
    found: dict[tuple[str, str], NotFinite] = {}
    for one in read:
        for range_, num_nan, num_infinite in one.counts:
            tensor = found.setdefault((range_.name, range_.what), NotFinite(range_))
            tensor.num_nan += num_nan
            tensor.num_infinite += num_infinite
            if one.path not in tensor.paths:
                tensor.paths.append(one.path)
    return list(found.values())
