"""`ds-toolkit lint`: what is wrong with a ds_config, a `.deepspeed_env` or a hostfile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from ds_toolkit.cli.exit_codes import FailOn, end
from ds_toolkit.cli.inputs import Input, Kind
from ds_toolkit.cli.reports import Format
from ds_toolkit.config.consumers import Consumer
from ds_toolkit.env.launchers import Launcher
from ds_toolkit.findings import Finding

if TYPE_CHECKING:
    from ds_toolkit.advise.surroundings import Surroundings
    from ds_toolkit.errors import ToolkitError

Value = TypeVar("Value")


def lint(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="Files to look at; - is standard input.")
    ],
    consumer: Annotated[
        Consumer, typer.Option("--for", help="Who hands the configuration to DeepSpeed.")
    ] = Consumer.NATIVE,
    world_size: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of ranks. [default: of hosts and GPUs; else what depends on it is left out]"
        ),
    ] = None,
    launcher: Annotated[
        Launcher | None, typer.Option(help="What starts the ranks. [default: what depends on it is left out]")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Judge the configuration for this model: 7B, or a Hugging Face config.json."),
    ] = None,
    num_nodes: Annotated[
        int | None, typer.Option(min=1, help="Hosts. [default: of a hostfile among the files]")
    ] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="GPUs a host. [default: of a hostfile among the files]")
    ] = None,
    gpu_memory: Annotated[str | None, typer.Option(help="Memory of one GPU, such as 80GB.")] = None,
    interconnect: Annotated[
        str | None, typer.Option(help="Slowest network: 10GbE, 100GbE, 8x400Gb-IB, NVLink4.")
    ] = None,
    sequence_length: Annotated[int, typer.Option(min=1, help="Tokens of one sample.")] = 2048,
    form: Annotated[Format, typer.Option("--format", help="Form of the report.")] = Format.TEXT,
    fail_on: Annotated[
        FailOn, typer.Option(help="The least severity that makes the exit code 1.")
    ] = FailOn.WARNING,
    ignore: Annotated[
        list[str] | None, typer.Option(metavar="CODE", help="Leave a rule out; may be repeated.")
    ] = None,
    kind: Annotated[
        Kind | None, typer.Option(help="What the files are. [default: told by name, then by content]")
    ] = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Mend what is safe to mend, and show the changes first.")
    ] = False,
) -> None:
    """Find what DeepSpeed would ignore, refuse or misunderstand; the exit code is 1 if there is any."""
    from ds_toolkit.cli.catalogue import rule_named
    from ds_toolkit.cli.inputs import read_input
    from ds_toolkit.cli.linting import Options, lint_one
    from ds_toolkit.cli.reports import report
    from ds_toolkit.errors import ToolkitError

    ignored = frozenset(rule_named(word).code for word in ignore or ())
    inputs: list[Input] = []
    errors: list[ToolkitError] = []
    for name in files:
        try:
            inputs.append(read_input(name, kind))
        except ToolkitError as error:
            errors.append(error)
    counts = _known({"world_size": world_size, "num_nodes": num_nodes, "gpus_per_node": gpus_per_node})
    counts = counts or _counts_of_a_hostfile(inputs)
    said = _known({"model": model, "gpu_memory": gpu_memory, "interconnect": interconnect})
    surroundings = _surroundings(said, counts, sequence_length) if said or counts else None
    if surroundings is not None:
        world_size = surroundings.num_ranks
    options = Options(consumer, world_size, launcher, ignored, fix, form is not Format.TEXT, surroundings)
    findings: list[Finding] = []
    for read in inputs:
        try:
            findings += lint_one(read, options)
        except ToolkitError as error:
            errors.append(error)
    report(findings, errors, len(files) - len(errors), form)
    end(findings, errors, fail_on)


def _known(values: dict[str, Value | None]) -> dict[str, Value]:
    return {name: value for name, value in values.items() if value is not None}


def _counts_of_a_hostfile(files: list[Input]) -> dict[str, int]:
    """Hosts and GPUs as the only hostfile among the files has them; nothing where it cannot be read."""
    hostfiles = [read for read in files if read.kind is Kind.HOSTFILE]
    if len(hostfiles) != 1:
        return {}
    from ds_toolkit.env.hostfile import parse_hostfile_text
    from ds_toolkit.errors import ToolkitError

    try:
        slots = list(parse_hostfile_text(hostfiles[0].text).slots.values())
    except ToolkitError:
        # The linter has findings of its own about that.
        return {}
    if len(set(slots)) > 1:
        return {"world_size": sum(slots)}
    return {"num_nodes": len(slots), "gpus_per_node": slots[0]} if slots[0] else {}


def _surroundings(said: dict[str, str], counts: dict[str, int], sequence_length: int) -> Surroundings:
    from ds_toolkit.advise.surroundings import Surroundings
    from ds_toolkit.cli.answers import parse_model
    from ds_toolkit.plan.job import Model
    from ds_toolkit.plan.network import parse_network
    from ds_toolkit.units import parse_memory_bytes

    model = parse_model(said["model"]) if "model" in said else None
    memory = said.get("gpu_memory")
    return Surroundings(
        model=Model.from_count(model) if isinstance(model, int) else model,
        gpu_memory_bytes=None if memory is None else parse_memory_bytes(memory, "GPU memory"),
        network=parse_network(said["interconnect"]) if "interconnect" in said else None,
        sequence_length=sequence_length,
        **counts,
    )
