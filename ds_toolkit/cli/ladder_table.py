"""The memory ladder, as a table and as JSON."""

from __future__ import annotations

from rich import box
from rich.table import Table

from ds_toolkit.plan.job import Job
from ds_toolkit.plan.ladder import Rung
from ds_toolkit.plan.network import Network
from ds_toolkit.units import format_bytes, format_seconds


def rungs_as_json(rungs: list[Rung], chosen: Rung | None) -> list[dict[str, object]]:
    """What each rung needs, sends and says."""
    return [
        {
            "name": rung.name,
            "stage": rung.stage,
            "micro_batch_size": rung.job.micro_batch_size,
            "accumulation_steps": rung.job.accumulation_steps,
            "recompute_activations": rung.job.recompute_activations,
            "device_bytes": rung.device_bytes,
            "host_bytes": rung.host_bytes,
            "nvme_bytes": rung.nvme_bytes,
            "communication_seconds": rung.communication_seconds,
            "fits": rung.fits,
            "why": rung.why,
            "chosen": rung is chosen,
        }
        for rung in rungs
    ]


def ladder_table(job: Job, rungs: list[Rung], chosen: Rung | None, network: Network | None) -> Table:
    """A row for each rung, with an arrow at the chosen one."""
    cluster = job.cluster
    table = Table(box=box.SIMPLE, title="memory ladder", title_justify="left")
    # Numbers keep their width, so that on a terminal of 80 columns the words have room to stay whole.
    table.add_column("", no_wrap=True)
    table.add_column("rung")
    if cluster.device_memory_bytes is not None:
        table.add_column(
            f"GPU of\n{format_bytes(cluster.device_memory_bytes)}", justify="right", no_wrap=True
        )
    host_memory = "?" if cluster.host_memory_bytes is None else format_bytes(cluster.host_memory_bytes)
    table.add_column(f"host of\n{host_memory}", justify="right", no_wrap=True)
    if network is not None:
        table.add_column(f"sending\n{network.name}", justify="right", no_wrap=True)
    table.add_column("fits", no_wrap=True)
    table.add_column("")
    for rung in rungs:
        needs = [format_bytes(need) for need in (rung.device_bytes, rung.host_bytes) if need is not None]
        if rung.communication_seconds is not None:
            needs.append(format_seconds(rung.communication_seconds))
        is_chosen = rung is chosen
        cells = ["->" if is_chosen else "", rung.name, *needs, "yes" if rung.fits else "no", rung.why]
        table.add_row(*cells, style="bold green" if is_chosen else None)
    return table
