"""Plots of the planner's answers, with matplotlib if it is there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_toolkit.errors import ToolkitError
from ds_toolkit.plan.batch import BatchPlan
from ds_toolkit.plan.communication import Traffic
from ds_toolkit.plan.interval import Interval, Saving, useful_share
from ds_toolkit.plan.memory import RankMemory
from ds_toolkit.plan.network import ACHIEVED_SHARE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg")
_ITEMS = ("weights", "gradients", "optimizer", "buffers", "activations", "fragmentation")
_POINTS = 200


def plot_memory(rows: Sequence[tuple[int, int, RankMemory]], path: Path) -> None:
    """Stacked bars of one GPU's memory by item, for each stage and number of GPUs."""
    figure, axes = _figure(path, max(6.0, 0.4 * len(rows)))
    labels = [f"ZeRO {stage}\n{count} GPU{'s' if count > 1 else ''}" for stage, count, _ in rows]
    bottom = [0.0] * len(rows)
    for item in _ITEMS:
        heights = [getattr(row.device, f"{item}_bytes") / 1e9 for _, _, row in rows]
        axes.bar(range(len(rows)), heights, bottom=bottom, label=item)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xticks(range(len(rows)), labels, fontsize=7, rotation=90 if len(rows) > 12 else 0)
    axes.set_ylabel("GB of one GPU")
    axes.legend()
    _save(figure, path)


def plot_communication(traffic: Sequence[Traffic], computing_seconds: float, path: Path) -> None:
    """Seconds of one step against the rate of the links, for each stage, and compute as a line."""
    figure, axes = _figure(path)
    rates = [10 ** (8 + 4 * point / _POINTS) for point in range(_POINTS + 1)]
    for stage, one in enumerate(traffic):
        seconds = [one.sent_bytes / (rate * ACHIEVED_SHARE) for rate in rates]
        axes.plot([rate / 1e9 for rate in rates], seconds, label=f"ZeRO {stage}")
    axes.axhline(computing_seconds, linestyle="--", color="black", label="compute")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("nominal rate, GB/s")
    axes.set_ylabel("seconds of one step")
    axes.legend()
    _save(figure, path)


def plot_interval(saving: Saving, best: Interval, path: Path) -> None:
    """The useful share against the interval, and the planned one."""
    figure, axes = _figure(path)
    intervals = [best.seconds * 10 ** (-1 + 2 * point / _POINTS) for point in range(_POINTS + 1)]
    axes.plot([one / 60 for one in intervals], [100 * useful_share(saving, one) for one in intervals])
    axes.axvline(best.seconds / 60, linestyle="--", color="black")
    axes.set_xscale("log")
    axes.set_xlabel("interval, minutes")
    axes.set_ylabel("useful time, %")
    _save(figure, path)


def plot_batch(plan: BatchPlan, path: Path) -> None:
    """Accumulation steps against the number of GPUs."""
    figure, axes = _figure(path)
    axes.plot(list(plan.settings), [accumulation for _, accumulation in plan.settings.values()], "o")
    axes.set_xlabel("GPUs")
    axes.set_ylabel(f"accumulation steps for a global batch of {plan.global_batch_size}")
    _save(figure, path)


def _figure(path: Path, width: float = 8.0) -> tuple[Figure, Any]:
    if path.suffix.lower() not in FORMATS:
        raise ToolkitError("the format of the plot is not known", where=path, fix="name it .png or .svg")
    try:
        # Not pyplot: it would look for a screen.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ToolkitError(
            "matplotlib is not installed", where=path, fix="pip install 'deepspeed-toolkit[plot]'"
        ) from error
    figure = Figure(figsize=(width, 5.0), layout="constrained")
    return figure, figure.add_subplot()


def _save(figure: Figure, path: Path) -> None:
    try:
        figure.savefig(path)
    except OSError as error:
        raise ToolkitError("the plot cannot be written", where=path, why=error.strerror) from error
