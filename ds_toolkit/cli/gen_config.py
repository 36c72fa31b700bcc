"""`ds-toolkit gen-config`: a configuration for this model and this machine, with its reasons."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from ds_toolkit.advise.presets import Advice


class PrecisionChoice(str, Enum):
    """The number formats that can be asked for."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


class StageChoice(str, Enum):
    """The ZeRO stages that can be asked for."""

    AUTO = "auto"
    ZERO = "0"
    ONE = "1"
    TWO = "2"
    THREE = "3"


def gen_config(
    model: Annotated[str | None, typer.Option(help="Number of parameters: 1M, 350M, 7B.")] = None,
    num_nodes: Annotated[int, typer.Option(help="Hosts.")] = 1,
    gpus_per_node: Annotated[
        int | None, typer.Option(help="GPUs a host (processes a host without GPUs). [default: as found here]")
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help="Memory of one GPU, such as 80GB. [default: as found here]")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Memory of one host, such as 1TB. [default: as found here]")
    ] = None,
    precision: Annotated[
        PrecisionChoice | None, typer.Option(help="Number format. [default: bf16 on GPUs, fp32 on a CPU]")
    ] = None,
    global_batch_size: Annotated[
        int | None, typer.Option(help="Samples of one optimizer step. [default: one micro batch a rank]")
    ] = None,
    micro_batch_size: Annotated[
        int | None, typer.Option(help="Samples of one forward pass on one rank. [default: 1]")
    ] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens of one sample. [default: 2048]")] = None,
    stage: Annotated[StageChoice, typer.Option(help="ZeRO stage.")] = StageChoice.AUTO,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path("ds_config.json"),
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the configuration, write nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Write a ds_config that fits a model and a machine, and say why it is as it is."""
    from ds_toolkit.advise.answers import Answers
    from ds_toolkit.advise.presets import advise_config
    from ds_toolkit.env.fabric import detect_host
    from ds_toolkit.errors import ToolkitError
    from ds_toolkit.files import write_whole
    from ds_toolkit.plan.job import Precision
    from ds_toolkit.units import parse_bytes, parse_count

    if model is None:
        raise ToolkitError("--model is missing", fix="give the number of parameters, such as --model 7B")
    if not dry_run:
        _refuse_output(output, force=force)
    answers = Answers(
        num_parameters=parse_count(model),
        num_nodes=num_nodes,
        gpus_per_node=gpus_per_node,
        gpu_memory_bytes=None if gpu_memory is None else parse_bytes(gpu_memory),
        host_memory_bytes=None if host_memory is None else parse_bytes(host_memory),
        precision=None if precision is None else Precision(precision.value),
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        sequence_length=sequence_length,
        stage=None if stage is StageChoice.AUTO else int(stage.value),
    )
    advice = advise_config(answers, detect_host())
    if not dry_run:
        try:
            write_whole(output, advice.text.encode())
        except OSError as error:
            raise ToolkitError("the file cannot be written", where=output, why=error.strerror) from error
    if as_json:
        _print_as_json(advice, None if dry_run else output)
    else:
        _print_for_people(advice, None if dry_run else output)


def _refuse_output(output: Path, *, force: bool) -> None:
    from ds_toolkit.errors import ToolkitError

    if not output.parent.is_dir():
        raise ToolkitError("the folder does not exist", where=output.parent, fix=f"mkdir -p {output.parent}")
    if output.is_dir():
        raise ToolkitError("the output is a folder", where=output, fix="name a file in it")
    if output.exists() and not force:
        raise ToolkitError("the file exists", where=output, fix="--force replaces it, -o names another")


def _print_as_json(advice: Advice, output: Path | None) -> None:
    from ds_toolkit.cli.output import print_json

    rungs: list[dict[str, object]] = [
        {
            "name": rung.name,
            "stage": rung.stage,
            "device_bytes": rung.device_bytes,
            "host_bytes": rung.host_bytes,
            "fits": rung.fits,
            "why": rung.why,
            "chosen": rung is advice.chosen,
        }
        for rung in advice.rungs
    ]
    file = None if output is None else str(output)
    print_json({"file": file, "config": advice.config, "rungs": rungs, "reasons": advice.reasons})


def _print_for_people(advice: Advice, output: Path | None) -> None:
    from ds_toolkit.cli.output import console

    out = console()
    out.print(_ladder_table(advice))
    for reason in advice.reasons:
        out.print(f"- {reason}", markup=False)
    if output is None:
        out.print(advice.text, markup=False, end="")
    else:
        out.print(f"written: {output}", markup=False)


def _ladder_table(advice: Advice) -> Table:
    from rich import box
    from rich.table import Table

    from ds_toolkit.units import format_bytes

    cluster = advice.job.cluster
    table = Table(box=box.SIMPLE, title="memory ladder", title_justify="left")
    table.add_column("")
    table.add_column("rung")
    if cluster.device_memory_bytes is not None:
        table.add_column(f"GPU of {format_bytes(cluster.device_memory_bytes)}", justify="right")
    host_memory = "?" if cluster.host_memory_bytes is None else format_bytes(cluster.host_memory_bytes)
    table.add_column(f"host of {host_memory}", justify="right")
    table.add_column("fits")
    table.add_column("")
    for rung in advice.rungs:
        needs = [format_bytes(need) for need in (rung.device_bytes, rung.host_bytes) if need is not None]
        chosen = rung is advice.chosen
        cells = ["->" if chosen else "", rung.name, *needs, "yes" if rung.fits else "no", rung.why]
        table.add_row(*cells, style="bold green" if chosen else None)
    return table
