"""DS55x: what only shows when configuration, model, machine and environment are seen together."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from ds_toolkit.advise.subject import ZERO, Plan
from ds_toolkit.config.subject import Config, json_pointer
from ds_toolkit.findings import Finding, Severity, Where
from ds_toolkit.plan.communication import compute_seconds, step_seconds, step_traffic
from ds_toolkit.plan.ladder import USABLE_FRACTION
from ds_toolkit.plan.memory import rank_memory
from ds_toolkit.plan.network import Network
from ds_toolkit.plan.zero import DEFAULT_BUCKET_SIZE
from ds_toolkit.rules import Problem, Registry
from ds_toolkit.units import format_bytes, format_count, format_seconds

# An A100 in 16 bits; on faster GPUs a network is overtaken sooner.
_REFERENCE_FLOPS_PER_SECOND = 312e12
# Below it the latency of a collective outweighs its bytes.
_SMALL_BUCKET = 1_000_000
_LARGE_MODEL = 100_000_000
# NVIDIA's names of boards that NVLink connects. nvidia-smi says SXM of boards up to the A100; those since it
# calls by the chip alone ("NVIDIA H100 80GB HBM3", "NVIDIA B200"), and says PCIe where a board is one.
_NVLINK_NAMES = re.compile(
    r"SXM|NVL|DGX|HGX|GH200|GB[23]00|H[128]00(?!.*PCIE)|H20\b(?!.*PCIE)|\bB[23]00(?!.*PCIE)", re.IGNORECASE
)


RULES: Registry[Plan] = Registry()
rule = RULES.rule


def lint_plan(plan: Plan, where: Callable[[str], Where] | None = None) -> list[Finding]:
    """What the rules find where several things are known.

    `where` turns a pointer into a place: a JSON pointer into the configuration, which begins with a slash, or
    the name of a variable.
    """
    return RULES.findings(plan, where or (lambda pointer: Where(None, pointer)))


@rule("DS551", "bucket-larger-than-the-model", Severity.WARNING)
def bucket_larger_than_the_model(plan: Plan) -> Iterator[Problem]:
    """The bucket that gradients are reduced from is larger than the model.

    DeepSpeed allocates it whole, whatever the model's size: at the default of 500 million elements that is
    1 GB in 16 bits, and twice as much where communication overlaps.

    Bad (model=1M):
        {"train_batch_size": 8, "zero_optimization": {"stage": 2}}
    Good (model=1M):
        {"train_batch_size": 8, "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000000}}
    Good (model=7B):
        {"train_batch_size": 8, "zero_optimization": {"stage": 2}}
    """
    if plan.job is None or not plan.stage or Config(plan.config).zero.get("reduce_bucket_size") == "auto":
        return
    size, num_parameters = plan.settings.reduce_bucket_size, plan.job.model.num_parameters
    if size > num_parameters:
        needed = max(2, num_parameters // 2 * 2)
        excess_bytes = format_bytes((size - num_parameters) * plan.job.precision.num_bytes)
        message = f"a bucket of {format_count(size)} elements wastes {excess_bytes} on this model"
        pointer = json_pointer(ZERO, "reduce_bucket_size")
        yield Problem(pointer, message, f"set `reduce_bucket_size` to {needed}")


@rule("DS552", "stage-three-over-a-slow-network", Severity.WARNING)
def stage_three_over_a_slow_network(plan: Plan) -> Iterator[Problem]:
    """Stage 3 sends more than the network between the hosts carries while the GPUs compute.

    It gathers all weights for each forward and each backward pass. Where that takes longer than the passes
    themselves (on an A100; on faster GPUs all the more), GPUs wait for the network. With
    `zero_hpz_partition_size` the backward pass gathers inside a host, and only the forward pass counts.

    Bad (model=7B, network=10GbE, nodes=2):
        {"train_batch_size": 8, "zero_optimization": {"stage": 3}}
    Good (model=7B, network=8x400Gb-IB, nodes=2):
        {"train_batch_size": 8, "zero_optimization": {"stage": 3}}
    Good (model=7B, network=10GbE, nodes=1):
        {"train_batch_size": 8, "zero_optimization": {"stage": 3}}
    """
    if plan.job is None or plan.stage != 3 or plan.network is None:
        return
    if plan.job.cluster.num_nodes == 1 or not plan.job.cluster.has_gpus:
        return
    traffic = step_traffic(plan.job, 3, settings=plan.settings)
    if _keeps_backward_inside_a_host(plan):
        # Half of what is gathered, at the most, is for the backward pass (ZeRO++, arXiv 2306.10209, 4.2).
        whole = plan.job.model.num_parameters * plan.job.precision.num_bytes * plan.job.accumulation_steps
        traffic = replace(traffic, all_gather_bytes=min(traffic.all_gather_bytes, whole))
    # NVMe and the bus to the host are no matter of the network.
    sending = step_seconds(traffic, plan.network, 1)
    computing = compute_seconds(plan.job, _REFERENCE_FLOPS_PER_SECOND)
    if sending > computing:
        message = (
            f"over {plan.network.name} a step sends for {format_seconds(sending)}"
            f" and computes for {format_seconds(computing)}"
        )
        fix = "a larger micro batch, stage 1 if it fits"
        if not _keeps_backward_inside_a_host(plan):
            fix += ", or zero_hpz_partition_size of one host's GPUs"
        yield Problem(json_pointer(ZERO, "stage"), message, fix)


@rule("DS553", "bucket-too-small-to-fill-a-link", Severity.WARNING)
def bucket_too_small_to_fill_a_link(plan: Plan) -> Iterator[Problem]:
    """Gradients of a large model are reduced in buckets so small that latency outweighs bytes.

    Bad (model=7B):
        {"train_batch_size": 8, "zero_optimization": {"stage": 2, "reduce_bucket_size": 10000}}
    Good (model=7B):
        {"train_batch_size": 8, "zero_optimization": {"stage": 2, "reduce_bucket_size": 200000000}}
    """
    size = plan.number("reduce_bucket_size")
    if (
        plan.job is not None
        and plan.stage
        and size is not None
        and size < _SMALL_BUCKET
        and plan.job.model.num_parameters > _LARGE_MODEL
    ):
        collectives = plan.job.model.num_parameters // max(1, size)
        message = f"buckets of {size} elements: {format_count(collectives)} collectives a step"
        pointer = json_pointer(ZERO, "reduce_bucket_size")
        yield Problem(
            pointer, message, f"leave the default of {DEFAULT_BUCKET_SIZE}, or take 50000000 or more"
        )


@rule("DS554", "peer-access-off-on-nvlink", Severity.WARNING)
def peer_access_off_on_nvlink(plan: Plan) -> Iterator[Problem]:
    """Peer access is off on GPUs that NVLink connects: all traffic takes the way through host memory.

    `NCCL_P2P_DISABLE=1`, and `NCCL_P2P_LEVEL=LOC` or 0, which do the same, are a workaround for consumer
    GPUs and virtual machines without peer access, often copied along.

    Bad (model=7B, gpu=A100-SXM4-80GB):
        NCCL_P2P_DISABLE=1
    Bad (model=7B, gpu=NVIDIA-H200):
        NCCL_P2P_LEVEL=LOC
    Good (model=7B, gpu=A100-SXM4-80GB):
        NCCL_P2P_DISABLE=0
    Good (model=7B, gpu=RTX-4090):
        NCCL_P2P_DISABLE=1
    """
    linked = [name for name in plan.gpu_names if _NVLINK_NAMES.search(name)]
    nvlink = linked or (plan.network is not None and plan.network.name.upper().startswith("NVLINK"))
    if not nvlink:
        return
    for name, off in (("NCCL_P2P_DISABLE", {"1"}), ("NCCL_P2P_LEVEL", {"LOC", "0"})):
        if plan.variables.get(name, "").upper() in off:
            message = f"NVLink of {linked[0] if linked else 'these GPUs'} is left unused"
            yield Problem(name, message, "remove the line")


@rule("DS555", "infiniband-off-on-infiniband", Severity.WARNING)
def infiniband_off_on_infiniband(plan: Plan) -> Iterator[Problem]:
    """`NCCL_IB_DISABLE=1`, and the hosts are connected by InfiniBand: NCCL falls back to sockets.

    Bad (model=7B, network=400Gb-IB, nodes=2):
        NCCL_IB_DISABLE=1
    Good (model=7B, network=100GbE, nodes=2):
        NCCL_IB_DISABLE=1
    Good (model=7B, network=400Gb-IB, nodes=1):
        NCCL_IB_DISABLE=1
    """
    on_one_host = plan.cluster is not None and plan.cluster.num_nodes == 1
    if plan.variables.get("NCCL_IB_DISABLE") == "1" and _is_infiniband(plan.network) and not on_one_host:
        message = f"{plan.network.name if plan.network else ''} is left unused: NCCL falls back to sockets"
        yield Problem("NCCL_IB_DISABLE", message, "remove the line")


@rule("DS556", "infiniband-on-without-infiniband", Severity.WARNING)
def infiniband_on_without_infiniband(plan: Plan) -> Iterator[Problem]:
    """InfiniBand is asked for, and the hosts are connected by Ethernet.

    NCCL looks for cards that are not there; with `NCCL_NET=IB`, in any spelling, it ends. Beside
    `NCCL_IB_DISABLE=1` the names of cards do nothing.

    Bad (model=7B, network=10GbE, nodes=2):
        NCCL_IB_HCA=mlx5_0
    Bad (model=7B, network=10GbE, nodes=2):
        NCCL_NET=ib
    Good (model=7B, network=10GbE, nodes=2):
        NCCL_IB_DISABLE=1
        NCCL_IB_HCA=mlx5_0
    Good (model=7B, network=400Gb-IB, nodes=2):
        NCCL_IB_HCA=mlx5_0
    """
    on_one_host = plan.cluster is not None and plan.cluster.num_nodes == 1
    if plan.network is None or on_one_host or _is_infiniband(plan.network):
        return
    disabled = plan.variables.get("NCCL_IB_DISABLE") == "1"
    asked = {"NCCL_IB_HCA": None, "NCCL_NET": "IB", "NCCL_IB_DISABLE": "0"}
    for name, value in asked.items():
        if name == "NCCL_IB_HCA" and disabled:
            continue
        if name in plan.variables and value in (None, plan.variables[name].upper()):
            message = f"`{name}={plan.variables[name]}` asks for InfiniBand over {plan.network.name}"
            yield Problem(name, message, "remove the line")


@rule("DS557", "more-than-a-gpu-holds", Severity.ERROR)
def more_than_a_gpu_holds(plan: Plan) -> Iterator[Problem]:
    """What the configuration keeps on each GPU is more than the GPU has.

    Bad (model=70B):
        {"train_batch_size": 8, "zero_optimization": {"stage": 1}}
    Good (model=1B):
        {"train_batch_size": 8, "zero_optimization": {"stage": 1}}
    """
    have = plan.job.cluster.device_memory_bytes if plan.job else None
    if plan.job is None or have is None or plan.stage is None:
        return
    memory = rank_memory(plan.job, plan.stage, plan.offload, plan.settings)
    need = memory.device.total_bytes
    # Smaller micro batches and recomputing are the script's to choose; states are not.
    if need - memory.device.activations_bytes > have * USABLE_FRACTION:
        message = f"a rank needs {format_bytes(need)} of the {format_bytes(have)} that a GPU has"
        fix = "climb the memory ladder: `ds-toolkit gen-config` prints it"
        yield Problem(json_pointer(ZERO, "stage"), message, fix)


@rule("DS558", "offload-without-need", Severity.WARNING)
def offload_without_need(plan: Plan) -> Iterator[Problem]:
    """The optimizer lives in host memory although everything fits on the GPUs, where it is far faster.

    Bad (model=1B):
        {"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    Good (model=1B):
        {"train_batch_size": 8, "zero_optimization": {"stage": 2}}
    Good (model=30B):
        {"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    """
    have = plan.job.cluster.device_memory_bytes if plan.job else None
    if plan.job is None or have is None or not plan.stage or not plan.offload.optimizer:
        return
    need = rank_memory(plan.job, plan.stage, settings=plan.settings).device.total_bytes
    if need <= have * USABLE_FRACTION:
        message = f"without offloading a rank needs {format_bytes(need)} of {format_bytes(have)}"
        # The deprecated `cpu_offload: true` does the same.
        written = "offload_optimizer" if "offload_optimizer" in Config(plan.config).zero else "cpu_offload"
        yield Problem(json_pointer(ZERO, written), message, "remove it")


@rule("DS559", "secondary-partition-across-hosts", Severity.WARNING)
def secondary_partition_across_hosts(plan: Plan) -> Iterator[Problem]:
    """ZeRO++ keeps a second copy of the weights among more ranks than one host has.

    It is there to keep what the backward pass gathers inside a host (ZeRO++, arXiv 2306.10209, section 4.2).

    Bad (model=7B, nodes=2, network=8x400Gb-IB):
        {"train_batch_size": 8, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 16}}
    Good (model=7B, nodes=2, network=8x400Gb-IB):
        {"train_batch_size": 8, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}
    """
    size, cluster = plan.number("zero_hpz_partition_size"), plan.cluster
    if plan.stage == 3 and size is not None and cluster is not None and size > cluster.ranks_per_node:
        per_node = cluster.ranks_per_node
        message = f"`zero_hpz_partition_size` {size} reaches beyond the {per_node} ranks of a host"
        yield Problem(json_pointer(ZERO, "zero_hpz_partition_size"), message, f"set it to {per_node}")


def _keeps_backward_inside_a_host(plan: Plan) -> bool:
    size = plan.number("zero_hpz_partition_size")
    return size is not None and plan.cluster is not None and 1 < size <= plan.cluster.ranks_per_node


def _is_infiniband(network: Network | None) -> bool:
    return network is not None and network.name.upper().endswith(("IB", "ROCE"))
