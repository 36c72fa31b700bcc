"""`ds-toolkit consolidate`: the weights of a checkpoint in one file, or in a folder as Hugging Face's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def consolidate(
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="CKPT", help="The save directory, or one tag's folder in it.", readable=False),
    ],
    out: Annotated[
        str,
        typer.Argument(
            metavar="OUT",
            help="A .bin, .pt, .pth or .safetensors file; or a folder, if it is there or ends in a slash.",
        ),
    ],
    tag: Annotated[str | None, typer.Option(help="Which checkpoint; by default what `latest` names.")] = None,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.", metavar="DTYPE")] = "fp32",
    file_format: Annotated[
        str | None,
        typer.Option("--format", metavar="FORMAT", help="Files of a folder: safetensors (default) or bin."),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Largest file of a folder.")] = "5GB",
    exclude_frozen: Annotated[
        bool, typer.Option("--exclude-frozen", help="Leave frozen weights out.")
    ] = False,
    strip_prefix: Annotated[
        str, typer.Option(metavar="PREFIX", help="Remove it from names, such as `module.`.")
    ] = "",
    only: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Only tensors with such names; may be repeated.")
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A file or folder that has what the checkpoint lacks."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(metavar="N", help="Threads; by default one a processor, up to 8.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare with DeepSpeed's own zero_to_fp32; needs --trust.")
    ] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="Code that is in the checkpoint may be run (by --check).")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written, and stop.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Write a checkpoint's weights into one file or folder; memory stays small and nothing in it is executed.

    Exit codes: 0; 1 if --check finds a difference or --dry-run too little room; 2 if nothing was written.
    """
    from ds_toolkit.cli.consolidate_report import print_result, progress_of
    from ds_toolkit.convert import consolidate as room
    from ds_toolkit.errors import printable

    with progress_of(printable(Path(out).name), silent=as_json) as progress:
        result = room.consolidate(
            checkpoint,
            out,
            tag=tag,
            dtype=dtype,
            file_format=file_format,
            max_shard_size=max_shard_size,
            exclude_frozen=exclude_frozen,
            strip_prefix=strip_prefix,
            only=only or (),
            base=base,
            jobs=jobs,
            check=check,
            trust=trust,
            dry_run=dry_run,
            force=force,
            progress=progress,
        )
    print_result(result, as_json=as_json)
    differs = result.comparison is not None and not result.comparison.agrees
    if differs or (dry_run and not result.fits):
        raise typer.Exit(1)
