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
    """

    meaning: str
    values: str | None = None
    expected: str = ""

    def takes(self, value: str) -> bool:
        """Whether the value is one that is understood; an empty one counts as not set."""
        return self.values is None or not value or re.fullmatch(self.values, value, re.IGNORECASE) is not None


def _flag(meaning: str) -> Variable:
    return Variable(meaning, FLAG, "0 or 1")


def _count(meaning: str) -> Variable:
    return Variable(meaning, COUNT, "a whole number")


def _choice(meaning: str, *choices: str) -> Variable:
    return Variable(meaning, "|".join(choices), ", ".join(choices[:-1]) + f" or {choices[-1]}")


_DISTANCES = ("LOC", "NVL", "PIX", "PXB", "PHB", "SYS", "[0-5]")

# NCCL user guide, "Environment Variables"; torch's ProcessGroupNCCL and distributed package.
VARIABLES: dict[str, Variable] = {
    "NCCL_DEBUG": _choice("How much NCCL prints.", "VERSION", "WARN", "INFO", "TRACE"),
    "NCCL_DEBUG_SUBSYS": Variable("Which parts of NCCL print."),
    "NCCL_DEBUG_FILE": Variable("File that NCCL prints to."),
    "NCCL_SOCKET_IFNAME": Variable("Network interfaces that connections are made over."),
    "NCCL_SOCKET_FAMILY": _choice("IP version.", "AF_INET", "AF_INET6"),
    "NCCL_SOCKET_NTHREADS": _count("Threads of a connection over sockets."),
    "NCCL_NSOCKS_PERTHREAD": _count("Sockets of such a thread."),
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
    "NCCL_IB_RETRY_CNT": Variable("How often a packet is sent again.", "[0-7]", "0 to 7"),
    "NCCL_IB_GID_INDEX": Variable("Address index of RoCE.", r"-?[0-9]+", "a whole number"),
    "NCCL_IB_SL": Variable("Service level of InfiniBand.", r"[0-9]|1[0-5]", "0 to 15"),
    "NCCL_IB_TC": Variable("Traffic class of InfiniBand.", r"[0-9]{1,3}", "0 to 255"),
    "NCCL_IB_QPS_PER_CONNECTION": _count("Queue pairs of a connection."),
    "NCCL_IB_PCI_RELAXED_ORDERING": Variable("Relaxed ordering on PCI.", "[0-2]", "0, 1 or 2"),
    "NCCL_IB_ADAPTIVE_ROUTING": _flag("Whether packets may take several ways."),
    "NCCL_IB_ADDR_FAMILY": _choice("IP version of RoCE.", "AF_INET", "AF_INET6"),
    "NCCL_IB_MERGE_NICS": _flag("Whether ports of a card are used as one."),
    "NCCL_NET": Variable("Network to use: IB, Socket, or the name of a plugin."),
    "NCCL_NET_PLUGIN": Variable("Network plugin to load."),
    "NCCL_NET_GDR_LEVEL": _choice("Distance up to which cards reach into GPUs.", *_DISTANCES),
    "NCCL_NET_GDR_READ": _flag("Whether cards read from GPUs when sending."),
    "NCCL_TUNER_PLUGIN": Variable("Tuner plugin to load."),
    "NCCL_P2P_DISABLE": _flag("Whether GPUs of a host leave direct access unused."),
    "NCCL_P2P_LEVEL": _choice("Distance up to which GPUs use direct access.", *_DISTANCES),
    "NCCL_SHM_DISABLE": _flag("Whether shared memory is left unused."),
    "NCCL_BUFFSIZE": _count("Bytes of a buffer between two GPUs."),
    "NCCL_NTHREADS": _choice("Threads of a block.", "64", "128", "256", "512"),
    "NCCL_MIN_NCHANNELS": _count("Channels at least."),
    "NCCL_MAX_NCHANNELS": _count("Channels at most."),
    "NCCL_MIN_CTAS": _count("Blocks at least."),
    "NCCL_MAX_CTAS": _count("Blocks at most."),
    "NCCL_ALGO": Variable("Algorithms to use."),
    "NCCL_PROTO": Variable("Protocols to use."),
    "NCCL_NVLS_ENABLE": Variable("NVLink SHARP.", "[0-2]", "0, 1 or 2"),
    "NCCL_COLLNET_ENABLE": _flag("Whether switches reduce."),
    "NCCL_CUMEM_ENABLE": _flag("Whether buffers come from cuMem."),
    "NCCL_DMABUF_ENABLE": _flag("Whether dma-buf is used to reach into GPUs."),
    "NCCL_PXN_DISABLE": _flag("Whether GPUs leave cards of other GPUs unused."),
    "NCCL_TOPO_FILE": Variable("File that describes the host."),
    "NCCL_TOPO_DUMP_FILE": Variable("File to write that description to."),
    "NCCL_CHECKS_DISABLE": _flag("Whether arguments are left unchecked."),
    "NCCL_COMM_ID": Variable("Address of the first rank."),
    "NCCL_LAUNCH_MODE": _choice("How kernels are launched.", "PARALLEL", "GROUP"),
    "NCCL_GRAPH_REGISTER": _flag("Whether buffers of CUDA graphs are registered."),
    "NCCL_LOCAL_REGISTER": _flag("Whether buffers may be registered."),
    "NCCL_IGNORE_CPU_AFFINITY": _flag("Whether threads leave the job's processors."),
    "NCCL_CONF_FILE": Variable("File with more settings."),
    "NCCL_SET_THREAD_NAME": _flag("Whether threads have names."),
    "NCCL_OOB_NET_ENABLE": _flag("Whether the start may use a network plugin."),
    "NCCL_RAS_ENABLE": _flag("Whether NCCL watches itself."),
    "NCCL_MNNVL_ENABLE": Variable("NVLink between hosts.", "[0-2]", "0, 1 or 2"),
    "NCCL_CGA_CLUSTER_SIZE": Variable("Blocks of a cluster.", "[0-8]", "0 to 8"),
    "NCCL_WORK_FIFO_BYTES": _count("Bytes of the queue of work."),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": Variable(
        "What a failed collective does: 0 nothing, 1 abort and end, 2 abort, 3 end.", "[0-3]", "0 to 3"
    ),
    "TORCH_NCCL_BLOCKING_WAIT": _flag("Whether waiting for a collective blocks the host."),
    "TORCH_NCCL_DESYNC_DEBUG": _flag("Whether ranks that are out of step are reported."),
    "TORCH_NCCL_DUMP_ON_TIMEOUT": _flag("Whether the flight recorder is written on a timeout."),
    "TORCH_NCCL_ENABLE_MONITORING": _flag("Whether a thread watches over collectives."),
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": _count("Seconds until that thread gives up."),
    "TORCH_NCCL_TRACE_BUFFER_SIZE": _count("Entries of the flight recorder."),
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": Variable("Where the flight recorder is written."),
    "TORCH_NCCL_PROPAGATE_ERROR": _flag("Whether other ranks hear of an error."),
    "TORCH_NCCL_AVOID_RECORD_STREAMS": _flag("Whether tensors are kept alive in another way."),
    "TORCH_NCCL_USE_COMM_NONBLOCKING": _flag("Whether communicators are made in the background."),
    "TORCH_NCCL_HIGH_PRIORITY": _flag("Whether collectives get streams of high priority."),
    "TORCH_NCCL_CUDA_EVENT_CACHE": _flag("Whether events are used again."),
    "TORCH_NCCL_NAN_CHECK": _flag("Whether collectives look for undefined numbers."),
    "TORCH_NCCL_ENABLE_TIMING": _flag("Whether collectives are timed."),
    "TORCH_DISTRIBUTED_DEBUG": _choice("How much torch.distributed checks.", "OFF", "INFO", "DETAIL"),
    "CUDA_LAUNCH_BLOCKING": _flag("Whether each kernel is waited for."),
    "CUDA_DEVICE_MAX_CONNECTIONS": Variable(
        "Queues from the host to a GPU.", r"[1-9]|[12][0-9]|3[0-2]", "1 to 32"
    ),
    "OMP_NUM_THREADS": _count("Threads of a rank's operations on the CPU."),
    "DEEPSPEED_TIMEOUT": _count("Minutes that a collective of DeepSpeed's first group may take."),
    "GLOO_SOCKET_IFNAME": Variable("Network interface of gloo."),
}

REPLACED: dict[str, str] = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "NCCL_ENABLE_TIMING": "TORCH_NCCL_ENABLE_TIMING",
    "NCCL_AVOID_RECORD_STREAMS": "TORCH_NCCL_AVOID_RECORD_STREAMS",
    "NCCL_USE_COMM_NONBLOCKING": "TORCH_NCCL_USE_COMM_NONBLOCKING",
    "NCCL_IB_CUDA_SUPPORT": "NCCL_NET_GDR_LEVEL",
    "NCCL_MAX_NRINGS": "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NRINGS": "NCCL_MIN_NCHANNELS",
    "NCCL_TREE_THRESHOLD": "NCCL_ALGO",
    "NCCL_LL_THRESHOLD": "NCCL_PROTO",
    "NCCL_SINGLE_RING_THRESHOLD": "NCCL_MIN_NCHANNELS",
    "PYTORCH_CUDA_ALLOC_CONF": "PYTORCH_ALLOC_CONF",
    "TRANSFORMERS_CACHE": "HF_HOME",
    "PYTORCH_TRANSFORMERS_CACHE": "HF_HOME",
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
# Words of names whose values are secrets. PWD alone is the working folder, and numbers of tokens are none.
SECRET_NAME = re.compile(
    r"(^|_)(TOKEN|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE|API_?KEYS?|ACCESS_?KEY|CREDENTIALS?|CREDS|PRIVATE_KEY)($|_)"
    r"|(^|_)(PASS|PAT)$|_(PWD|KEY)$"
)
