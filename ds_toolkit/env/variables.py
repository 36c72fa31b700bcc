"""Environment variables of NCCL and torch that people set: what they mean, and what they may hold."""

from __future__ import annotations

import re
from dataclasses import dataclass

FLAG = r"[01]"
COUNT = r"[0-9]+"


@dataclass(frozen=True)
class Variable:
    """What a variable is for.

    Attributes:
        meaning: one line.
        values: a pattern of what it may hold; None for anything.
        expected: the same in words.
        since: the program that reads it and its first version that did; None where that is not known.
    """

    meaning: str
    values: str | None = None
    expected: str = ""
    since: str | None = None

    def takes(self, value: str) -> bool:
        """Whether the value is one that is understood; an empty one counts as not set."""
        return self.values is None or not value or re.fullmatch(self.values, value, re.IGNORECASE) is not None


def _flag(meaning: str, since: str | None = None) -> Variable:
    return Variable(meaning, FLAG, "0 or 1", since)


def _count(meaning: str, since: str | None = None) -> Variable:
    return Variable(meaning, COUNT, "a whole number", since)


def _choice(meaning: str, *choices: str, since: str | None = None) -> Variable:
    return Variable(meaning, "|".join(choices), ", ".join(choices[:-1]) + f" or {choices[-1]}", since)


_DISTANCES = ("LOC", "NVL", "PIX", "PXB", "PHB", "SYS", "[0-5]")

