"""Why a configuration is as it is, a line each, and what to do where none is possible."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ds_toolkit.config.consumers import Consumer
from ds_toolkit.errors import ToolkitError
from ds_toolkit.plan.job import Job
from ds_toolkit.plan.ladder import Rung, choose, ladder
from ds_toolkit.plan.network import Network
from ds_toolkit.plan.zero import DEFAULT_BUCKET_SIZE, DEFAULT_PERSISTENCE_THRESHOLD, ZeroSettings
from ds_toolkit.units import format_bytes, format_count

# As many as anyone has had; beyond it a model that does not fit is not short of hosts.
_MOST_RANKS = 2**15


def config_reasons(
    chosen: Rung, stage: int | None, consumer: Consumer, settings: Mapping[str, object]
) -> list[str]:
    """What a reader of the configuration would ask, answered; `stage` is the one that was asked for."""
    job = chosen.job
    how = "the stage asked for" if stage is not None else "the least intrusive that fits"
    reasons = [
        f"global batch {job.global_batch_size} = micro batch {job.micro_batch_size}"
        f" x accumulation {job.accumulation_steps} x {job.cluster.world_size} ranks",
        f"{chosen.name} ({how}): {chosen.why}",
        *_about_memory(chosen),
        *_about_consumer(job, consumer, settings),
    ]
    if settings["has_optimizer"] and not job.cluster.has_gpus:
        reasons.append("torch's own AdamW: DeepSpeed's would have to be compiled first")
    if consumer in (Consumer.NATIVE, Consumer.ACCELERATE):
        reasons.append(f"learning rate {settings['suggested_rate']:g}: a start for this size; tune it")
    if consumer is not Consumer.HF:
        reasons.append(
            "gradient clipping 1.0: DeepSpeed's default, written down because few expect it to be on"
        )
    if settings["steps_per_print"] is not None:
        reasons.append(
            f"a line of progress every {settings['steps_per_print']} steps: DeepSpeed prints none by default"
        )
    return reasons


def _about_memory(chosen: Rung) -> Iterator[str]:
    job, zero = chosen.job, ZeroSettings.fitted(chosen.job)
    if job.recompute_activations:
        yield (
            "activations are computed again: the model must do that itself"
            " (gradient_checkpointing_enable() or torch.utils.checkpoint); no key of DeepSpeed turns it on"
        )
    if zero.reduce_bucket_size < DEFAULT_BUCKET_SIZE and chosen.stage > 0:
        default_bytes = format_bytes(DEFAULT_BUCKET_SIZE * job.precision.num_bytes)
        yield (
            f"buckets of {format_count(zero.reduce_bucket_size)} elements, the model's size: DeepSpeed makes"
            f" the buffer whole at the start, {default_bytes} of it by default"
        )
    if chosen.stage == 3:
        if zero.persistence_threshold < DEFAULT_PERSISTENCE_THRESHOLD:
            yield (
                f"only parameters below {zero.persistence_threshold} elements stay whole: at the default of"
                f" {DEFAULT_PERSISTENCE_THRESHOLD:,} the matrices of this model would not be partitioned"
            )
        yield "weights may be gathered on save: else save_16bit_model writes nothing at stage 3"
    if chosen.offload.nvme:
        yield f"{format_bytes(chosen.nvme_bytes)} on each host's NVMe drive; DeepSpeed needs libaio for it"


def _about_consumer(job: Job, consumer: Consumer, settings: Mapping[str, object]) -> Iterator[str]:
    if consumer is Consumer.HF:
        precision = "" if settings["precision"] == "fp32" else f" --{settings['precision']}"
        recompute = " --gradient_checkpointing" if job.recompute_activations else ""
        yield (
            '"auto" is what the Trainer fills in; start it with'
            f" --per_device_train_batch_size {job.micro_batch_size}"
            f" --gradient_accumulation_steps {job.accumulation_steps} --max_grad_norm 1.0"
            f" --learning_rate {settings['suggested_rate']:g}{precision}{recompute}"
        )
    elif consumer is Consumer.ACCELERATE:
        yield "the optimizer is DeepSpeed's: pass accelerate.utils.DummyOptim where the script would make one"
    elif consumer is Consumer.LIGHTNING:
        yield (
            f"Lightning makes the optimizer and the accumulation: configure_optimizers, and"
            f" Trainer(accumulate_grad_batches={job.accumulation_steps})"
        )


class NothingFitsError(ToolkitError):
    """No rung fits; it brings the whole ladder, from which a person sees what is near.

    Attributes:
        job: what was wished for.
        rungs: the whole ladder.
        network: what communication is timed over.
    """

    def __init__(
        self, job: Job, rungs: list[Rung], network: Network | None, *, where: str, why: str, fix: str
    ) -> None:
        super().__init__("the model does not fit", where=where, why=why, fix=fix)
        self.job, self.rungs, self.network = job, rungs, network


def nothing_fits(
    job: Job,
    rungs: list[Rung],
    network: Network | None,
    stage: int | None,
    found_host_memory_bytes: int | None,
) -> NothingFitsError:
    """By how much the least demanding rung does not fit, and what would.

    `found_host_memory_bytes` is the memory of this host where it stands for that of the hosts of the run.
    """
    candidates = [rung for rung in rungs if stage is None or rung.stage == stage]
    best = min(candidates, key=lambda rung: (rung.device_bytes or rung.host_bytes, rung.host_bytes))
    on_device = best.device_bytes is not None
    place = "GPU" if on_device else "host"
    activations_bytes = best.memory.device.activations_bytes * (
        1 if on_device else job.cluster.ranks_per_node
    )
    activations = format_bytes(activations_bytes)
    states = format_bytes((best.device_bytes or best.host_bytes) - activations_bytes)
    on_nvme = any(rung.offload.nvme for rung in rungs)
    why = f"{best.name}: {best.why}; a {place} needs {states} for states, {activations} for activations"
    ways = []
    enough = fewest_hosts(job, stage, nvme=on_nvme)
    if enough is None:
        ways.append("hosts alone do not help: what each of them needs stays too much")
    else:
        hosts, rung = enough
        ranks = f"{hosts * job.cluster.ranks_per_node} {'GPUs' if on_device else 'ranks'}"
        each = f"{job.cluster.ranks_per_node} {'GPUs' if on_device else 'ranks'} a host as now"
        ways.append(f"--num-nodes {hosts}, {ranks} with {each}, is the fewest that fit: {rung.name}")
    if found_host_memory_bytes is not None:
        ways.append(f"host memory {format_bytes(found_host_memory_bytes)} as found here; --host-memory")
    if stage is not None and stage < 3:
        ways.append("a larger --stage")
    if on_device and not on_nvme and stage in (None, 3):
        ways.append("--nvme PATH for what host memory cannot hold")
    if best.job.sequence_length > 1:
        ways.append("a smaller --sequence-length shrinks activations")
    where = f"{job.cluster.num_nodes} x {job.cluster.ranks_per_node} ranks"
    return NothingFitsError(job, rungs, network, where=where, why=why, fix="; ".join(ways))


def fewest_hosts(job: Job, stage: int | None, *, nvme: bool) -> tuple[int, Rung] | None:
    """The fewest hosts like these on which a rung fits, and that rung; None where no number of them helps.

    More ranks never need more memory each, but for padding; so doubling and halving finds the number.
    """

    def fitting(num_nodes: int) -> Rung | None:
        wider = replace(job, cluster=replace(job.cluster, num_nodes=num_nodes))
        return choose(ladder(wider, stage=stage, nvme=nvme), stage)

    most = max(1, _MOST_RANKS // job.cluster.ranks_per_node)
    too_few, enough = 0, 1
    while (found := fitting(enough)) is None:
        if enough >= most:
            return None
        too_few, enough = enough, min(2 * enough, most)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        rung = fitting(middle)
        if rung is None:
            too_few = middle
        else:
            enough, found = middle, rung
    return enough, found
