"""DS111x: the checkpoint directory, as every host has it."""

from __future__ import annotations

from collections.abc import Iterator

from ds_toolkit.doctor.preflight.answers import Storage
from ds_toolkit.doctor.preflight.fleet import RULES, Fleet, Host
from ds_toolkit.findings import Severity
from ds_toolkit.rules import Problem
from ds_toolkit.units import counted, format_bytes, format_seconds


def _storages(fleet: Fleet) -> Iterator[tuple[Host, Storage]]:
    for host, answer in fleet.answers:
        if answer.storage is not None:
            yield host, answer.storage


@RULES.rule("DS1110", "checkpoint-directory-not-writable", Severity.ERROR)
def checkpoint_directory_not_writable(fleet: Fleet) -> Iterator[Problem]:
    """A file of 64 MiB could not be written where the checkpoints are to go, or the disk never answered.

    If the directory is not there yet, the nearest folder above it was taken.

    Bad:
        /data/checkpoints belongs to root on worker-1
    Good:
        every host can write there
    """
    for host, storage in _storages(fleet):
        if storage.error is not None:
            fix = "free space there, mend its permissions or its mount, or choose another directory"
            yield Problem(host.name, f"nothing can be written in `{storage.folder}`: {storage.error}", fix)


@RULES.rule("DS1111", "checkpoint-directory-not-shared", Severity.ERROR)
def checkpoint_directory_not_shared(fleet: Fleet) -> Iterator[Problem]:
    """The checkpoint directory is not the same storage on all hosts.

    Every host wrote a small file there, and this one cannot read those of others: each host would keep a
    part of every checkpoint for itself, and none of them can be loaded.

    Bad:
        /data/checkpoints is a local disk on every host
    Good:
        /data is the same NFS or Lustre mount everywhere
    """
    groups: dict[frozenset[str], list[str]] = {}
    for host, storage in _storages(fleet):
        if storage.error is None and host.tokens is not None:
            groups.setdefault(host.tokens, []).append(host.name)
        elif storage.error is None:
            message = f"it did not say what it can read in `{fleet.intent.checkpoint_dir}`"
            yield Problem(host.name, message, "ask again; --timeout gives it longer")
    # Those that see the same files share it. The right storage is that of most hosts, or of the first ones.
    usual = max((group for seen, group in groups.items() if seen), key=len, default=["any other host"])
    for group in groups.values():
        for name in group if group is not usual else []:
            message = f"`{fleet.intent.checkpoint_dir}` is another storage here than on {usual[0]}"
            yield Problem(name, message, "mount the same storage there, or choose another directory")


@RULES.rule("DS1112", "too-little-space", Severity.ERROR)
def too_little_space(fleet: Fleet) -> Iterator[Problem]:
    """There is no room for `keep_last` checkpoints and the one that is being written.

    A checkpoint's size is that of the model that was named (14 bytes a parameter in 16 bits, 16 in fp32), or
    of the largest that lies in the directory. Checkpoints that lie there already count as room.

    Bad:
        checkpoints of 98 GB, `keep_last` 3, 200 GB free
    Good:
        400 GB free
    """
    size_bytes, keep_last = fleet.checkpoint_bytes, fleet.intent.keep_last
    if size_bytes is None:
        return
    for host, storage in _storages(fleet):
        if storage.space is None:
            continue
        needed_bytes = (keep_last + 1) * size_bytes
        room_bytes = storage.space.free_bytes + storage.all_tags_bytes
        if room_bytes < needed_bytes:
            message = (
                f"{format_bytes(storage.space.free_bytes)} free in `{storage.folder}`, and"
                f" {counted(keep_last + 1, 'checkpoint')} of {format_bytes(size_bytes)} need"
                f" {format_bytes(needed_bytes)}"
            )
            yield Problem(host.name, message, "free space, or keep fewer checkpoints (keep_last)")


@RULES.rule("DS1113", "slow-checkpoint-storage", Severity.WARNING)
def slow_checkpoint_storage(fleet: Fleet) -> Iterator[Problem]:
    """A host would need longer for its part of a checkpoint than last words may take (`deadline_seconds`).

    The speed is that of up to 64 MiB, flushed to the disk, while all hosts write at the same time. A cache
    behind the network may make so little look faster than a whole checkpoint is.

    Bad:
        50 GB for each host at 500 MB/s: 100 s, and 25 s are allowed
    Good:
        50 GB for each host at 3 GB/s
    """
    size_bytes, deadline = fleet.checkpoint_bytes, fleet.intent.deadline_seconds
    for host, storage in _storages(fleet):
        speed = storage.bytes_per_second
        if size_bytes is not None and speed and size_bytes / len(fleet.hosts) / speed > deadline:
            seconds = size_bytes / len(fleet.hosts) / speed
            message = (
                f"{format_bytes(speed)}/s: its part of a checkpoint takes {format_seconds(seconds)}, and last"
                f" words may take {format_seconds(deadline)}"
            )
            yield Problem(host.name, message, "choose faster storage, or a longer deadline_seconds")
