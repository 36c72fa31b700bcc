"""`ds-toolkit plan`: the arithmetic alone, as tables, JSON or plots."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ds_toolkit.cli.gen_config import PrecisionChoice
from ds_toolkit.plan.failures import MttfOf

if TYPE_CHECKING:
    from ds_toolkit.plan.job import Job, Model

app = typer.Typer(
    help="Memory, communication, checkpoint interval and batch sizes before a run.", no_args_is_help=True
)

_Model = Annotated[str, typer.Option(help="Number of parameters (7B), or a Hugging Face config.json.")]
_Gpus = Annotated[str, typer.Option(help="Numbers of GPUs: 1,2,4,8 or 1..64.")]
_GpusPerNode = Annotated[int, typer.Option(help="GPUs a host.")]
_Precision = Annotated[PrecisionChoice, typer.Option(help="Number format.")]
_MicroBatch = Annotated[int, typer.Option(help="Samples of one forward pass on one rank.")]
_Accumulation = Annotated[int, typer.Option(help="Micro batches of one optimizer step.")]
_Sequence = Annotated[int, typer.Option(help="Tokens of one sample.")]
_Recompute = Annotated[bool, typer.Option("--recompute", help="Activations are computed again.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
_Plot = Annotated[Path | None, typer.Option(help="Draw into FILE.png or FILE.svg (needs matplotlib).")]


@app.command()
def memory(
    model: _Model,
    gpus: _Gpus = "1,2,4,8,16,32,64",
    precision: _Precision = PrecisionChoice.BF16,
    micro_batch_size: _MicroBatch = 1,
    accumulation_steps: _Accumulation = 1,
    sequence_length: _Sequence = 2048,
    recompute: _Recompute = False,
    offload_optimizer: Annotated[
        bool, typer.Option("--offload-optimizer", help="Optimizer state in host memory.")
    ] = False,
    offload_param: Annotated[
        bool, typer.Option("--offload-param", help="Weights too (stage 3; with --offload-optimizer).")
    ] = False,
    as_json: _Json = False,
    plot: _Plot = None,
) -> None:
    """Bytes of each GPU by item, for each ZeRO stage and number of GPUs."""
    from ds_toolkit.cli import plan_tables
    from ds_toolkit.errors import ToolkitError
    from ds_toolkit.plan.memory import Offload, rank_memory

    if offload_param and not offload_optimizer:
        raise ToolkitError(
            "--offload-param alone is not planned",
            why="the optimizer is the larger part, and what stays of it on the GPU is not measured",
            fix="add --offload-optimizer",
        )
    rows = []
    shape = _shape(model)
    for count in parse_counts(gpus):
        job = _job(
            shape, 1, count, precision, micro_batch_size, accumulation_steps, sequence_length, recompute
        )
        for stage in range(4):
            offload = Offload(offload_optimizer and stage > 0, offload_param and stage == 3)
            rows.append((stage, count, rank_memory(job, stage, offload)))
    plan_tables.show_memory(rows, shape.rationale, as_json=as_json, plot=plot)


@app.command()
def comm(
    model: _Model,
    network: Annotated[str, typer.Option(help="10GbE, 100GbE, 8x400Gb-IB, NVLink4, ...")],
    num_nodes: Annotated[int, typer.Option(help="Hosts.")] = 1,
    gpus_per_node: _GpusPerNode = 8,
    precision: _Precision = PrecisionChoice.BF16,
    micro_batch_size: _MicroBatch = 1,
    accumulation_steps: _Accumulation = 1,
    sequence_length: _Sequence = 2048,
    recompute: _Recompute = False,
    tflops: Annotated[float, typer.Option(help="Peak of one GPU in teraflops (A100 312, H100 989).")] = 312.0,
    as_json: _Json = False,
    plot: _Plot = None,
) -> None:
    """Bytes and seconds that a step sends at each stage, and the bandwidth at which compute hides it."""
    from ds_toolkit.cli import plan_tables
    from ds_toolkit.plan.communication import compute_seconds, step_traffic
    from ds_toolkit.plan.network import parse_network

    job = _job(
        _shape(model),
        num_nodes,
        gpus_per_node,
        precision,
        micro_batch_size,
        accumulation_steps,
        sequence_length,
        recompute,
    )
    computing = compute_seconds(job, tflops * 1e12)
    traffic = [step_traffic(job, stage) for stage in range(4)]
    plan_tables.show_communication(
        traffic,
        parse_network(network),
        gpus_per_node,
        computing,
        job.model.rationale,
        as_json=as_json,
        plot=plot,
    )


@app.command()
def interval(
    cost: Annotated[str, typer.Option(help="How long a checkpoint keeps training waiting, such as 60s.")],
    mttf: Annotated[str, typer.Option(help="Mean time to failure, such as 50000h.")],
    mttf_per: Annotated[
        MttfOf | None, typer.Option(help="Whose mean time to failure that is; asked for on a terminal.")
    ] = None,
    num_nodes: Annotated[int, typer.Option(help="Hosts.")] = 1,
    gpus_per_node: _GpusPerNode = 8,
    restart: Annotated[str, typer.Option(help="From a failure to the first new step.")] = "0s",
    write: Annotated[str, typer.Option(help="How long a save goes on behind the training loop.")] = "0s",
    slowdown: Annotated[float, typer.Option(help="Share of speed lost while it does.")] = 0.0,
    step: Annotated[str, typer.Option(help="One optimizer step.")] = "0s",
    caught: Annotated[float, typer.Option(help="Share of failures that last words catch.")] = 0.0,
    last_words: Annotated[str, typer.Option(help="How long such a save takes.")] = "0s",
    longest: Annotated[str | None, typer.Option(help="Longest interval allowed.")] = None,
    memory_cost: Annotated[
        str | None, typer.Option(help="Cost of a checkpoint in memory: plans two levels.")
    ] = None,
    soft: Annotated[float, typer.Option(help="Share of failures that leave host memory intact.")] = 0.9,
    as_json: _Json = False,
    plot: _Plot = None,
) -> None:
    """How often to save, and the share of time that is useful then."""
    from ds_toolkit.cli import plan_tables
    from ds_toolkit.cli.answers import ask_choice
    from ds_toolkit.plan.failures import job_mttf_seconds, share
    from ds_toolkit.plan.interval import Saving
    from ds_toolkit.plan.two_levels import plan_two_levels
    from ds_toolkit.units import parse_seconds

    share(soft, "share of soft failures")
    mttf_seconds = parse_seconds(mttf)
    if mttf_per is None:
        # A GPU's by default: if it was the job's after all, saves are too many, not too few.
        question = f"Whose mean time to failure is {mttf}: that of a GPU, a node or the job?"
        mttf_per = MttfOf(ask_choice("mttf-per", question, [one.value for one in MttfOf], MttfOf.GPU.value))
    job_mttf = job_mttf_seconds(mttf_seconds, mttf_per, num_nodes, gpus_per_node)
    saving = Saving(
        stall_seconds=parse_seconds(cost),
        mttf_seconds=job_mttf,
        write_seconds=parse_seconds(write),
        slowdown=slowdown,
        restart_seconds=parse_seconds(restart),
        step_seconds=parse_seconds(step),
        caught_share=caught,
        last_words_seconds=parse_seconds(last_words),
        longest_seconds=None if longest is None else parse_seconds(longest),
    )
    levels = None
    if memory_cost is not None:
        levels = plan_two_levels(parse_seconds(memory_cost), saving.cost_seconds, job_mttf, soft, caught)
    plan_tables.show_interval(saving, levels, as_json=as_json, plot=plot)


@app.command()
def batch(
    max_batch: Annotated[int, typer.Option(help="Largest global batch size.")],
    micro_batches: Annotated[str, typer.Option(help="Micro batch sizes that fit: 2,4,6.")],
    gpus: _Gpus = "1..64",
    as_json: _Json = False,
    plot: _Plot = None,
) -> None:
    """The global batch size that stays the same over the most numbers of GPUs."""
    from ds_toolkit.cli import plan_tables
    from ds_toolkit.plan.batch import plan_batch

    plan = plan_batch(max_batch, parse_counts(micro_batches), parse_counts(gpus))
    plan_tables.show_batch(plan, as_json=as_json, plot=plot)


def parse_counts(text: str) -> list[int]:
    """The whole numbers of `1,2,4` and of `1..64`, and of both together.

    Raises:
        ToolkitError: it is neither, or a range that is empty or has more than a million numbers.
    """
    from ds_toolkit.errors import ToolkitError

    numbers: list[int] = []
    for part in text.split(","):
        first, dots, last = part.strip().partition("..")
        ends = (first.strip(), (last if dots else first).strip())
        if not all(end.isascii() and end.isdigit() and len(end) < 10 for end in ends):
            raise ToolkitError(f"`{text}` is no list of numbers", fix="write it as 1,2,4 or 1..64")
        low, high = int(ends[0]), int(ends[1])
        if high < low or high - low > 1_000_000:
            raise ToolkitError(f"the range {part.strip()} is empty or too long", fix="write it as 1..64")
        numbers += range(low, high + 1)
    return numbers


def _shape(text: str) -> Model:
    from ds_toolkit.cli.answers import parse_model
    from ds_toolkit.plan.job import Model

    model = parse_model(text)
    return model if isinstance(model, Model) else Model.from_count(model)


def _job(
    model: Model,
    num_nodes: int,
    gpus_per_node: int,
    precision: PrecisionChoice,
    micro_batch_size: int,
    accumulation_steps: int,
    sequence_length: int,
    recompute: bool,
) -> Job:
    from ds_toolkit.plan.job import Cluster, Job, Precision

    # How much memory there is does not matter to what is needed.
    cluster = Cluster(num_nodes, gpus_per_node, device_memory_bytes=1, host_memory_bytes=None)
    return Job(
        model,
        cluster,
        Precision(precision.value),
        micro_batch_size,
        accumulation_steps,
        sequence_length,
        recompute,
    )
