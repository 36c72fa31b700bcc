"""From answers to a checked configuration: the ladder picks, a template writes, the linter reads."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from ds_toolkit.advise.answers import Answers, complete
from ds_toolkit.config.linter import lint
from ds_toolkit.config.reader import read_config_text
from ds_toolkit.env.fabric import Host
from ds_toolkit.errors import ToolkitError
from ds_toolkit.plan.job import Job
from ds_toolkit.plan.ladder import Rung, choose, ladder
from ds_toolkit.plan.memory import DEFAULT_BUCKET_SIZE, bucket_size, prefetch_bucket_size
from ds_toolkit.rendering import render
from ds_toolkit.units import format_bytes, format_count

TEMPLATE = "ds_config/base.json.j2"
# DeepSpeed's default for stage3_param_persistence_threshold, in elements.
_DEFAULT_PERSISTENCE_THRESHOLD = 100_000
_SAVE_EVERY = "10min"


@dataclass(frozen=True)
class Advice:
    """A configuration and how it came about.

    Attributes:
        text: strict JSON with a newline at the end.
        config: the same as data.
        job: the answers, completed.
        rungs: the whole ladder.
        chosen: the rung that the configuration stands on.
        reasons: what was chosen and why, a line each.
    """

    text: str
    config: dict[str, object]
    job: Job
    rungs: list[Rung]
    chosen: Rung
    reasons: list[str]


def advise_config(answers: Answers, host: Host) -> Advice:
    """A ds_config for this job that the toolkit's own rules find nothing wrong with.

    Raises:
        ToolkitError: an answer is impossible, or nothing fits; it says by how much, and what would.
    """
    job, reasons = complete(answers, host)
    rungs = ladder(job)
    chosen = choose(rungs, answers.stage)
    if chosen is None:
        raise _nothing_fits(job, rungs, answers.stage)
    settings = {
        "micro_batch_size": job.micro_batch_size,
        "accumulation_steps": job.accumulation_steps,
        "learning_rate": learning_rate(job.model.num_parameters),
        "torch_adam": not job.cluster.has_gpus,
        "precision": job.precision.value,
        "stage": chosen.stage,
        # Without streams nothing can overlap.
        "overlap_comm": job.cluster.has_gpus,
        "bucket_size": bucket_size(job),
        "prefetch_bucket_size": prefetch_bucket_size(job),
        "persistence_threshold": persistence_threshold(job),
        "offload_optimizer": chosen.offload.optimizer,
        "offload_param": chosen.offload.parameters,
        "save_every": _SAVE_EVERY,
    }
    text = render(TEMPLATE, **settings)
    config: dict[str, object] = json.loads(text)
    findings = lint(read_config_text(text), world_size=job.cluster.world_size)
    assert not findings, findings  # noqa: S101  (our own configuration; tests cover each rung)
    return Advice(text, config, job, rungs, chosen, [*reasons, *_reasons(job, chosen, answers.stage)])


def persistence_threshold(job: Job) -> int:
    """Elements below which a parameter stays whole on each rank: DeepSpeed's default, or less.

    In a small model the default would keep matrices whole too; ten rows of the residual stream let biases and
    norms stay whole and nothing else.
    """
    matrices_are_partitioned = job.model.hidden_size**2 > _DEFAULT_PERSISTENCE_THRESHOLD
    return _DEFAULT_PERSISTENCE_THRESHOLD if matrices_are_partitioned else 10 * job.model.hidden_size


def learning_rate(num_parameters: int) -> float:
    """A rate to start from, to two digits: 0.003239 - 0.0001395 ln N, kept between 6e-5 and 1e-3.

    Kaplan et al. 2020 (arXiv 2001.08361, equation D.1), for Adam and models up to about 10^10 parameters; the
    floor is the rate of GPT-3 175B (arXiv 2005.14165, table 2.1), the ceiling is our caution.
    """
    rate = max(6e-5, 0.003239 - 0.0001395 * math.log(num_parameters))
    return float(f"{min(rate, 1e-3):.2g}")


def _reasons(job: Job, chosen: Rung, stage: int | None) -> list[str]:
    how = "the stage asked for" if stage is not None else "the least intrusive that fits"
    reasons = [f"{chosen.name} ({how}): {chosen.why}"]
    default_bytes = format_bytes(DEFAULT_BUCKET_SIZE * job.precision.num_bytes)
    if bucket_size(job) < DEFAULT_BUCKET_SIZE and chosen.stage > 0:
        reasons.append(
            f"buckets of {format_count(bucket_size(job))} elements, the model's size: DeepSpeed makes the"
            f" buffer whole at the start, {default_bytes} of it by default"
        )
    if chosen.stage == 3:
        threshold = persistence_threshold(job)
        if threshold < _DEFAULT_PERSISTENCE_THRESHOLD:
            reasons.append(
                f"only parameters below {threshold} elements stay whole: at the default of"
                f" {_DEFAULT_PERSISTENCE_THRESHOLD:,} the matrices of this model would not be partitioned"
            )
        reasons.append("weights may be gathered on save: else save_16bit_model writes nothing at stage 3")
    if not job.cluster.has_gpus:
        reasons.append("torch's own AdamW: DeepSpeed's would have to be compiled first")
    reasons += [
        f"learning rate {learning_rate(job.model.num_parameters):g}: a start for this size; tune it",
        "gradient clipping 1.0: DeepSpeed's default, written down because few expect it to be on",
        "a line of progress every 10 steps: DeepSpeed prints none by default",
        f"a checkpoint every {_SAVE_EVERY}, the last 3 kept: what a failure may cost",
    ]
    return reasons


def _nothing_fits(job: Job, rungs: list[Rung], stage: int | None) -> ToolkitError:
    candidates = [rung for rung in rungs if stage is None or rung.stage == stage]
    best = min(candidates, key=lambda rung: rung.device_bytes or rung.host_bytes)
    place = "GPU" if best.device_bytes is not None else "host"
    ranks = 1 if best.device_bytes is not None else job.cluster.ranks_per_node
    activations_bytes = best.memory.activations_bytes * ranks
    activations = format_bytes(activations_bytes)
    states = format_bytes((best.device_bytes or best.host_bytes) - activations_bytes)
    more = "more GPUs or hosts, or a larger --stage" if stage is not None else "more GPUs or hosts"
    return ToolkitError(
        "the model does not fit",
        where=f"{job.cluster.num_nodes} x {job.cluster.ranks_per_node} ranks",
        why=f"{best.name}: {best.why}; a {place} needs {states} for states, {activations} for activations",
        fix=f"{more}; a smaller --micro-batch-size or --sequence-length shrinks activations",
    )
