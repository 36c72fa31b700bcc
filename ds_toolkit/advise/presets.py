"""From answers to a checked configuration: the ladder picks, a template writes, the linter reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from ds_toolkit.advise.answers import Answers, complete, complete_network
from ds_toolkit.advise.reasons import config_reasons, nothing_fits
from ds_toolkit.advise.saving import saving_interval
from ds_toolkit.advise.tuning import learning_rate
from ds_toolkit.config.consumers import Consumer
from ds_toolkit.config.linter import lint
from ds_toolkit.config.reader import read_config_text
from ds_toolkit.config.schema.export import FILE_NAME
from ds_toolkit.env.fabric import Host
from ds_toolkit.errors import ToolkitError
from ds_toolkit.plan.job import Job
from ds_toolkit.plan.ladder import Rung, choose, ladder
from ds_toolkit.plan.network import Network
from ds_toolkit.plan.zero import ZeroSettings, largest_tensor
from ds_toolkit.rendering import render

# DeepSpeed's default for offload_param.buffer_size, in elements.
_NVME_BUFFER_SIZE = 100_000_000


@dataclass(frozen=True)
class Preset:
    """One template of `ds_config/`, what it is for, and the optimizer's settings that go with it.

    Attributes:
        purpose: one line for the person who chooses.
        learning_rate_share: of the rate to start from.
        betas: Adam's decay rates.
        weight_decay: AdamW's.
        steps_per_print: steps between two lines of progress.
    """

    purpose: str
    learning_rate_share: float
    betas: tuple[float, float]
    weight_decay: float
    steps_per_print: int


# Betas and decay of pretraining as in GPT-3 (arXiv 2005.14165, appendix B); for finetuning torch's betas, no
# decay, and a tenth of the rate, as is usual.
PRESETS: dict[str, Preset] = {
    "pretrain": Preset("train from the start", 1.0, (0.9, 0.95), 0.1, 10),
    "finetune": Preset(
        "go on from trained weights: a smaller rate, with a warmup", 0.1, (0.9, 0.999), 0.0, 10
    ),
    "debug": Preset("find out where time goes: timers and a log of communication", 1.0, (0.9, 0.95), 0.1, 1),
}


@dataclass(frozen=True)
class Advice:
    """A configuration and how it came about.

    Attributes:
        text: strict JSON with a newline at the end.
        config: the same as data.
        job: the answers, completed, as the chosen rung runs them.
        rungs: the whole ladder.
        chosen: the rung that the configuration stands on.
        network: what communication is timed over; None where the ranks share memory.
        reasons: what was chosen and why, a line each.
    """

    text: str
    config: dict[str, object]
    job: Job
    rungs: list[Rung]
    chosen: Rung
    network: Network | None
    reasons: list[str]


def advise_config(answers: Answers, host: Host, found_links: str | None = None) -> Advice:
    """A ds_config for this job that the toolkit's own rules find nothing wrong with.

    Args:
        answers: what was said.
        host: what this machine has.
        found_links: how its links to other hosts are called, where that is known.

    Raises:
        ToolkitError: an answer is impossible, or nothing fits (`NothingFitsError`); it says by how
            much, and what would.
    """
    preset = PRESETS.get(answers.preset)
    if preset is None:
        raise ToolkitError(f"there is no preset `{answers.preset}`", fix=f"one of {', '.join(PRESETS)}")
    wished, reasons = complete(answers, host)
    network, from_where = complete_network(answers, wished.cluster, found_links)
    rungs = ladder(wished, network, stage=answers.stage, nvme=answers.nvme_path is not None)
    chosen = choose(rungs, answers.stage)
    if chosen is None:
        found_memory_bytes = host.memory_bytes if answers.host_memory_bytes is None else None
        raise nothing_fits(wished, rungs, network, answers.stage, found_memory_bytes)
    job = chosen.job
    save_every, about_saving = saving_interval(job, chosen.stage, answers.mttf_per_gpu_seconds)
    settings = _settings(answers, preset, chosen, save_every)
    text = render(f"ds_config/{answers.preset}.json.j2", **settings)
    config: dict[str, object] = json.loads(text)
    findings = lint(read_config_text(text), world_size=job.cluster.world_size, consumer=answers.consumer)
    if findings:
        # The tests cover each rung; an answer that they do not think of must not go out as advice.
        raise ToolkitError(
            "the configuration that these answers lead to breaks the toolkit's own rules",
            why="; ".join(f"{finding.code} at {finding.where}: {finding.message}" for finding in findings),
            fix="change the answer that the finding is about, and report this",
        )
    reasons += [from_where] if from_where else []
    reasons += config_reasons(chosen, answers.stage, answers.consumer, settings)
    return Advice(text, config, job, rungs, chosen, network, [*reasons, about_saving])


def _settings(answers: Answers, preset: Preset, chosen: Rung, save_every: str) -> Mapping[str, object]:
    job, consumer = chosen.job, answers.consumer
    zero = ZeroSettings.fitted(job)
    on_nvme = chosen.offload.nvme
    rate = learning_rate(job.model.num_parameters, preset.learning_rate_share)
    settings: dict[str, object] = {
        "schema_file": FILE_NAME,
        "micro_batch_size": job.micro_batch_size,
        "accumulation_steps": job.accumulation_steps,
        "gradient_clipping": 1.0,
        "steps_per_print": preset.steps_per_print,
        "has_optimizer": consumer is not Consumer.LIGHTNING,
        "suggested_rate": rate,
        "learning_rate": rate,
        "betas": list(preset.betas),
        "epsilon": 1e-8,
        "weight_decay": preset.weight_decay,
        "torch_adam": not job.cluster.has_gpus,
        # Under the others a script or its framework makes the schedule.
        "has_scheduler": consumer is Consumer.NATIVE,
        "precision": job.precision.value,
        "precision_enabled": True,
        "stage": chosen.stage,
        "overlap_comm": zero.overlap_comm,
        "bucket_size": zero.reduce_bucket_size,
        "prefetch_bucket_size": zero.prefetch_bucket_size,
        "persistence_threshold": zero.persistence_threshold,
        "offload_optimizer": chosen.offload.optimizer,
        "offload_param": chosen.offload.parameters,
        "offload_device": "nvme" if on_nvme else "cpu",
        "nvme_path": answers.nvme_path if on_nvme else None,
        "nvme_buffer_size": max(_NVME_BUFFER_SIZE, largest_tensor(job.model)),
        "save_every": save_every,
    }
    if consumer is Consumer.LIGHTNING:
        settings["accumulation_steps"] = None
    if consumer is Consumer.HF:
        filled_in = ("micro_batch_size", "accumulation_steps", "gradient_clipping", "learning_rate", "betas")
        settings |= dict.fromkeys((*filled_in, "epsilon", "weight_decay", "precision_enabled"), "auto")
    if consumer in (Consumer.HF, Consumer.ACCELERATE):
        settings["steps_per_print"] = None
    return settings
