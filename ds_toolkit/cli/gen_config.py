"""`ds-toolkit gen-config`: a configuration for this model and this machine, with its reasons."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ds_toolkit.config.consumers import Consumer

if TYPE_CHECKING:
    from ds_toolkit.advise.presets import Advice
    from ds_toolkit.env.fabric import Host
    from ds_toolkit.findings import Finding


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
    model: Annotated[
        str | None, typer.Option(help="Number of parameters (1M, 7B), or a Hugging Face config.json.")
    ] = None,
    num_nodes: Annotated[int | None, typer.Option(help="Hosts. [default: 1]")] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(help="GPUs a host (processes a host without GPUs). [default: as found here]")
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help="Memory of one GPU, such as 80GB. [default: as found here]")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Memory of one host, such as 1TB. [default: as found here]")
    ] = None,
    nvme: Annotated[str | None, typer.Option(help="Folder on an NVMe drive of each host.")] = None,
    interconnect: Annotated[
        str | None, typer.Option(help="Slowest network: 10GbE, 100GbE, 8x400Gb-IB, NVLink4.")
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
    preset: Annotated[str, typer.Option(help="pretrain, finetune or debug.")] = "pretrain",
    consumer: Annotated[
        Consumer | None, typer.Option("--for", help="Who hands it to DeepSpeed. [default: native]")
    ] = None,
    mttf_per_gpu: Annotated[
        str | None, typer.Option(help="Mean time to failure of one GPU, such as 50000h: sets `save_every`.")
    ] = None,
    env_file: Annotated[
        Path | None, typer.Option(help="A .deepspeed_env to check against the configuration.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path("ds_config.json"),
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the configuration, write nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Write a ds_config that fits a model and a machine, and say why it is as it is."""
    from ds_toolkit.advise.presets import advise_config
    from ds_toolkit.advise.reasons import NothingFitsError
    from ds_toolkit.cli.answers import answers_from, ask
    from ds_toolkit.cli.ladder_table import ladder_table, rungs_as_json
    from ds_toolkit.cli.output import console, print_json
    from ds_toolkit.env.fabric import detect_host
    from ds_toolkit.env.links import fastest_links

    if not dry_run:
        refuse_output(output, force=force)
    given = {
        "model": model,
        "num-nodes": num_nodes,
        "gpus-per-node": gpus_per_node,
        "gpu-memory": gpu_memory,
        "host-memory": host_memory,
        "nvme": nvme,
        "interconnect": interconnect,
        "precision": precision and precision.value,
        "global-batch-size": global_batch_size,
        "micro-batch-size": micro_batch_size,
        "sequence-length": sequence_length,
        "stage": None if stage is StageChoice.AUTO else stage.value,
        "preset": preset,
        "for": consumer and consumer.value,
        "mttf-per-gpu": mttf_per_gpu,
    }
    host = detect_host()
    said = ask({flag: str(value) for flag, value in given.items() if value is not None}, host)
    try:
        advice = advise_config(answers_from(said), host, fastest_links())
    except NothingFitsError as error:
        # The ladder shows what is near, most of all when nothing fits.
        if as_json:
            print_json({"error": {**error.as_dict(), "rungs": rungs_as_json(error.rungs, None)}})
            raise typer.Exit(2) from error
        console().print(ladder_table(error.job, error.rungs, None, error.network))
        raise
    findings = _checked_env(env_file, advice, host)
    written = None if dry_run else _write(output, advice)
    if as_json:
        _print_as_json(advice, written, findings)
    else:
        _print_for_people(advice, written, findings)


def refuse_output(output: Path, *, force: bool) -> None:
    """Refuse a place that cannot be written to, before any work is done for it.

    Raises:
        ToolkitError: there is no such folder, it is one, or the file exists and is not to be replaced.
    """
    from ds_toolkit.errors import ToolkitError

    if not output.parent.is_dir():
        raise ToolkitError("the folder does not exist", where=output.parent, fix=f"mkdir -p {output.parent}")
    if output.is_dir():
        raise ToolkitError("the output is a folder", where=output, fix="name a file in it")
    if output.exists() and not force:
        raise ToolkitError("the file exists", where=output, fix="--force replaces it, -o names another")


def _write(output: Path, advice: Advice) -> Path:
    from ds_toolkit.config.schema.export import FILE_NAME
    from ds_toolkit.files import write_output

    write_output(output, advice.text.encode())
    # The configuration's `$schema` names the one beside it.
    _write_schema(output.parent / FILE_NAME)
    return output


def _write_schema(path: Path) -> None:
    from ds_toolkit.config.schema.export import is_own_schema, schema_text
    from ds_toolkit.files import write_output

    text = schema_text()
    if path.exists():
        try:
            present = path.read_text()
        except (OSError, UnicodeDecodeError):
            return  # it is not one that was written here
        if present == text or not is_own_schema(present):
            return
    write_output(path, text.encode())


def _checked_env(env_file: Path | None, advice: Advice, host: Host) -> list[Finding]:
    from ds_toolkit.advise.rules import lint_plan
    from ds_toolkit.advise.subject import Plan
    from ds_toolkit.env.envfile import read_env_file
    from ds_toolkit.findings import Where

    variables = {} if env_file is None else read_env_file(env_file).variables
    plan = Plan(advice.config, advice.job, advice.network, variables, tuple(gpu.name for gpu in host.gpus))
    file = None if env_file is None else str(env_file)
    return lint_plan(plan, lambda pointer: Where(None if pointer.startswith("/") else file, pointer))


def _print_as_json(advice: Advice, output: Path | None, findings: list[Finding]) -> None:
    from ds_toolkit.cli.ladder_table import rungs_as_json
    from ds_toolkit.cli.output import print_json

    print_json(
        {
            "file": None if output is None else str(output),
            "config": advice.config,
            "rungs": rungs_as_json(advice.rungs, advice.chosen),
            "reasons": advice.reasons,
            "findings": [
                {"code": finding.code, "severity": finding.severity.value, "message": finding.message}
                for finding in findings
            ],
        }
    )


def _print_for_people(advice: Advice, output: Path | None, findings: list[Finding]) -> None:
    from ds_toolkit.cli.ladder_table import ladder_table
    from ds_toolkit.cli.output import console

    out = console()
    out.print(ladder_table(advice.job, advice.rungs, advice.chosen, advice.network))
    for reason in advice.reasons:
        out.print(f"- {reason}", markup=False)
    for finding in findings:
        fix = f" ({finding.fix})" if finding.fix else ""
        out.print(f"{finding.severity.value} {finding.code}: {finding.message}{fix}", markup=False)
    if output is None:
        out.print(advice.text, markup=False, end="")
    else:
        out.print(f"written: {output}", markup=False)
