from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import transformers

from ds_toolkit.errors import ToolkitError
from ds_toolkit.plan.hf_families import GATED
from ds_toolkit.plan.hf_layers import EXACT_MODEL_TYPES
from ds_toolkit.plan.hf_model import hf_model, read_hf_config
from ds_toolkit.plan.hf_shape import UncountedError
from ds_toolkit.plan.job import Experts, Model

ABSENT = object()
SMALL: dict[str, object] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 176,
    "vocab_size": 1000,
}
# What the families with experts read; each takes the keys that it knows.
EXPERTS = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 1},
    "granitemoe": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 6, "head_dim": 24, "attention_bias": False},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3},
    "qwen2_moe": {
        "num_experts": 6,
        "qkv_bias": False,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
    },
    "qwen3_moe": {
        "num_experts": 12,
        "moe_intermediate_size": 48,
        "mlp_only_layers": [1],
        "decoder_sparse_step": 2,
        "num_hidden_layers": 5,
    },
    "glm4_moe": {
        "n_routed_experts": 16,
        "moe_intermediate_size": 48,
        "n_shared_experts": 2,
        "first_k_dense_replace": 2,
        "use_qk_norm": True,
        "num_hidden_layers": 3,
    },
    "deepseek_v3": {
        "n_routed_experts": 16,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 0,
        "attention_bias": True,
        "q_lora_rank": 24,
        "kv_lora_rank": 40,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 4,
        "v_head_dim": 20,
        "tie_word_embeddings": True,
    },
}
GPT = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 1000}
# Files that say no more than they must, so that the defaults of each family count too, and what may vary.
CASES: dict[str, dict[str, object]] = {
    **{kind: {"model_type": kind, **SMALL} for kind in EXACT_MODEL_TYPES - {"gpt2", "bloom"}},
    "gpt2": {"model_type": "gpt2", **GPT},
    "gpt2 untied": {
        "model_type": "gpt2",
        **GPT,
        "n_inner": 100,
        "n_positions": 64,
        "tie_word_embeddings": False,
    },
    "bloom": {"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 1000},
    "llama with biases and tied": {
        "model_type": "llama",
        **SMALL,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "llama with null": {"model_type": "llama", **SMALL, "num_key_value_heads": None, "head_dim": None},
    "mistral with null": {"model_type": "mistral", **SMALL, "head_dim": None},
    **{
        f"{kind} without key-value heads": {
            "model_type": kind,
            **SMALL,
            "hidden_size": 128,
            "num_attention_heads": 64,
            "num_key_value_heads": ABSENT,
        }
        for kind in EXACT_MODEL_TYPES - {"gpt2", "gpt_neox", "bloom"}
    },
    **{
        f"{kind} with biases": {
            "model_type": kind,
            **SMALL,
            # Its norms have no room for heads of another width.
            **({} if kind == "olmoe" else {"head_dim": 16}),
            "attention_bias": True,
        }
        for kind in EXACT_MODEL_TYPES - {"gpt2", "bloom"}
    },
    "gpt_neox without biases": {"model_type": "gpt_neox", **SMALL, "attention_bias": False},
    "mixtral of four": {"model_type": "mixtral", **SMALL, "num_local_experts": 4},
    "stablelm with biases": {"model_type": "stablelm", **SMALL, "use_qkv_bias": True},
    "stablelm in parallel": {"model_type": "stablelm", **SMALL, "use_parallel_residual": True},
    "gemma untied": {"model_type": "gemma", **SMALL, "tie_word_embeddings": False},
    **{f"{kind} of few": {"model_type": kind, **SMALL, **keys} for kind, keys in EXPERTS.items()},
    "deepseek_v3 with blocks of both kinds": {"model_type": "deepseek_v3", **SMALL, "num_hidden_layers": 5},
    "deepseek_v3 with wide queries": {"model_type": "deepseek_v3", **SMALL, "q_lora_rank": None},
    "qwen2_moe without experts": {"model_type": "qwen2_moe", **SMALL, "mlp_only_layers": [0, 1]},
    "cohere with norms": {"model_type": "cohere", **SMALL, "use_qk_norm": True},
    "starcoder2 without biases": {
        "model_type": "starcoder2",
        **SMALL,
        "use_bias": False,
        "tie_word_embeddings": False,
    },
    "glm without biases": {"model_type": "glm", **SMALL, "attention_bias": False},
    **{
        f"{kind} with biases in the feed-forward part": {"model_type": kind, **SMALL, "mlp_bias": True}
        for kind in ("granite", "smollm3")
    },
}


def read_hf_model(path: Path) -> Model:
    return hf_model(read_hf_config(path), str(path))


def built(config: transformers.PretrainedConfig) -> torch.nn.Module:
    with torch.device("meta"):
        model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return model


def size(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def gathered_at_a_time(model: torch.nn.Module) -> list[torch.nn.Module]:
    blocks = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    return [*blocks, *(module for module in model.modules() if isinstance(module, torch.nn.Embedding))]


def active_parameters(model: torch.nn.Module, per_token: int) -> int:
    """Those that a token passes: of a tensor with a row an expert, as many rows."""
    return sum(
        parameter.numel() * per_token // parameter.shape[0] if ".experts." in name else parameter.numel()
        for name, parameter in model.named_parameters()
    )


@pytest.mark.parametrize("written", CASES.values(), ids=CASES.keys())
def test_parameters_are_those_of_the_real_model(written: dict[str, object], tmp_path: Path) -> None:
    written = {key: value for key, value in written.items() if value is not ABSENT}
    (tmp_path / "config.json").write_text(json.dumps(written))
    config = transformers.AutoConfig.from_pretrained(tmp_path, pad_token_id=0)
    real = built(config)
    model = read_hf_model(tmp_path)
    sizes = sorted(parameter.numel() for parameter in real.parameters())
    assert sorted(model.tensor_sizes) == sizes
    assert model.num_parameters == sum(sizes)
    assert f"{model.num_layers} blocks" in model.rationale
    assert "counted by formula" in model.rationale
    assert model.num_active_parameters == active_parameters(real, getattr(config, "num_experts_per_tok", 0))
    assert model.largest_block == max(map(size, gathered_at_a_time(real)))
    # As transformers writes it, with all defaults spelt out.
    config.save_pretrained(tmp_path)
    written_out = read_hf_model(tmp_path)
    assert written_out.tensor_sizes == model.tensor_sizes
    assert written_out.experts == model.experts


@pytest.mark.parametrize("kind", sorted(EXACT_MODEL_TYPES))
def test_a_family_as_its_defaults_are(kind: str, tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model(kind)
    config.save_pretrained(tmp_path)
    config.pad_token_id = 0
    model = read_hf_model(tmp_path)
    assert sorted(model.tensor_sizes) == sorted(parameter.numel() for parameter in built(config).parameters())
    assert (model.experts is not None) == (GATED.get(kind) is not None and GATED[kind].mixture is not None)


def test_what_a_token_passes_is_what_the_makers_say(tmp_path: Path) -> None:
    # DeepSeek-V3: 671B parameters, 37B of them for a token (arXiv 2412.19437, abstract).
    transformers.AutoConfig.for_model("deepseek_v3").save_pretrained(tmp_path)
    model = read_hf_model(tmp_path)
    assert round(model.num_parameters / 1e9) == 671
    assert 37 <= model.num_active_parameters / 1e9 < 38
    assert model.experts == Experts(model.num_active_parameters, 8, 9 * 2048)
    assert "37.6B of them work on a token" in model.rationale


@pytest.mark.parametrize(
    "kind", ["deepseek_v2", "qwen3_next", "falcon", "gptj", "phi", "opt", "llava", "newest"]
)
def test_other_families_are_not_counted(kind: str) -> None:
    with pytest.raises(UncountedError, match=f"type `{kind}` cannot be counted") as caught:
        hf_model({**SMALL, "model_type": kind}, "config.json")
    assert "--model 30B" in str(caught.value.fix)
    with pytest.raises(UncountedError, match="cannot be counted"):
        hf_model({"model_type": kind, "text_config": {**SMALL, "model_type": "llama"}}, "config.json")


@pytest.mark.parametrize(
    ("kind", "architecture", "is_counted"),
    [
        ("llama", "LlamaForCausalLM", True),
        ("gemma3_text", "Gemma3ForCausalLM", True),
        ("llama", "LlamaForSequenceClassification", False),
        ("mistral", "MistralModel", False),
        ("llama", "SomebodysForCausalLM", False),
    ],
)
def test_the_language_model_of_a_family_alone_is_counted(
    kind: str, architecture: str, is_counted: bool
) -> None:
    data = {**SMALL, "model_type": kind, "architectures": [architecture]}
    if is_counted:
        assert hf_model(data, "config.json").num_parameters
        return
    with pytest.raises(UncountedError, match=f"`{architecture}` cannot be counted"):
        hf_model(data, "config.json")


@pytest.mark.parametrize("kind", sorted(EXACT_MODEL_TYPES))
def test_transformers_own_names_are_those_of_the_language_models(kind: str) -> None:
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    sizes = {**SMALL, **GPT, "n_head": 4}
    assert hf_model({**sizes, "model_type": kind, "architectures": [names[kind]]}, "x").num_parameters


@pytest.mark.parametrize(
    "key", ["num_experts", "n_routed_experts", "num_local_experts", "moe_intermediate_size"]
)
def test_experts_that_the_family_does_not_have_are_not_counted(key: str) -> None:
    with pytest.raises(UncountedError, match=f"`{key}` in a model of the type `llama`") as caught:
        hf_model({**SMALL, "model_type": "llama", key: 8}, "config.json")
    assert "--model 30B" in str(caught.value.fix)


def test_the_manual_names_the_families() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    paragraph = manual.partition("`model_type`")[2].partition("\n\n")[0]
    assert set(re.findall(r"`([a-z0-9_]+)`", paragraph)) == EXACT_MODEL_TYPES


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", "not an object"),
        ("{}", "no `model_type`"),
        ('{"model_type": ["llama"]}', "no `model_type`"),
        ('{"model_type": "llama"}', "no `hidden_size`"),
        (json.dumps({**SMALL, "model_type": "llama", "hidden_size": "64"}), "`hidden_size` is '64'"),
        (json.dumps({**SMALL, "model_type": "llama", "vocab_size": 0}), "`vocab_size` is 0"),
        (json.dumps({**SMALL, "model_type": "llama", "num_hidden_layers": 999_999_999}), "is 999999999"),
        (json.dumps({**SMALL, "model_type": "llama", "vocab_size": 10**12}), "`vocab_size` is 10+"),
        (json.dumps({**SMALL, "model_type": "stablelm", "qk_layernorm": True}), "not counted"),
        (json.dumps({**SMALL, "model_type": "qwen3_moe", "mlp_only_layers": 3}), "`mlp_only_layers`"),
        (json.dumps({**SMALL, "model_type": "glm4_moe", "first_k_dense_replace": -1}), "0 or more"),
        ("[" * 100_000, "nested|not JSON"),
    ],
)
def test_what_is_no_model_is_refused(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ToolkitError, match=says):
        read_hf_model(tmp_path / "config.json")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match="cannot be read"):
        read_hf_model(tmp_path / "none.json")
