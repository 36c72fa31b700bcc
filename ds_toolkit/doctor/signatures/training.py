"""DS1270 to DS1289: numbers that go wrong, checkpoints that do not load, models that do not fit."""

from __future__ import annotations

from ds_toolkit.doctor.signatures.signature import Confidence, Signature
from ds_toolkit.findings import Severity

TRAINING = (
    Signature(
        "DS1270",
        "batch-sizes-disagree",
        "train_batch_size is not micro batch x accumulation steps x data-parallel ranks: {what}",
        "leave one of the three out of the configuration and DeepSpeed fills it in;"
        " `ds-toolkit plan batch` finds sizes for several numbers of GPUs",
        (
            r"rror: Check batch related parameters\. .*?(?P<what>\d+ != \d+ \* \d+ \* \d+)?$",
            r"rror: (?P<what>Train batch size: .* has to be greater than 0|Micro batch size"
            r" per gpu: .*|Gradient accumulation steps: .*)",
            r"rror: (?P<what>Either train_batch_size or train_micro_batch_size_per_gpu"
            r" needs to be provided)",
        ),
    ),
    Signature(
        "DS1271",
        "loss-scale-at-minimum",
        "fp16 overflowed at every loss scale down to the smallest, and DeepSpeed gave up",
        "take bf16 where the GPU has it (Ampere and newer): a model trained in bf16 does"
        " not fit the range of fp16. Else a lower learning rate, a warm-up, clipping, and"
        " a look at the data of that step",
        (
            r"xception: Current loss scale already at minimum",
            r"loss scale (?:is )?already at minimum.*(?:xit|annot)|annot decrease (?:loss"
            r" )?scale anymore.*xit",
            r"FloatingPointError: .*(?:[Mm]inimum loss scale|oss scale)",
        ),
    ),
    Signature(
        "DS1272",
        "overflow-forever",
        "steps are skipped for overflow again and again ({count} lines): those weights do not change",
        "take bf16 instead of fp16, or a lower learning rate with warm-up; a handful of"
        " skipped steps at the beginning, while the loss scale settles, is normal",
        (
            r"OVERFLOW! .*?[Ss]kipping step",
            r"OVERFLOW!.*(?:loss scale|non-finite)",
        ),
        unless=("loss-scale-at-minimum",),
        at_least=25,
        confidence=Confidence.LIKELY,
    ),
    Signature(
        "DS1273",
        "loss-is-nan",
        "the loss is NaN; from the first time on every weight is",
        "go back to a checkpoint from before it (`ds-toolkit verify --deep` finds NaN in"
        " weights); look at that step's data, take a lower learning rate with warm-up,"
        " clipping, and bf16 instead of fp16",
        (
            r"""(?i:loss)\w*['\"]?\s*(?:[:=]|is|->)?\s*(?:tensor\()?['\"]?(?:nan|NaN)\b""",
            r"rror: .*(?i:loss)\b.*\b(?:NaN|nan)\b|(?:NaN|nan)\b.*\b(?:in|for) (?:the"
            r" )?(?i:loss)",
            r"not finite.*(?i:loss)|(?i:loss)\b.*not finite",
        ),
        confidence=Confidence.LIKELY,
    ),
    Signature(
        "DS1274",
        "resumed-from-nothing",
        "nothing was loaded, and training began anew: {what}",
        "look at what `load_checkpoint` returns: `(None, ...)` means that nothing was"
        " loaded. Give it the folder that holds `latest`, or a tag; `ds-toolkit status"
        " DIR` lists what is there",
        (
            r"(?P<what>Unable to find latest file at [^,]*)",
            r"(?P<what>Client provided checkpoint load path: \S+ does not"
            r" exist.*heckpoint.*|lient provided checkpoint load path: \S+)",
            r"(?P<what>[Uu]nable to (?:find|load) (?:a |the )?checkpoint\b.*)",
        ),
        severity=Severity.WARNING,
    ),
    Signature(
        "DS1275",
        "resumed-without-optimizer-state",
        "weights were loaded without the optimizer's state or the scheduler's: the loss"
        " jumps, and falls slowly",
        "load with `load_optimizer_states=True, load_lr_scheduler_states=True`, from a"
        " checkpoint of the engine (`engine.save_checkpoint`), not from exported weights"
        " alone",
        (
            r"(?i:not loading|skip\w* loading|without|did not load|no) (?:the"
            r" )?(?i:optimizer|lr[ _]?scheduler|scheduler)\b.*(?i:state).*heckpoint",
            r"heckpoint.*(?i:not loading|skip\w* loading|without|does not (?:have|contain)"
            r"|no) (?:the |any )?(?i:optimizer|lr[ _]?scheduler|scheduler)\b",
            r"(?i:load_optimizer_states|load_lr_scheduler_states"
            r"|load_module_only)\W+(?:False|True)(?=.*heckpoint).*heckpoint"
            r"|heckpoint.*(?:load_optimizer_states|load_lr_scheduler_states)\W+False",
        ),
        confidence=Confidence.POSSIBLE,
        severity=Severity.WARNING,
    ),
    Signature(
        "DS1276",
        "unpickling-refused",
        "torch 2.6 and newer load only plain weights unless told otherwise, and the file holds more: {what}",
        "if you trust the file: `torch.load(..., weights_only=False)`, or allow the class"
        " with `torch.serialization.add_safe_globals([...])`; `ds-toolkit consolidate`"
        " reads any checkpoint of DeepSpeed and runs nothing of it",
        (
            r"(?P<what>UnpicklingError: Weights only load failed)",
            r"(?P<what>WeightsUnpickler error: .*)",
            r"rror.*(?P<what>Unsupported (?:global|class|operand).*)",
        ),
    ),
    Signature(
        "DS1277",
        "resume-with-other-world-size",
        "the checkpoint was written by {saved} data-parallel ranks and is loaded by {now};"
        " ZeRO's shards fit only the same number",
        "`ds-toolkit consolidate` for weights, or convert it to a universal checkpoint"
        " (`ds_to_universal.py`, then `checkpoint.load_universal: true`), or resume with"
        " the old number of ranks",
        (
            r"ZeRORuntimeException: .*DP world size of (?P<saved>\d+) but the current world"
            r" size is (?P<now>\d+)",
            r"(?:FileNotFoundError|rror).*(?:zero_pp_rank_\d+_mp_rank_\d+_(?:model"
            r"|optim)_states\.pt)",
            r"rror: .*(?:dp_world_size|world size).*(?:heckpoint).*(?:differ|mismatch|does"
            r" not match)",
        ),
    ),
    Signature(
        "DS1278",
        "resume-with-other-stage",
        "the checkpoint was written at another ZeRO stage, or without ZeRO: {what}",
        "resume with the `stage` of the checkpoint (`ds-toolkit inspect DIR` tells it), or"
        " by way of a universal checkpoint (between 1 and 2) or of consolidated weights",
        (
            r"(?P<what>KeyError: '?(?:optimizer_state_dict|fp32_flat_groups"
            r"|single_partition_of_fp32_groups|base_optimizer_state|zero_stage)'?)",
            r"rror.*(?P<what>mp_rank_\d+_model_states\.pt.*|Expected.*zero.?stage.*|ZeRO"
            r" stage.*(?:heckpoint).*)",
            r"rror: (?P<what>.*(?:partition_count|ds_tensor|fp32_groups).*heckpoint.*"
            r"|.*heckpoint.*(?:stage \d).*(?:stage \d).*)",
        ),
        unless=("resume-with-other-world-size",),
        confidence=Confidence.LIKELY,
    ),
    Signature(
        "DS1279",
        "unused-parameters",
        "some parameters took no part in the loss, or took part twice: {what}",
        "use each parameter in every step on every rank; else freeze it"
        " (`requires_grad=False`), and see whether a module is called twice under"
        " activation checkpointing. `ignore_unused_parameters: true` only hides the first",
        (
            r"rror: (?P<what>Expected to have finished reduction in the prior iteration)",
            r"rror: (?P<what>The parameter .* has already been reduced)",
            r"(?P<what>Parameter indices which did not receive grad for rank"
            r" (?P<rank>\d+)).*|rror.*(?P<unused>unused_parameters|did not receive grad)",
            r"rror: (?P<what>.*grad(?:ient)? (?:computed twice|is None).*)",
        ),
    ),
    Signature(
        "DS1280",
        "disk-full",
        "a disk is full: {what}",
        "make room, keep fewer checkpoints (`keep_last` of the guard), and check the last"
        " one with `ds-toolkit verify`",
        (
            r"(?P<what>\[Errno 28\] No space left on device.*|\[Errno 122\] Disk quota"
            r" exceeded.*rror)",
            r"rror.*(?P<what>[Nn]o space left on device|Disk quota exceeded)",
            r"(?P<what>inline_container\.cc.*(?:ailed|rror).*|PytorchStreamWriter failed.*)",
        ),
        unless=("shared-memory-full",),
    ),
    Signature(
        "DS1281",
        "too-many-open-files",
        "a process may not open more files",
        "`ulimit -n 65536` before the launch, and"
        " `torch.multiprocessing.set_sharing_strategy('file_system')` with many DataLoader"
        " workers",
        (
            r"\[Errno 24\] Too many open files(?<=files)|rror.*Too many open files",
            r"rror.*[Tt]oo many open files",
            r"ailed.*Too many open files",
        ),
    ),
    Signature(
        "DS1282",
        "extension-not-built",
        "an extension of DeepSpeed could not be compiled: {what}",
        "install what the message names (CUDA toolkit of torch's version with CUDA_HOME,"
        ' g++, ninja), or avoid it: `"torch_adam": true`, no offload; a build that was'
        " killed leaves a lock under ~/.cache/torch_extensions",
        (
            r"rror: (?P<what>Error building extension '[^']*')",
            r"(?P<what>CUDA_HOME does not exist.*|MissingCUDAException.*)(?<=.)",
            r"rror: (?P<what>Ninja is required to load C\+\+ extensions|CUDA_HOME"
            r" environment variable is not set)",
        ),
    ),
    Signature(
        "DS1283",
        "shapes-disagree",
        "the weights do not fit the model: {what}",
        "build the model with the configuration and the tokenizer's length that it was"
        " saved with; under ZeRO-3 load inside `deepspeed.zero.GatheredParameters`: a"
        " partitioned parameter has the shape [0]",
        (
            r"rror: Error\(s\) in loading state_dict for (?P<what>\w+)",
            r"(?P<what>size mismatch for \S+: copying a param with shape"
            r" torch\.Size\(.*)(?<=.)",
        ),
    ),
)
