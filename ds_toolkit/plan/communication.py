"""What one optimizer step sends between the ranks, how long it takes, and when compute cannot hide it."""

from __future__ import annotations

from dataclasses import dataclass

from ds_toolkit.plan.failures import positive
from ds_toolkit.plan.job import Job
from ds_toolkit.plan.memory import FP32_BYTES, Offload
from ds_toolkit.plan.network import HOST_BYTES_PER_SECOND, NVME_BYTES_PER_SECOND, Network
from ds_toolkit.plan.zero import ZeroSettings, flat_elements, persistent_elements, share_elements

# Of a GPU's peak, what training of transformers reaches in forward and backward. Our assumption.
UTILIZATION = 0.4


@dataclass(frozen=True)
class Traffic:
    """Messages of one optimizer step, in bytes: the whole tensor of each collective, summed by kind.

    Attributes:
        all_reduce_bytes: gradients at stages 0 to 2.
        reduce_scatter_bytes: gradients at stage 3.
        all_gather_bytes: weights.
        num_ranks: that take part.
        host_bytes: one rank's traffic between its GPU and host memory.
        nvme_bytes: one rank's traffic between host memory and NVMe.
    """

    all_reduce_bytes: int
    reduce_scatter_bytes: int
    all_gather_bytes: int
    num_ranks: int
    host_bytes: int = 0
    nvme_bytes: int = 0

    @property
    def sent_bytes(self) -> float:
        """What each rank sends with ring algorithms.

        Patarasuk and Yuan 2009 (JPDC 69(2)): of a message of n bytes, n (R - 1) / R for a reduce-scatter or
        an all-gather, and twice that for an all-reduce, which is one after the other.
        """
        once = self.reduce_scatter_bytes + self.all_gather_bytes
        return (2 * self.all_reduce_bytes + once) * (self.num_ranks - 1) / self.num_ranks


def step_traffic(
    job: Job, stage: int, offload: Offload = Offload(), settings: ZeroSettings | None = None
) -> Traffic:
    """What one optimizer step of DeepSpeed sends.

    The ZeRO paper (arXiv 1910.02054, section 7) counts two model sizes a rank at stages 1 and 2, as in plain
    data parallelism, and three at stage 3. DeepSpeed's stages 1 and 2 send three: each bucket of gradients is
    all-reduced, not scattered (stage_1_and_2.py, `use_multi_rank_bucket_allreduce`), and then weights are
    gathered. Stage 2 reduces after every micro batch, stages 0 and 1 once a step. Stage 3 gathers weights
    for each forward and again for each backward pass, except for what it had not given up: what is needed
    again within the reuse distance, passed on the way to the end of the forward pass and back. Parameters
    that stay whole are gathered once a step. Prefetching may keep more; then it sends less.
    """
    settings = settings or ZeroSettings.fitted(job)
    model, ranks, number_bytes = job.model, job.cluster.world_size, job.precision.num_bytes
    passes = job.accumulation_steps
    host_bytes, nvme_bytes = _offload_traffic(job, stage, offload)
    if stage < 3:
        flat = flat_elements(model.num_parameters, ranks) if stage else model.num_parameters
        reductions = passes if stage == 2 else 1
        reduced = model.num_parameters * number_bytes * reductions
        return Traffic(reduced, 0, flat * number_bytes * (stage > 0), ranks, host_bytes, nvme_bytes)
    padded = share_elements(model, ranks, stage) * ranks
    whole = persistent_elements(model, settings.persistence_threshold, ranks)
    given_up = max(0, padded - whole - settings.max_reuse_distance // 2)
    gathered = passes * (padded - whole + given_up) + whole
    return Traffic(0, passes * padded * number_bytes, gathered * number_bytes, ranks, host_bytes, nvme_bytes)


def _offload_traffic(job: Job, stage: int, offload: Offload) -> tuple[int, int]:
    # Gradients go down after every pass, weights come back after the step; offloaded weights come up for
    # every gather. On NVMe, the optimizer's state is read and written once a step.
    if not offload.optimizer:
        return 0, 0
    share = share_elements(job.model, job.cluster.world_size, stage)
    shares = job.accumulation_steps + 1
    if offload.parameters:
        shares += 2 * job.accumulation_steps
    host_bytes = share * job.precision.num_bytes * shares
    state_bytes = 2 * share * 3 * FP32_BYTES
    return host_bytes, (state_bytes + (host_bytes if offload.parameters else 0)) if offload.nvme else 0


def step_seconds(traffic: Traffic, network: Network, ranks_per_node: int) -> float:
    """Seconds of one step's communication, with nothing overlapping and without latency.

    A ring passes each host's links once in each direction with what one rank sends. Offloading adds the
    traffic of each GPU's own slot, and of the NVMe drive that a host's ranks share.
    """
    return (
        traffic.sent_bytes / network.achieved_bytes_per_second
        + traffic.host_bytes / HOST_BYTES_PER_SECOND
        + traffic.nvme_bytes * ranks_per_node / NVME_BYTES_PER_SECOND
    )


def compute_seconds(job: Job, flops_per_second: float, utilization: float = UTILIZATION) -> float:
    """Seconds of one step's forward and backward passes on one rank.

    6 N floating-point operations a token (Kaplan et al. 2020, arXiv 2001.08361, section 2.1), 8 N where
    blocks are computed again, at `utilization` of the GPU's peak. In a mixture of experts N are those that a
    token passes.
    """
    positive(flops_per_second, "speed of a GPU")
    positive(utilization, "utilization")
    tokens = job.micro_batch_size * job.sequence_length * job.accumulation_steps
    operations = (8 if job.recompute_activations else 6) * job.model.num_active_parameters * tokens
    return operations / (flops_per_second * utilization)


def break_even_bytes_per_second(traffic: Traffic, seconds: float) -> float:
    """The rate that links must reach for communication to take no longer than `seconds` of compute.

    Above it communication can hide behind compute; below it the GPUs wait.
    """
    return traffic.sent_bytes / positive(seconds, "time of compute")
