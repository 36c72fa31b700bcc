"""Who reads a ds_config before DeepSpeed does, and what each of them fills in or refuses."""

from __future__ import annotations

from enum import Enum


class Consumer(str, Enum):
    """The program that hands the configuration to DeepSpeed."""

    NATIVE = "native"
    HF = "hf"
    ACCELERATE = "accelerate"
    LIGHTNING = "lightning"

    @property
    def label(self) -> str:
        """How people call it."""
        return _TITLES[self]

    @property
    def reads_json_only(self) -> bool:
        """Whether comments and other HJSON end it; DeepSpeed itself takes them."""
        return self is not Consumer.NATIVE

    @property
    def uses_accelerate(self) -> bool:
        """Whether Accelerate prepares the run; transformers' TrainingArguments make its plugin too."""
        return self in (Consumer.HF, Consumer.ACCELERATE)

    @property
    def resolved(self) -> frozenset[str]:
        """The keys, with dots between sections, where it puts a value in the place of `"auto"`."""
        return _RESOLVED[self]

    def resolves(self, path: tuple[str, ...]) -> bool:
        """Whether it puts a value where `"auto"` stands at this path."""
        return ".".join(path) in self.resolved


_TITLES = {
    Consumer.NATIVE: "DeepSpeed",
    Consumer.HF: "the Hugging Face Trainer",
    Consumer.ACCELERATE: "Accelerate",
    Consumer.LIGHTNING: "Lightning",
}
_BATCH = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}
_FROM_THE_MODEL = {
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
}
_FROM_ARGUMENTS = {
    "gradient_clipping",
    "fp16.enabled",
    "bf16.enabled",
    "optimizer.params.lr",
    "optimizer.params.weight_decay",
    "scheduler.params.warmup_min_lr",
    "scheduler.params.warmup_max_lr",
    "scheduler.params.warmup_num_steps",
    "scheduler.params.total_num_steps",
}
# Of Accelerate's own arguments: stage 2, no offloading and nothing gathered, unless they say otherwise.
# `steps_per_print` is overwritten whatever it is.
_FROM_THE_PLUGIN = {
    "steps_per_print",
    "zero_optimization.stage",
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_optimizer.nvme_path",
    "zero_optimization.offload_param.device",
    "zero_optimization.offload_param.nvme_path",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
# transformers' HfTrainerDeepSpeedConfig and accelerate's DeepSpeedPlugin name these one by one, and the
# Trainer uses both; Lightning fills in keys that are missing and leaves "auto" to DeepSpeed.
_RESOLVED: dict[Consumer, frozenset[str]] = {
    Consumer.NATIVE: frozenset(),
    Consumer.HF: frozenset(
        _BATCH
        | _FROM_THE_MODEL
        | _FROM_ARGUMENTS
        | _FROM_THE_PLUGIN
        | {"optimizer.params.betas", "optimizer.params.eps"}
    ),
    Consumer.ACCELERATE: frozenset(_BATCH | _FROM_THE_MODEL | _FROM_ARGUMENTS | _FROM_THE_PLUGIN),
    Consumer.LIGHTNING: frozenset(),
}
