"""DS1290 to DS1298: runs that stand still, or go slowly."""

from __future__ import annotations

from ds_toolkit.doctor.signatures.signature import Confidence, Signature
from ds_toolkit.findings import Severity

SPEED = (
    Signature(
        "DS1290",
        "steps-wait-for-the-network",
        "most of the time of a step goes into reducing gradients: {all_reduce} of {backward} ms",
        "`ds-toolkit plan comm --model M --interconnect N` compares bytes a step with the"
        " bandwidth: whether ZeRO-2 instead of 3, hpZ (`zero_hpz_partition_size`), more"
        " accumulation steps or overlap_comm helps; see that NCCL takes InfiniBand"
        " (NCCL_DEBUG=INFO: `NET/IB`, not `NET/Socket`)",
        (
            r"bwd(?:_microstep)?: (?P<backward>[\d.]+).*bwd_allreduce(?:_microstep)?:"
            r" (?P<all_reduce>[\d.]+)",
        ),
        at_least=3,
        confidence=Confidence.LIKELY,
        severity=Severity.WARNING,
        more_than_half=("all_reduce", "backward"),
    ),
    Signature(
        "DS1291",
        "nccl-over-sockets",
        "NCCL goes over TCP sockets, though the node is told to have InfiniBand or has none that works",
        "see `ibstat`, NCCL_IB_DISABLE and NCCL_IB_HCA; in containers pass /dev/infiniband"
        " through and `--ulimit memlock=-1`",
        (r"NCCL INFO NET/IB : No device found",),
        needs=("marker:several-nodes",),
        confidence=Confidence.POSSIBLE,
        severity=Severity.INFO,
    ),
)
