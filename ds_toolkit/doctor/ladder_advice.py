"""The memory ladder applied to the run that had too little: which rung fits, and how much it frees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_toolkit.doctor.evidence import Evidence
from ds_toolkit.doctor.run_directory import RunDirectory
from ds_toolkit.errors import ToolkitError
from ds_toolkit.plan.hf_model import hf_model
from ds_toolkit.plan.job import Cluster, Job, Model, Precision
from ds_toolkit.plan.ladder import Rung, ladder
from ds_toolkit.units import format_bytes, parse_bytes

# A configuration does not tell it; that of `plan memory`, where nothing is said.
SEQUENCE_LENGTH = 2048


def ladder_advice(run: RunDirectory | None, evidence: Evidence) -> str | None:
    """What the next rungs free for this run; None where its model or configuration is not known."""
    config = run.config() if run is not None else None
    model = _model(run)
    if config is None or model is None:
        return None
    try:
        job = _job(config, model, evidence)
        return _words(ladder(job), _stage(config))
    except (ToolkitError, ValueError, TypeError, OverflowError, ZeroDivisionError):
        # A configuration with "auto" or nonsense in it has no rung to start from.
        return None


def _words(rungs: list[Rung], stage: int) -> str | None:
    here = next((rung for rung in rungs if rung.stage == stage), None)
    if here is None or here.device_bytes is None:
        return None
    cheaper = [
        rung
        for rung in rungs[rungs.index(here) + 1 :]
        if rung.device_bytes is not None and rung.device_bytes < here.device_bytes
    ]
    fitting = next((rung for rung in cheaper if rung.fits), None)
    shown = [*cheaper[:2], *([fitting] if fitting is not None and fitting not in cheaper[:2] else [])]
    if not shown:
        return None
    rungs_told = ", ".join(
        f"`{rung.name}` frees {format_bytes(here.device_bytes - (rung.device_bytes or 0))} a GPU"
        f"{' and fits' if rung.fits else ''}"
        for rung in shown
    )
    return f"for this run, which needs {format_bytes(here.device_bytes)} a GPU by count: {rungs_told}"


def _model(run: RunDirectory | None) -> Model | None:
    data = run.hf_config() if run is not None else None
    if data is None:
        return None
    try:
        return hf_model(data, "config.json")
    except (ToolkitError, ValueError, TypeError, KeyError):
        return None


def _stage(config: Mapping[str, Any]) -> int:
    zero = config.get("zero_optimization")
    return int(zero.get("stage", 0)) if isinstance(zero, dict) else 0


def _job(config: Mapping[str, Any], model: Model, evidence: Evidence) -> Job:
    size = evidence.ends.world_size or max(len(evidence.ends.ranks_by_pid), 1)
    return Job(
        model=model,
        cluster=Cluster(1, size, _gpu_bytes(evidence), None),
        precision=_precision(config),
        micro_batch_size=int(config.get("train_micro_batch_size_per_gpu", 1)),
        accumulation_steps=int(config.get("gradient_accumulation_steps", 1)),
        sequence_length=SEQUENCE_LENGTH,
    )


def _precision(config: Mapping[str, Any]) -> Precision:
    for name, precision in (("bf16", Precision.BF16), ("fp16", Precision.FP16)):
        section = config.get(name)
        if isinstance(section, dict) and section.get("enabled") is True:
            return precision
    return Precision.FP32


def _gpu_bytes(evidence: Evidence) -> int:
    total = evidence.hits["gpu-out-of-memory"].groups.get("total") if evidence.hits else None
    return parse_bytes(total) if total else 80 * 10**9
