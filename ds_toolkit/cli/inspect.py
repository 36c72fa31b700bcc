"""`ds-toolkit inspect`: what the tags of a checkpoint are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ds_toolkit.units import counted

if TYPE_CHECKING:
    from ds_toolkit.checkpoint.examining.summary import TagSummary
    from ds_toolkit.checkpoint.tensors import CheckpointMap, StoredTensor


def inspect(
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="CKPT", help="The save directory, or one tag's folder in it.", readable=False),
    ],
    tag: Annotated[str | None, typer.Option(help="The only checkpoint to show. [default: all]")] = None,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List every tensor: name, shape, dtype, role, files.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """Show what each tag of a checkpoint is; no tensor data is read, and nothing in it is executed."""
    from ds_toolkit.checkpoint.examination import tags_of
    from ds_toolkit.checkpoint.examining.directory_rules import read_latest, unfinished
    from ds_toolkit.checkpoint.examining.summary import summarize, unreadable
    from ds_toolkit.errors import ToolkitError

    folders, directory = tags_of(checkpoint, tag)
    around = directory if directory is not None else folders[0].resolve().parent
    latest = read_latest(around)
    summaries = []
    for folder in folders:
        try:
            summaries.append(summarize(folder))
        except (ToolkitError, OSError) as error:
            summaries.append(unreadable(folder, error))
    begun = [path.name for path in unfinished(directory)] if directory is not None else []
    if as_json:
        from ds_toolkit.cli.output import print_json

        rows = [_as_json(summary, latest, tensors) for summary in summaries]
        print_json({"latest": latest, "tags": rows, "unfinished": begun})
        return
    _print(summaries, latest, begun, tensors)


def _print(summaries: Sequence[TagSummary], latest: str | None, begun: Sequence[str], tensors: bool) -> None:
    from ds_toolkit.cli.output import console
    from ds_toolkit.errors import printable

    blocks = []
    for summary in summaries:
        lines = [*_lines(summary, latest)]
        if tensors and summary.weights is not None:
            lines += ["", *_table(_tensor_rows(summary.weights))]
        blocks.append("\n".join(printable(line) for line in lines))
    notes = [f"`latest` names {latest}" if latest is not None else "there is no file `latest`"]
    if latest is not None and latest not in {summary.tag for summary in summaries}:
        notes[0] += ", which is not among these tags"
    notes += [f"not committed: {name}" for name in begun]
    blocks.append("\n".join(map(printable, notes)))
    # Names may hold brackets, which are no markup.
    console().print("\n\n".join(blocks), markup=False)


def _lines(summary: TagSummary, latest: str | None) -> Iterator[str]:
    from ds_toolkit.units import format_bytes, format_count

    mark = "  <- latest" if summary.tag == latest else ""
    yield f"{summary.tag}{mark}"
    precision, version = summary.precision, summary.ds_version
    yield (
        f"  step {_known(summary.step)}, ZeRO stage {_known(summary.stage)}, "
        f"{precision or 'unknown precision'}, DeepSpeed {version or 'unknown'}"
    )
    degrees = (("dp", summary.dp_world_size), ("tp", summary.tp_world_size), ("pp", summary.pp_world_size))
    split = " x ".join(f"{name} {_known(size)}" for name, size in degrees)
    yield f"  ranks       {split}, ep {_known(summary.ep_world_size)}"
    if summary.num_parameters is not None:
        counts = [f"{format_count(summary.num_parameters)} parameters"]
        if summary.num_frozen is not None:
            counts.append(f"{format_count(summary.num_frozen)} of them frozen")
            counts.append(_counted(summary.num_tied, "tied name"))
            counts.append(_counted(summary.num_buffers, "buffer"))
        yield f"  holds       {', '.join(counts)}"
    kind = f" ({summary.kind}, {summary.created_at})" if summary.kind else ""
    state = {True: "whole", False: "BROKEN", None: "not proven to be whole"}[summary.is_whole]
    yield f"  committed   by {summary.committed_by}{kind}: {state}"
    yield f"  files       {len(summary.files)}, {format_bytes(summary.num_bytes)}"
    yield from (f"    {format_bytes(size):>10}  {name}" for name, size in summary.files)
    yield from (f"  broken      {problem}" for problem in summary.problems)
    yield from (f"  note        {note}" for note in summary.notes)


def _known(value: object) -> str:
    return "?" if value is None else str(value)


def _counted(count: int | None, noun: str) -> str:
    return f"? {noun}s" if count is None else counted(count, noun)


def _tensor_rows(weights: CheckpointMap) -> Iterator[tuple[str, ...]]:
    yield "name", "shape", "dtype", "role", "files"
    for name, tensor, alias_of in _named(weights):
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        role = tensor.role.value if alias_of is None else f"= {alias_of}"
        yield name, shape, tensor.dtype.name, role, ", ".join(_files(tensor))


def _table(rows: Iterator[tuple[str, ...]]) -> list[str]:
    listed = list(rows)
    widths = [max(len(row[column]) for row in listed) for column in range(len(listed[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in listed
    ]


def _named(weights: CheckpointMap) -> Iterator[tuple[str, StoredTensor, str | None]]:
    """Every name, its tensor, and for a tied name the one that the tensor is kept under."""
    for name in weights.names:
        alias_of = weights.aliases.get(name)
        yield name, weights.tensors[alias_of or name], alias_of


def _files(tensor: StoredTensor) -> list[str]:
    return list(dict.fromkeys(place.path.name for place in tensor.slices))


def _tensors(weights: CheckpointMap) -> Iterator[dict[str, object]]:
    for name, tensor, alias_of in _named(weights):
        yield {
            "name": name,
            "shape": list(tensor.shape),
            "dtype": tensor.dtype.name,
            "role": tensor.role.value,
            "tied_to": alias_of,
            "files": _files(tensor),
        }


def _as_json(summary: TagSummary, latest: str | None, tensors: bool) -> dict[str, object]:
    plain = {
        name: getattr(summary, name)
        for name in summary.__dataclass_fields__
        if name not in ("folder", "files", "weights")
    }
    files = [{"name": name, "size_bytes": size_bytes} for name, size_bytes in summary.files]
    rows = list(_tensors(summary.weights)) if tensors and summary.weights is not None else None
    return {
        **plain,
        "folder": str(summary.folder),
        "is_latest": summary.tag == latest,
        "num_bytes": summary.num_bytes,
        "files": files,
        **({"tensors": rows} if tensors else {}),
    }
