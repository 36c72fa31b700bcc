"""What `ds-toolkit consolidate` says while it works and at its end."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ds_toolkit.units import counted

if TYPE_CHECKING:
    from ds_toolkit.convert.comparison import Comparison
    from ds_toolkit.convert.consolidate import Consolidated
    from ds_toolkit.convert.copying import Progress

SECONDS_BETWEEN_LINES = 5.0
_SHOWN = 5


@contextlib.contextmanager
def progress_of(name: str, *, silent: bool) -> Iterator[Progress | None]:
    """A bar with bytes and rate on a terminal, a line now and then elsewhere; on standard error."""
    from ds_toolkit.cli.output import error_console

    if silent:
        yield None
        return
    console = error_console()
    if not console.is_terminal:
        yield _lines(name)
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn(name, markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done_bytes, total_bytes: bar.update(task, completed=done_bytes, total=total_bytes)


def _lines(name: str) -> Progress:
    from ds_toolkit.units import format_bytes

    started = last = 0.0

    def report(done_bytes: int, total_bytes: int) -> None:
        nonlocal started, last
        now = time.monotonic()
        if not last:
            # What came before (reading, loading torch) is not the time of the bytes.
            started = last = now
        if now - last < SECONDS_BETWEEN_LINES or done_bytes == total_bytes:
            return
        last = now
        rate = format_bytes(done_bytes / (now - started))
        done, total = format_bytes(done_bytes), format_bytes(total_bytes)
        sys.stderr.write(f"{name}: {done} of {total}, {rate}/s\n")

    return report


def print_result(result: Consolidated, *, as_json: bool) -> None:
    """The summary on standard output."""
    from ds_toolkit.cli.output import console, print_json
    from ds_toolkit.errors import printable

    if as_json:
        print_json(_as_json(result))
    else:
        # Names may hold brackets, which are no markup, and what would steer the terminal.
        console().print("\n".join(map(printable, _summary(result))), markup=False)


def _as_json(result: Consolidated) -> dict[str, object]:
    return {
        **dataclasses.asdict(result),
        "output": str(result.output),
        "files": [str(file) for file in result.files],
        "bytes_per_second": round(result.bytes_per_second),
        "fits": result.fits,
    }


def _summary(result: Consolidated) -> Iterator[str]:
    from ds_toolkit.units import format_bytes, format_count, format_seconds

    size = format_bytes(result.num_bytes)
    yield f"{result.output}  {size}" if result.written else f"{result.output}  {size} (nothing is written)"
    yield (
        f"  from    {result.tag}: step {result.step}, ZeRO stage {result.stage}, {_ranks(result)}, "
        + counted(result.num_shards, "file")
        + (f", DeepSpeed {result.ds_version}" if result.ds_version else "")
    )
    yield (
        f"  holds   {counted(result.num_tensors, 'tensor')}, "
        f"{format_count(result.num_parameters)} parameters, {result.dtype}"
        + (f"; {counted(result.num_from_base, 'name')} from the base" if result.num_from_base else "")
    )
    if result.files != (result.output,):
        yield f"  files   {_some([file.name for file in result.files])}"
    if result.written:
        rate = format_bytes(result.bytes_per_second)
        yield f"  took    {format_seconds(result.seconds)}, {rate}/s"
    else:
        room = "" if result.fits else ": too little"
        yield f"  needs   {size} of disk, and {format_bytes(result.free_bytes)} are free{room}"
        yield f"          {format_bytes(result.memory_bytes)} of memory or so"
    yield from (f"  tied    {alias} = {name}" for alias, name in result.aliases.items())
    yield from (f"  note    {note}" for note in result.notes)
    if result.comparison is not None:
        yield from _compared(result.comparison)


def _compared(comparison: Comparison) -> Iterator[str]:
    if comparison.unreadable is not None:
        yield f"  check   DeepSpeed's zero_to_fp32 cannot read this checkpoint: {comparison.unreadable}"
        return
    yield f"  check   {counted(comparison.num_equal, 'name')} equal to what DeepSpeed's zero_to_fp32 reads"
    if comparison.left_out:
        yield f"          which leaves out {_some(comparison.left_out)}"
    if comparison.lost:
        yield f"  DIFFERS zero_to_fp32 finds names that are not here: {_some(comparison.lost)}"
    for name, how in comparison.different.items():
        yield f"  DIFFERS {name}: {how}"


def _ranks(result: Consolidated) -> str:
    ways = (
        ("data", result.dp_world_size),
        ("tensor", result.tp_world_size),
        ("pipeline", result.pp_world_size),
    )
    num_ranks = result.dp_world_size * result.tp_world_size * result.pp_world_size
    split = [f"{kind} {size}" for kind, size in ways if size > 1]
    return counted(num_ranks, "rank") + (f" ({' x '.join(split)})" if len(split) > 1 else "")


def _some(names: tuple[str, ...] | list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
