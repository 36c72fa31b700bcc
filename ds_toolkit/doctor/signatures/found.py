"""DS1292 to DS1299: what incident files and Flight Recorder tell, and what nobody knows."""

from __future__ import annotations

from ds_toolkit.doctor.signatures.signature import Confidence, Signature
from ds_toolkit.findings import Severity

FOUND = (
    Signature(
        "DS1295",
        "hang",
        "{what}",
        "see the stacks in the incident file; a rank elsewhere ran out of batches, saves"
        " alone or waits for data (`guard.check_even(loader)`, `ds-toolkit check-script"
        " train.py`)",
        needs=("incident:hang",),
    ),
    Signature(
        "DS1296",
        "rank-ended",
        "{what}",
        "the guard wrote down which rank ended first; give that rank's log to `ds-toolkit"
        " diagnose` for the reason",
        needs=("incident:end",),
        confidence=Confidence.LIKELY,
        is_fallback=True,
    ),
    Signature(
        "DS1297",
        "rank-missing-in-a-collective",
        "{what}",
        "look at what that rank did instead: a condition that depends on the rank, a"
        " loader that ended early, a save on rank 0 alone (`ds-toolkit check-script"
        " train.py`)",
        needs=("flight-recorder:missing",),
        confidence=Confidence.LIKELY,
    ),
    Signature(
        "DS1298",
        "unknown-exception",
        "no known failure; the first exception is {what}",
        "read the traceback at the line that is named; give the logs of all ranks, the"
        " launcher and the kernel",
        needs=("exception",),
        confidence=Confidence.POSSIBLE,
        is_fallback=True,
    ),
    Signature(
        "DS1299",
        "unknown-end",
        "it ended with exit code {what}, and nothing in what was given tells why",
        "give the logs of all ranks (`deepspeed --enable_each_rank_log DIR`, `torchrun"
        " --log-dir DIR --redirects 3`), of the launcher, of Slurm, and the kernel's"
        " (`dmesg -T`)",
        needs=("exit",),
        confidence=Confidence.POSSIBLE,
        severity=Severity.WARNING,
        is_fallback=True,
    ),
)
