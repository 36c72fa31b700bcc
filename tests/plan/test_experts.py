"""Mixtures of experts: what ZeRO makes of them, and what a block keeps for the backward pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from torch.autograd.graph import saved_tensors_hooks

from ds_toolkit.plan.communication import compute_seconds, step_traffic
from ds_toolkit.plan.hf_model import hf_model
from ds_toolkit.plan.job import Cluster, Experts, Job, Model, Precision
from ds_toolkit.plan.memory import activations_bytes, rank_memory
from ds_toolkit.plan.zero import ZeroSettings

TOKENS = 256
CLUSTER = Cluster(1, 8, 8 * 10**10, None)
SHAPE = {
    "hidden_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 256,
    "pad_token_id": 0,
}
DENSE = Model(12 * 10**9, 24, 4096, 32_000)
SPARSE = replace(DENSE, largest_block=10**9, experts=Experts(3 * 10**9, 2, 2 * 14_336))


def job(model: Model) -> Job:
    return Job(model, CLUSTER, Precision.BF16, 1, 1, TOKENS)


def kept_bytes(config: transformers.PretrainedConfig) -> int:
    """Bytes of all tensors, but for parameters, that a forward pass keeps for the backward pass."""
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    tokens = torch.randint(0, 256, (1, TOKENS))
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model.train()(input_ids=tokens, labels=tokens).loss
    assert loss.requires_grad
    return sum(tensor.untyped_storage().nbytes() for at, tensor in kept.items() if at not in weights)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("mixtral", {"intermediate_size": 448, "num_local_experts": 8, "num_experts_per_tok": 2}),
        ("mixtral", {"intermediate_size": 448, "num_local_experts": 8, "num_experts_per_tok": 4}),
        ("olmoe", {"intermediate_size": 64, "num_experts": 32, "num_experts_per_tok": 8}),
        ("qwen3_moe", {"moe_intermediate_size": 48, "num_experts": 32, "num_experts_per_tok": 8}),
        (
            "qwen2_moe",
            {"moe_intermediate_size": 96, "num_experts": 8, "shared_expert_intermediate_size": 512},
        ),
    ],
)
def test_a_block_keeps_what_the_formula_says(kind: str, sizes: dict[str, int]) -> None:
    planned, kept = [], []
    for num_layers in (1, 3):
        config = transformers.AutoConfig.for_model(
            kind, **SHAPE, **sizes, num_hidden_layers=num_layers, experts_implementation="grouped_mm"
        )
        kept.append(kept_bytes(config))
        planned.append(activations_bytes(job(hf_model(config.to_dict(), "config.json"))))
    assert planned[1] - planned[0] == pytest.approx(kept[1] - kept[0], rel=0.03)


def test_experts_keep_more_than_a_dense_block_of_the_same_width() -> None:
    # Of 16 h numbers 9 h are the feed-forward part's; with experts 7 h and 4 x 28,672.
    dense, sparse = activations_bytes(job(DENSE)), activations_bytes(job(SPARSE))
    assert sparse - dense == 24 * TOKENS * 2 * (7 * 4096 + 4 * 2 * 14_336 - 9 * 4096)


def test_compute_goes_by_what_a_token_passes_and_the_rest_by_all() -> None:
    assert compute_seconds(job(SPARSE), 1e12) == pytest.approx(compute_seconds(job(DENSE), 1e12) / 4)
    for stage in range(4):
        assert step_traffic(job(SPARSE), stage) == step_traffic(job(DENSE), stage)
        sparse, dense = rank_memory(job(SPARSE), stage).device, rank_memory(job(DENSE), stage).device
        for item in ("weights_bytes", "gradients_bytes", "optimizer_bytes"):
            assert getattr(sparse, item) == getattr(dense, item)


def test_stage_3_gathers_a_block_with_all_its_experts() -> None:
    assert SPARSE.largest_layer_parameters == 10**9
    settings = ZeroSettings(max_reuse_distance=0)
    # With many tokens the backward pass, which gathers, needs more than the step.
    long = [replace(job(model), sequence_length=16_384) for model in (SPARSE, DENSE)]
    sparse, dense = (rank_memory(one, 3, settings=settings).device for one in long)
    assert sparse.buffers_bytes - dense.buffers_bytes == 2 * (10**9 - DENSE.largest_layer_parameters)