# NCCL user guide of version 2.32, "Environment Variables", which says since when for most. torch's
# ProcessGroupNCCL, FlightRecorder and distributed package: the first release from 2.0 on that names it.
VARIABLES: dict[str, Variable] = {
    "NCCL_DEBUG": _choice("How much NCCL prints.", "VERSION", "WARN", "ATTN", "INFO", "TRACE"),
    "NCCL_DEBUG_SUBSYS": Variable("Which parts of NCCL print.", since="NCCL 2.3.4"),
    "NCCL_DEBUG_FILE": Variable("File that NCCL prints to.", since="NCCL 2.2.12"),
    "NCCL_SOCKET_IFNAME": Variable("Network interfaces that connections are made over."),
    "NCCL_SOCKET_FAMILY": _choice("IP version.", "AF_INET", "AF_INET6"),
    "NCCL_SOCKET_NTHREADS": _count("Threads of a connection over sockets.", since="NCCL 2.4.8"),
    "NCCL_NSOCKS_PERTHREAD": _count("Sockets of such a thread.", since="NCCL 2.4.8"),
    "NCCL_CROSS_NIC": Variable(
        "Whether a ring may use different cards on different hosts.", "[0-2]", "0, 1 or 2"
    ),
    "NCCL_IB_DISABLE": _flag("Whether InfiniBand and RoCE are left unused."),
    "NCCL_IB_HCA": Variable("InfiniBand cards to use."),
    "NCCL_IB_TIMEOUT": Variable(
        "Time until a lost packet is sent again: 4.096 microseconds x 2^n.",
        "[0-9]|[12][0-9]|3[01]",
        "0 to 31",
    ),
    "NCCL_IB_RETRY_CNT": Variable(
        "How often a packet is sent again.", "[0-7]", "0 to 7", since="NCCL 2.1.15"
    ),
    "NCCL_IB_GID_INDEX": Variable(
        "Address index of RoCE.", r"-?[0-9]+", "a whole number", since="NCCL 2.1.4"
    ),
    "NCCL_IB_SL": Variable("Service level of InfiniBand.", r"[0-9]|1[0-5]", "0 to 15", since="NCCL 2.1.4"),
    "NCCL_IB_TC": Variable("Traffic class of InfiniBand.", r"[0-9]{1,3}", "0 to 255", since="NCCL 2.1.15"),
    "NCCL_IB_QPS_PER_CONNECTION": _count("Queue pairs of a connection.", since="NCCL 2.10"),
    "NCCL_IB_PCI_RELAXED_ORDERING": Variable(
        "Relaxed ordering on PCI.", "[0-2]", "0, 1 or 2", since="NCCL 2.12"
    ),
    "NCCL_IB_ADAPTIVE_ROUTING": _flag("Whether packets may take several ways.", since="NCCL 2.16"),
    "NCCL_IB_ADDR_FAMILY": _choice("IP version of RoCE.", "AF_INET", "AF_INET6", since="NCCL 2.21"),
    "NCCL_IB_MERGE_NICS": _flag("Whether ports of a card are used as one.", since="NCCL 2.20"),
    "NCCL_NET": Variable("Network to use: IB, Socket, or the name of a plugin.", since="NCCL 2.10"),
    "NCCL_NET_PLUGIN": Variable("Network plugin to load.", since="NCCL 2.11"),
    "NCCL_NET_GDR_LEVEL": _choice(
        "Distance up to which cards reach into GPUs.", *_DISTANCES, since="NCCL 2.4.0"
    ),
    "NCCL_NET_GDR_READ": _flag("Whether cards read from GPUs when sending."),
    "NCCL_TUNER_PLUGIN": Variable("Tuner plugin to load."),
    "NCCL_P2P_DISABLE": _flag("Whether GPUs of a host leave direct access unused."),
    "NCCL_P2P_LEVEL": _choice(
        "Distance up to which GPUs use direct access.", *_DISTANCES, since="NCCL 2.3.4"
    ),
    "NCCL_SHM_DISABLE": _flag("Whether shared memory is left unused."),
    "NCCL_BUFFSIZE": _count("Bytes of a buffer between two GPUs."),
    "NCCL_NTHREADS": _choice("Threads of a block.", "64", "128", "256", "512"),
    "NCCL_MIN_NCHANNELS": _count("Channels at least.", since="NCCL 2.5.0"),
    "NCCL_MAX_NCHANNELS": _count("Channels at most.", since="NCCL 2.5.0"),
    "NCCL_MIN_CTAS": _count("Blocks at least.", since="NCCL 2.17"),
    "NCCL_MAX_CTAS": _count("Blocks at most.", since="NCCL 2.17"),
    "NCCL_ALGO": Variable("Algorithms to use.", since="NCCL 2.5"),
    "NCCL_PROTO": Variable("Protocols to use.", since="NCCL 2.5"),
    "NCCL_NVLS_ENABLE": Variable("NVLink SHARP.", "[0-2]", "0, 1 or 2", since="NCCL 2.17"),
    "NCCL_COLLNET_ENABLE": _flag("Whether switches reduce.", since="NCCL 2.6"),
    "NCCL_CUMEM_ENABLE": _flag("Whether buffers come from cuMem.", since="NCCL 2.18"),
    "NCCL_DMABUF_ENABLE": _flag("Whether dma-buf is used to reach into GPUs.", since="NCCL 2.13"),
    "NCCL_NVB_DISABLE": _flag("Whether GPUs leave NVLink over a third GPU unused.", since="NCCL 2.11"),
    "NCCL_PXN_DISABLE": _flag("Whether GPUs leave cards of other GPUs unused.", since="NCCL 2.12"),
    "NCCL_TOPO_FILE": Variable("File that describes the host.", since="NCCL 2.6"),
    "NCCL_TOPO_DUMP_FILE": Variable("File to write that description to.", since="NCCL 2.6"),
    "NCCL_CHECKS_DISABLE": _flag("Whether arguments are left unchecked.", since="NCCL 2.0.5"),
    "NCCL_COMM_ID": Variable("Address of the first rank."),
    "NCCL_LAUNCH_MODE": _choice("How kernels are launched.", "PARALLEL", "GROUP", since="NCCL 2.1.0"),
    "NCCL_GRAPH_REGISTER": _flag("Whether buffers of CUDA graphs are registered.", since="NCCL 2.11"),
    "NCCL_LOCAL_REGISTER": _flag("Whether buffers may be registered.", since="NCCL 2.19"),
    "NCCL_IGNORE_CPU_AFFINITY": _flag("Whether threads leave the job's processors.", since="NCCL 2.4.6"),
    "NCCL_CONF_FILE": Variable("File with more settings.", since="NCCL 2.23"),
    "NCCL_SET_THREAD_NAME": _flag("Whether threads have names.", since="NCCL 2.12"),
    "NCCL_OOB_NET_ENABLE": _flag("Whether the start may use a network plugin.", since="NCCL 2.23"),
    "NCCL_RAS_ENABLE": _flag("Whether NCCL watches itself.", since="NCCL 2.24"),
    "NCCL_MNNVL_ENABLE": Variable("NVLink between hosts.", "[0-2]", "0, 1 or 2", since="NCCL 2.21"),
    "NCCL_CGA_CLUSTER_SIZE": Variable("Blocks of a cluster.", "[0-8]", "0 to 8", since="NCCL 2.16"),
    "NCCL_WORK_FIFO_BYTES": _count("Bytes of the queue of work."),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": Variable(
        "What a failed collective does: 0 nothing, 1 abort and end, 2 abort, 3 end.",
        "[0-3]",
        "0 to 3",
        since="torch 2.2",
    ),
    "TORCH_NCCL_BLOCKING_WAIT": _flag("Whether waiting for a collective blocks the host.", since="torch 2.2"),
    "TORCH_NCCL_DESYNC_DEBUG": _flag("Whether ranks that are out of step are reported.", since="torch 2.2"),
    "TORCH_NCCL_DUMP_ON_TIMEOUT": _flag(
        "Whether the flight recorder is written on a timeout.", since="torch 2.2"
    ),
    "TORCH_NCCL_ENABLE_MONITORING": _flag("Whether a thread watches over collectives.", since="torch 2.2"),
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": _count("Seconds until that thread gives up.", since="torch 2.2"),
    "TORCH_FR_BUFFER_SIZE": _count("Entries of the flight recorder.", since="torch 2.8"),
    "TORCH_FR_DUMP_TEMP_FILE": Variable("Where the flight recorder is written.", since="torch 2.8"),
    "TORCH_NCCL_PROPAGATE_ERROR": _flag("Whether other ranks hear of an error.", since="torch 2.7"),
    "TORCH_NCCL_AVOID_RECORD_STREAMS": _flag(
        "Whether tensors are kept alive in another way.", since="torch 2.1"
    ),
    "TORCH_NCCL_USE_COMM_NONBLOCKING": _flag(
        "Whether communicators are made in the background.", since="torch 2.1"
    ),
    "TORCH_NCCL_HIGH_PRIORITY": _flag("Whether collectives get streams of high priority.", since="torch 2.4"),
    "TORCH_NCCL_CUDA_EVENT_CACHE": _flag("Whether events are used again.", since="torch 2.5"),
    "TORCH_NCCL_NAN_CHECK": _flag("Whether collectives look for undefined numbers.", since="torch 2.4"),
    "TORCH_NCCL_ENABLE_TIMING": _flag("Whether collectives are timed.", since="torch 2.2"),
    "TORCH_DISTRIBUTED_DEBUG": _choice("How much torch.distributed checks.", "OFF", "INFO", "DETAIL"),
    "CUDA_LAUNCH_BLOCKING": _flag("Whether each kernel is waited for."),
    "CUDA_DEVICE_MAX_CONNECTIONS": Variable(
        "Queues from the host to a GPU.", r"[1-9]|[12][0-9]|3[0-2]", "1 to 32"
    ),
    "OMP_NUM_THREADS": _count("Threads of a rank's operations on the CPU."),
    "DEEPSPEED_TIMEOUT": _count(
        "Minutes that a collective of DeepSpeed's first group may take.", since="DeepSpeed 0.11.2"
    ),
    "GLOO_SOCKET_IFNAME": Variable("Network interface of gloo."),
}


