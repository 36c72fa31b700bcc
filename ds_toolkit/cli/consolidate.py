"""`ds-toolkit consolidate`: the weights of a checkpoint in one file."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ds_toolkit.convert.consolidate import Consolidated
    from ds_toolkit.convert.copying import Progress


def consolidate(
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="CKPT", help="The save directory, or one tag's folder in it.", readable=False),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A .bin, .pt, .pth or .safetensors file.")],
    tag: Annotated[str | None, typer.Option(help="Which checkpoint; by default what `latest` names.")] = None,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.", metavar="DTYPE")] = "fp32",
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Write a checkpoint's weights into one file; memory stays small and nothing in it is executed."""
    from ds_toolkit.cli.output import print_json
    from ds_toolkit.convert import consolidate as room

    with _progress_bar(out) as progress:
        result = room.consolidate(checkpoint, out, tag=tag, dtype=dtype, force=force, progress=progress)
    if as_json:
        print_json(_as_json(result))
    else:
        _print_summary(result)


@contextlib.contextmanager
def _progress_bar(out: Path) -> Iterator[Progress | None]:
    """On a terminal a bar with bytes and rate, on standard error; elsewhere nothing."""
    from ds_toolkit.cli.output import error_console

    console = error_console()
    if not console.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn(out.name), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done_bytes, total_bytes: bar.update(task, completed=done_bytes, total=total_bytes)


def _as_json(result: Consolidated) -> dict[str, object]:
    return {
        **dataclasses.asdict(result),
        "output": str(result.output),
        "bytes_per_second": round(result.bytes_per_second),
    }


def _print_summary(result: Consolidated) -> None:
    from ds_toolkit.cli.output import console
    from ds_toolkit.units import format_bytes, format_count, format_seconds

    lines = [
        f"{result.output}  {format_bytes(result.num_bytes)}",
        f"  from    {result.tag}: step {result.step}, ZeRO stage {result.stage}, "
        f"{_counted(result.dp_world_size, 'rank')}, {_counted(result.num_shards, 'file')}"
        + (f", DeepSpeed {result.ds_version}" if result.ds_version else ""),
        f"  holds   {_counted(result.num_tensors, 'tensor')}, "
        f"{format_count(result.num_parameters)} parameters, {result.dtype}",
        f"  took    {format_seconds(result.seconds)}, {format_bytes(result.bytes_per_second)}/s",
    ]
    lines += [f"  tied    {alias} = {name}" for alias, name in result.aliases.items()]
    lines += [f"  note    {note}" for note in result.notes]
    # Names may hold brackets, which are no markup.
    console().print("\n".join(lines), markup=False)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
