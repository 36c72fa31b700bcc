"""DS1230 to DS1239: GPU and host memory."""

from __future__ import annotations

from ds_toolkit.doctor.signatures.signature import Confidence, Signature
from ds_toolkit.findings import Severity

MEMORY = (
    Signature(
        "DS1230",
        "gpu-out-of-memory",
        "GPU {gpu} had no memory left for {wanted}",
        "climb the memory ladder: a higher ZeRO stage, a smaller micro batch with more"
        " accumulation steps, recomputed activations, offloading; `ds-toolkit plan memory"
        " --model M --gpu-memory N` shows which rung fits",
        (
            r"(?:CUDA|HIP) out of memory\. Tried to allocate (?P<wanted>[\d.]+"
            r" ?[KMGT]?i?B)(?:.*?GPU (?P<gpu>\d+))?(?: has a total capacity of"
            r" (?P<total>[\d.]+ ?[KMGT]?i?B))?",
            r"CUDA error: out of memory|cudaErrorMemoryAllocation.*emory",
            r"CUBLAS_STATUS_ALLOC_FAILED.*rror|rror: .*CUBLAS_STATUS_ALLOC_FAILED",
        ),
    ),
    Signature(
        "DS1231",
        "gpu-shared-by-processes",
        "several processes have memory of GPU {gpu}: what a rank loads without saying"
        " where goes to the GPU that it was saved from, which is GPU 0",
        'load with `torch.load(..., map_location="cpu")`, and call'
        " `torch.cuda.set_device(local_rank)` before anything touches the GPU; look at"
        " `nvidia-smi` for left-over processes",
        (r"out of memory\..*GPU (?P<gpu>\d+).*(?:Process \d+ has .*){2}",),
        confidence=Confidence.LIKELY,
    ),
    Signature(
        "DS1232",
        "gpu-memory-fragmented",
        "{reserved} of GPU memory were reserved and could not be used: the memory is in pieces",
        "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (in .deepspeed_env too), and"
        " keep shapes equal from step to step (pad to multiples)",
        (
            r"out of memory.* and (?P<reserved>[1-9][\d.]* GiB) is reserved by PyTorch but"
            r" unallocated",
        ),
        confidence=Confidence.POSSIBLE,
        severity=Severity.WARNING,
    ),
    Signature(
        "DS1233",
        "host-memory-gone-by-offload",
        "host memory ran out in a run that keeps optimizer states or parameters in it: 12"
        " to 16 bytes a parameter, for all ranks of a node together, and pinned",
        "`ds-toolkit plan memory --host-memory N` counts it; offload to NVMe, offload less"
        " (`ratio` at stage 3), take `pin_memory: false`, or more nodes",
        needs=(
            "host-out-of-memory|cgroup-out-of-memory|allocation-refused|exit:SIGKILL",
            "marker:offloading",
        ),
        unless=("host-memory-gone-in-loading", "host-memory-gone-in-saving"),
        confidence=Confidence.LIKELY,
    ),
    Signature(
        "DS1234",
        "host-memory-gone-in-loading",
        "host memory ran out while weights were loaded: each rank of a node reads the whole checkpoint",
        "under ZeRO-3 load inside `deepspeed.zero.Init` (HfDeepSpeedConfig before"
        " from_pretrained), with `low_cpu_mem_usage=True`, from safetensors, or on one"
        " rank of a node at a time; `torch.load(mmap=True)`",
        needs=("host-out-of-memory|cgroup-out-of-memory|allocation-refused|exit:SIGKILL", "marker:loading"),
        confidence=Confidence.LIKELY,
    ),
    Signature(
        "DS1235",
        "host-memory-gone-in-saving",
        "host memory ran out while a checkpoint was saved: gathered weights lie there"
        " whole, and the page cache counts against a control group",
        "set `stage3_gather_16bit_weights_on_model_save: false` and make whole weights"
        " afterwards with `ds-toolkit consolidate`, which needs constant memory",
        needs=("host-out-of-memory|cgroup-out-of-memory|allocation-refused|exit:SIGKILL", "marker:saving"),
        confidence=Confidence.POSSIBLE,
    ),
)