@dataclass(frozen=True)
class Replacement:
    """What an old name of a variable was replaced by.

    Attributes:
        name: the new name.
        since: the program and its first version that reads the new name; None where that is not known.
        is_read: whether that program still reads the old name where the new one is not set.
        together: which of the two counts where both are set.
    """

    name: str
    since: str | None = None
    is_read: bool = True
    together: str = "the new one wins"


def _renamed(name: str) -> Replacement:
    return Replacement(name, VARIABLES[name].since)


def _dropped(name: str, since: str | None) -> Replacement:
    return Replacement(name, since, is_read=False, together="the old one is not read")


_MOVED_CACHE = Replacement(
    "HF_HOME",
    is_read=False,
    together="transformers takes the old one before version 5, the new one since",
)
# torch takes the first of the names in its list that is set, and lists the new one first.
REPLACED: dict[str, Replacement] = {
    "NCCL_ASYNC_ERROR_HANDLING": _renamed("TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    "NCCL_BLOCKING_WAIT": _renamed("TORCH_NCCL_BLOCKING_WAIT"),
    "NCCL_DESYNC_DEBUG": _renamed("TORCH_NCCL_DESYNC_DEBUG"),
    "NCCL_ENABLE_TIMING": _renamed("TORCH_NCCL_ENABLE_TIMING"),
    "NCCL_AVOID_RECORD_STREAMS": _dropped("TORCH_NCCL_AVOID_RECORD_STREAMS", "torch 2.1"),
    "NCCL_USE_COMM_NONBLOCKING": _dropped("TORCH_NCCL_USE_COMM_NONBLOCKING", "torch 2.1"),
    "TORCH_NCCL_TRACE_BUFFER_SIZE": _renamed("TORCH_FR_BUFFER_SIZE"),
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": _renamed("TORCH_FR_DUMP_TEMP_FILE"),
    "NCCL_IB_CUDA_SUPPORT": _dropped("NCCL_NET_GDR_LEVEL", "NCCL 2.4.0"),
    "NCCL_IB_GDR_LEVEL": _dropped("NCCL_NET_GDR_LEVEL", "NCCL 2.4.0"),
    "NCCL_MAX_NRINGS": _renamed("NCCL_MAX_NCHANNELS"),
    "NCCL_MIN_NRINGS": _renamed("NCCL_MIN_NCHANNELS"),
    "NCCL_TREE_THRESHOLD": _dropped("NCCL_ALGO", "NCCL 2.5"),
    "NCCL_LL_THRESHOLD": _dropped("NCCL_PROTO", "NCCL 2.5"),
    "NCCL_SINGLE_RING_THRESHOLD": _dropped("NCCL_MIN_NCHANNELS", "NCCL 2.5.0"),
    "PYTORCH_CUDA_ALLOC_CONF": Replacement("PYTORCH_ALLOC_CONF", "torch 2.9"),
    "TRANSFORMERS_CACHE": _MOVED_CACHE,
    "PYTORCH_TRANSFORMERS_CACHE": _MOVED_CACHE,
}
# DeepSpeed's launcher gives these to each rank, whatever was set before.
SET_BY_THE_LAUNCHER = frozenset(
    {
        "MASTER_ADDR",
        "MASTER_PORT",
        "WORLD_SIZE",
        "RANK",
        "LOCAL_RANK",
        "LOCAL_SIZE",
        "CROSS_RANK",
        "CROSS_SIZE",
        "CUDA_VISIBLE_DEVICES",
    }
)
# Values that are fine while a run is being examined, and slow or flood the logs of one that is not.
DEBUGGING: dict[str, str] = {
    "NCCL_DEBUG": "INFO|TRACE",
    "NCCL_DEBUG_SUBSYS": ".+",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "CUDA_LAUNCH_BLOCKING": "1",
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_NAN_CHECK": "1",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
}
