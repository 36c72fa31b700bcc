"""How the planner's answers look: a table for people, JSON for machines, a plot for slides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.table import Table

from ds_toolkit.cli import plan_plots
from ds_toolkit.cli.output import console, print_json
from ds_toolkit.plan.batch import BatchPlan
from ds_toolkit.plan.communication import Traffic, break_even_bytes_per_second, step_seconds
from ds_toolkit.plan.interval import Saving, daly_interval, plan_interval, young_interval
from ds_toolkit.plan.memory import Items, RankMemory
from ds_toolkit.plan.network import Network
from ds_toolkit.plan.two_levels import TwoLevels
from ds_toolkit.units import format_bytes, format_seconds

MemoryRow = tuple[int, int, RankMemory]
ITEMS = ("weights", "gradients", "optimizer", "buffers", "activations", "fragmentation")


def show_memory(rows: Sequence[MemoryRow], model: str, *, as_json: bool, plot: Path | None) -> None:
    """One line a stage and number of GPUs; `model` says in words whose they are."""
    if plot is not None:
        plan_plots.plot_memory(rows, plot)
    if as_json:
        print_json(
            {
                "model": model,
                "memory": [
                    {"stage": stage, "num_gpus": count, "gpu": _items(row.device), "host": _items(row.host)}
                    for stage, count, row in rows
                ],
            }
        )
        return
    has_host = any(row.host.total_bytes for _, _, row in rows)
    table = _table(
        "memory of one GPU", "ZeRO", "GPUs", *ITEMS, "total", *(["host, a GPU"] if has_host else [])
    )
    for stage, count, row in rows:
        parts = [format_bytes(getattr(row.device, f"{name}_bytes")) for name in ITEMS]
        host = [format_bytes(row.host.total_bytes)] if has_host else []
        table.add_row(str(stage), str(count), *parts, format_bytes(row.device.total_bytes), *host)
    _print(table, model)


def show_communication(
    traffic: Sequence[Traffic],
    network: Network,
    ranks_per_node: int,
    computing_seconds: float,
    model: str,
    *,
    as_json: bool,
    plot: Path | None,
) -> None:
    """One line a stage; `model` says in words what is trained."""
    rows = [
        (
            stage,
            one,
            step_seconds(one, network, ranks_per_node),
            break_even_bytes_per_second(one, computing_seconds),
        )
        for stage, one in enumerate(traffic)
    ]
    if plot is not None:
        plan_plots.plot_communication(traffic, computing_seconds, plot)
    if as_json:
        print_json(
            {
                "network": asdict(network),
                "model": model,
                "compute_seconds": computing_seconds,
                "stages": [
                    {
                        "stage": stage,
                        "all_reduce_bytes": one.all_reduce_bytes,
                        "reduce_scatter_bytes": one.reduce_scatter_bytes,
                        "all_gather_bytes": one.all_gather_bytes,
                        "sent_bytes": one.sent_bytes,
                        "seconds": seconds,
                        "break_even_bytes_per_second": rate,
                    }
                    for stage, one, seconds, rate in rows
                ],
            }
        )
        return
    table = _table(
        f"one optimizer step over {network.name}; compute takes {format_seconds(computing_seconds)}",
        "ZeRO",
        "all-reduced",
        "reduce-scattered",
        "all-gathered",
        "sent by a rank",
        "takes",
        "hidden from",
    )
    for stage, one, seconds, rate in rows:
        messages = (one.all_reduce_bytes, one.reduce_scatter_bytes, one.all_gather_bytes, one.sent_bytes)
        cells = [format_bytes(size) for size in messages]
        table.add_row(str(stage), *cells, format_seconds(seconds), f"{format_bytes(rate)}/s")
    _print(table, model)


def show_interval(saving: Saving, levels: TwoLevels | None, *, as_json: bool, plot: Path | None) -> None:
    """The interval, and what it rests on."""
    best = plan_interval(saving)
    young = young_interval(saving.cost_seconds, saving.mttf_seconds, saving.caught_share)
    daly = daly_interval(saving.cost_seconds, saving.mttf_seconds)
    steps = best.steps(saving.step_seconds) if saving.step_seconds else None
    if plot is not None:
        plan_plots.plot_interval(saving, best, plot)
    if as_json:
        answer = {**asdict(best), "steps": steps, "young_seconds": young, "daly_seconds": daly}
        print_json({"saving": asdict(saving), "interval": answer, "two_levels": levels and asdict(levels)})
        return
    table = _table("checkpoint interval", "", "")
    rows = [
        ("failures of the job, one every", format_seconds(saving.mttf_seconds)),
        ("cost of a checkpoint", format_seconds(saving.cost_seconds)),
        ("save every", format_seconds(best.seconds) + (f" ({best.bound})" if best.bound else "")),
        ("in steps", "" if steps is None else str(steps)),
        ("Young's interval", format_seconds(young)),
        ("Daly's interval, last words not counted", format_seconds(daly)),
        ("useful time (ETTR)", f"{best.useful_share:.2%}"),
        ("checkpoints to keep", str(best.generations)),
    ]
    if levels is not None:
        rows += [
            ("two levels: in memory every", format_seconds(levels.memory_seconds)),
            (
                "two levels: on disk every",
                f"{format_seconds(levels.disk_seconds)}, {levels.memory_per_disk} in memory",
            ),
            ("two levels: saving and lost work", f"{levels.overhead:.2%}"),
        ]
    for name, value in rows:
        if value:
            table.add_row(name, value)
    out = console()
    out.print(table, width=max(out.width, 100))
    for warning in (best.warning, levels and levels.warning):
        if warning:
            out.print(f"warning: {warning}", markup=False)


def show_batch(plan: BatchPlan, *, as_json: bool, plot: Path | None) -> None:
    """The batch size, and the settings for each number of GPUs."""
    if plot is not None:
        plan_plots.plot_batch(plan, plot)
    if as_json:
        settings = [
            {"num_gpus": count, "micro_batch_size": micro, "accumulation_steps": accumulation}
            for count, (micro, accumulation) in plan.settings.items()
        ]
        left_out = list(plan.left_out)
        print_json({"global_batch_size": plan.global_batch_size, "settings": settings, "left_out": left_out})
        return
    table = _table(f"global batch {plan.global_batch_size}", "GPUs", "micro batch", "accumulation")
    for count, (micro, accumulation) in plan.settings.items():
        table.add_row(str(count), str(micro), str(accumulation))
    out = console()
    out.print(table, width=max(out.width, 100))
    if plan.left_out:
        out.print(f"not with {', '.join(map(str, plan.left_out))} GPUs", markup=False)


def _items(items: Items) -> dict[str, int]:
    return {**asdict(items), "total_bytes": items.total_bytes}


def _table(title: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE, title=title, title_justify="left", show_header=any(columns))
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if not column and not number else "right")
    return table


def _print(table: Table, note: str = "") -> None:
    out = console()
    # Columns of numbers are useless when they wrap.
    out.print(table, width=max(out.width, 100))
    if note:
        out.print(f"- {note}", markup=False)
