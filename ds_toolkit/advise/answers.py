"""What a person said about a run, completed with what this machine has."""

from __future__ import annotations

from dataclasses import dataclass

from ds_toolkit.config.consumers import Consumer
from ds_toolkit.env.fabric import Host
from ds_toolkit.errors import ToolkitError
from ds_toolkit.plan.job import Cluster, Job, Model, Precision
from ds_toolkit.plan.network import DEFAULT_GPU_LINK, Network, parse_network
from ds_toolkit.units import format_bytes

DEFAULT_SEQUENCE_LENGTH = 2048
# What a cluster has at the least; said in the reasons.
_DEFAULT_BETWEEN_HOSTS = "10GbE"


@dataclass(frozen=True)
class Answers:
    """The wishes for a run; None is for the toolkit to find out.

    Attributes:
        model: its shape, or the number of its parameters.
        gpus_per_node: ranks a node; on a machine without GPUs, processes a node.
        gpu_memory_bytes: of one GPU; given, it says that the run is for GPUs, wherever this is asked.
        host_memory_bytes: of one node.
        global_batch_size: samples of one optimizer step.
        micro_batch_size: samples of one forward pass on one rank.
        sequence_length: tokens of one sample.
        stage: the ZeRO stage.
        nvme_path: a folder on a fast local drive that may be offloaded to.
        network: the slowest links that the ranks share.
        preset: which template, by its name.
        consumer: who hands the configuration to DeepSpeed.
        mttf_per_gpu_seconds: mean time to failure of one GPU and what belongs to it.
    """

    model: Model | int
    num_nodes: int = 1
    gpus_per_node: int | None = None
    gpu_memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    precision: Precision | None = None
    global_batch_size: int | None = None
    micro_batch_size: int | None = None
    sequence_length: int | None = None
    stage: int | None = None
    nvme_path: str | None = None
    network: Network | None = None
    preset: str = "pretrain"
    consumer: Consumer = Consumer.NATIVE
    mttf_per_gpu_seconds: float | None = None


def complete(answers: Answers, host: Host) -> tuple[Job, list[str]]:
    """The job that the answers and this machine make together, and a line for each thing that was filled in.

    Raises:
        ToolkitError: a number below 1, batch sizes that do not multiply, or an NVMe drive without a path.
    """
    if answers.nvme_path is not None and not answers.nvme_path.strip():
        raise ToolkitError("--nvme is empty", fix="name a folder on the drive, such as --nvme /local")
    reasons: list[str] = []
    cluster = _cluster(answers, host, reasons)
    precision = answers.precision
    if precision is None:
        precision = Precision.BF16 if cluster.has_gpus else Precision.FP32
        why = "the range of fp32, no loss scaling" if cluster.has_gpus else "the CPU works in fp32 fastest"
        reasons.append(f"precision {precision.value}: {why}")
    elif precision is Precision.FP16 and not cluster.has_gpus:
        reasons.append("precision fp16: few CPUs can; DeepSpeed refuses to start on the others")
    sequence_length = answers.sequence_length
    if sequence_length is None:
        sequence_length = DEFAULT_SEQUENCE_LENGTH
        reasons.append(f"sequence length {sequence_length} is assumed, for activations")
    micro_batch_size = answers.micro_batch_size
    if micro_batch_size is None:
        micro_batch_size = 1
        reasons.append("micro batch 1: the least memory; raise it while there is room")
    accumulation_steps = _accumulation_steps(answers.global_batch_size, micro_batch_size, cluster.world_size)
    model = answers.model if isinstance(answers.model, Model) else Model.from_count(answers.model)
    reasons.insert(0, model.rationale)
    job = Job(model, cluster, precision, micro_batch_size, accumulation_steps, sequence_length)
    return job, reasons


def check_global_batch(answers: Answers) -> None:
    """Refuse a global batch that no answer still to come could make fit.

    What was not said counts as 1, which divides everything.

    Raises:
        ToolkitError: it is no multiple of one pass over all ranks.
    """
    num_ranks = answers.num_nodes * (answers.gpus_per_node or 1)
    _accumulation_steps(answers.global_batch_size, answers.micro_batch_size or 1, num_ranks)


def complete_network(
    answers: Answers, cluster: Cluster, found: str | None
) -> tuple[Network | None, str | None]:
    """The network that the job's communication is timed over, and a line on where it comes from.

    None for a CPU's ranks on one host, which share memory. `found` is what this host's links are called.
    """
    if answers.network is not None:
        return answers.network, None
    if cluster.num_nodes == 1:
        if not cluster.has_gpus:
            return None, None
        name, why = DEFAULT_GPU_LINK, "assumed between the GPUs of a host; say --interconnect NVLink4"
    elif found is not None:
        name, why = found, "as found here"
    else:
        name, why = _DEFAULT_BETWEEN_HOSTS, "assumed between hosts; say --interconnect 400Gb-IB"
    return parse_network(name), f"communication over {name}: {why}"


def _cluster(answers: Answers, host: Host, reasons: list[str]) -> Cluster:
    device_memory_bytes = answers.gpu_memory_bytes
    if device_memory_bytes is None and host.gpus:
        # The smallest one decides, since all ranks hold the same share.
        device_memory_bytes = min(gpu.memory_bytes for gpu in host.gpus)
        reasons.append(f"GPUs as found here: {len(host.gpus)} x {host.gpus[0].name}")
    ranks_per_node = answers.gpus_per_node
    if ranks_per_node is None:
        if host.gpus:
            ranks_per_node = len(host.gpus)
        elif device_memory_bytes is None:
            ranks_per_node = host.num_cpus
            reasons.append(f"{ranks_per_node} ranks a node: as many as processors here")
        else:
            raise ToolkitError(
                "the number of GPUs a node is not known",
                why="this machine has none",
                fix="give --gpus-per-node",
            )
    if device_memory_bytes is None:
        reasons.append("no GPU here, so the CPU does the work; --gpu-memory 80GB plans for GPUs elsewhere")
    host_memory_bytes = answers.host_memory_bytes
    if host_memory_bytes is None and host.memory_bytes is not None:
        host_memory_bytes = host.memory_bytes
        found = format_bytes(host_memory_bytes)
        reasons.append(f"host memory {found} as found here; --host-memory says what others have")
    return Cluster(answers.num_nodes, ranks_per_node, device_memory_bytes, host_memory_bytes)


def _accumulation_steps(global_batch_size: int | None, micro_batch_size: int, num_ranks: int) -> int:
    if global_batch_size is None or micro_batch_size < 1:
        return 1
    one_pass = micro_batch_size * num_ranks
    if global_batch_size % one_pass or global_batch_size < 1:
        below = max(1, global_batch_size // one_pass) * one_pass
        raise ToolkitError(
            f"the global batch {global_batch_size} cannot be divided",
            why=f"one pass is {one_pass}: micro batch {micro_batch_size} x {num_ranks} ranks",
            fix=f"give --global-batch-size {below} or {below + one_pass}, or another --micro-batch-size",
        )
    return global_batch_size // one_pass
