"""Every failure that `ds-toolkit diagnose` knows, as data."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ds_toolkit.doctor.signatures.ends import ENDS
from ds_toolkit.doctor.signatures.found import FOUND
from ds_toolkit.doctor.signatures.launching import LAUNCHING
from ds_toolkit.doctor.signatures.memory import MEMORY
from ds_toolkit.doctor.signatures.network import NETWORK
from ds_toolkit.doctor.signatures.signature import WORDS, Confidence, Signature
from ds_toolkit.doctor.signatures.speed import SPEED
from ds_toolkit.doctor.signatures.training import TRAINING

__all__ = [
    "BY_CODE",
    "BY_NAME",
    "LINE_WORDS",
    "MARKERS",
    "SECONDARY",
    "SIGNATURES",
    "Confidence",
    "Signature",
]

SIGNATURES: tuple[Signature, ...] = (*ENDS, *MEMORY, *NETWORK, *LAUNCHING, *TRAINING, *SPEED, *FOUND)
BY_CODE: Mapping[str, Signature] = {signature.code: signature for signature in SIGNATURES}
BY_NAME: Mapping[str, Signature] = {signature.name: signature for signature in SIGNATURES}
LINE_WORDS = re.compile("|".join(WORDS).encode())
GRAMS = tuple(gram.encode() for grams in WORDS.values() for gram in grams)

# What signatures need beside their own lines.
MARKERS: Mapping[str, tuple[str, ...]] = {
    "marker:offloading": (
        r"DeepSpeedCPUAdam|cpu_offload[\"' ]*[=:][\"' ]*(?:True|true)",
        r"offload_(?:optimizer|param)[\"']?[ =:{]+.*(?:cpu|nvme)",
        r"ptimizer.*ffload|ffload.*(?:optimizer|param|CPU|cpu)",
    ),
    "marker:loading": (
        r"Loading (?:checkpoint shards|extension|safetensors checkpoint|weights|pretrained)",
        r"[Ll]oading (?:model |the )?(?:checkpoint|weights|state dict)",
    ),
    "marker:saving": (
        r"Saving (?:model )?(?:checkpoint|state dict|weights)|\[Torch\] Saving|aving model to",
        r"[Ss]aving (?:the )?(?:full |16.?bit )?(?:checkpoint|model|weights)",
    ),
    "marker:env-file-read": (r"deepspeed_env file = (?P<file>\S+)(?=.*)|launcher/runner\.py.*rror",),
    "marker:several-nodes": (r"(?:n|num_)nodes=(?:[2-9]|\d\d)\b",),
    "marker:peer-lost": (
        r"rror.*(?:Broken pipe|Socket closed|recvValue failed|failed to recv)",
        r"onnection (?:closed|reset) by (?:remote )?peer",
        r"NCCL communicator was aborted|ncclRemoteError|remote process exited or there was a network error",
    ),
    "several-nodes-wanted": (
        r"(?:rror|cmd = |spawned).*--?(?:num_nodes|nnodes)[= ]+(?:[2-9]|\d\d)\b",
        r"(?:SLURM_NNODES|SLURM_JOB_NUM_NODES)=(?:[2-9]|\d\d)\b",
    ),
}

# What follows from the end of another rank, or of the interpreter: never the first failure.
SECONDARY = re.compile(
    r"[Cc]onnection (?:closed|reset) by (?:remote )?peer|[Bb]roken ?[Pp]ipe|Socket closed|recvValue failed"
    r"|failed to recv, got 0 bytes|NCCL communicator was aborted|ncclRemoteError|remote process exited"
    r"|ds_opt_adam|^KeyboardInterrupt|ChildFailedError|SignalException|DistNetworkError: failed to recv"
    r"|ConnectionResetError|ConnectionRefusedError.*\[Errno 111\]|SIGTERM|Socket Timeout"
    r"|Exception \(either an error or timeout\) detected by watchdog|DataLoader worker .* exited unexpectedly"
    r"|CalledProcessError"
)
