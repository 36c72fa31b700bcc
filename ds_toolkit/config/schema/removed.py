"""Keys that DeepSpeed had once: it refuses to start where one of them stands, whatever its value."""

from __future__ import annotations

REMOVED_TOP_LEVEL_KEYS: dict[str, str] = {
    "amp": "use `bf16`, `fp16` or `torch_autocast`",
    "compression_training": "remove it",
    "curriculum_learning": "use `data_efficiency.data_sampling.curriculum_learning`",
    "eigenvalue": "remove it",
    "elasticity": "remove it and set the batch sizes themselves; `ds-toolkit plan batch` finds sizes that"
    " many numbers of GPUs share",
    "graph_harvesting": "remove it",
    "nebula": "remove it; checkpoints are written by torch.save",
    "progressive_layer_drop": "remove it",
    "quantize_training": "remove it",
    "sparse_attention": "remove it",
    "sparse_gradients": "remove it; an embedding made with sparse=True needs no key",
}
REMOVED_ZERO_KEYS: dict[str, str] = {
    "mics_hierarchical_params_gather": "remove it",
    "mics_shard_size": "remove it; `zero_hpz_partition_size` keeps a copy of the weights in each node",
    "zeropp_loco_param": "remove it; `zero_quantized_gradients` works without it",
}
# What was never a key, and what people who write it mean.
RELOCATED_KEYS: dict[str, str] = {
    "load_universal_checkpoint": "checkpoint.load_universal",
    "universal_checkpoint": "checkpoint.load_universal",
    "batch_size": "train_batch_size",
    "train_batch": "train_batch_size",
    "global_batch_size": "train_batch_size",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "learning_rate": "optimizer.params.lr",
    "lr": "optimizer.params.lr",
    "weight_decay": "optimizer.params.weight_decay",
    "betas": "optimizer.params.betas",
    "max_grad_norm": "gradient_clipping",
    "warmup_num_steps": "scheduler.params.warmup_num_steps",
    "total_num_steps": "scheduler.params.total_num_steps",
}
# Keys of sections whose names are those of many other settings: at the top level they say nothing.
GENERAL_NAMES = frozenset(
    {
        "hidden_size",
        "max_tokens",
        "model_type",
        "num_epochs",
        "num_layers",
        "num_params",
        "num_workers",
    }
)
# What DeepSpeed read once and ignores today, and the key that took its place.
OLD_AND_IGNORED: dict[tuple[str, ...], str] = {("aio", "thread_count"): "intra_op_parallelism"}
