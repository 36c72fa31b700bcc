from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import transformers

from ds_toolkit.errors import ToolkitError
from ds_toolkit.plan.hf_model import EXACT_MODEL_TYPES, hf_model, read_hf_model

ABSENT = object()
SMALL: dict[str, object] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 176,
    "vocab_size": 1000,
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
            "num_attention_heads": 32,
            "num_key_value_heads": ABSENT,
        }
        for kind in EXACT_MODEL_TYPES - {"gpt2", "gpt_neox", "bloom"}
    },
    **{
        f"{kind} with biases": {"model_type": kind, **SMALL, "head_dim": 16, "attention_bias": True}
        for kind in EXACT_MODEL_TYPES - {"gpt2", "bloom"}
    },
    "gpt_neox without biases": {"model_type": "gpt_neox", **SMALL, "attention_bias": False},
    "mixtral of four": {"model_type": "mixtral", **SMALL, "num_local_experts": 4},
    "stablelm with biases": {"model_type": "stablelm", **SMALL, "use_qkv_bias": True},
    "stablelm in parallel": {"model_type": "stablelm", **SMALL, "use_parallel_residual": True},
    "gemma untied": {"model_type": "gemma", **SMALL, "tie_word_embeddings": False},
}


@pytest.mark.parametrize("written", CASES.values(), ids=CASES.keys())
def test_parameters_are_those_of_the_real_model(written: dict[str, object], tmp_path: Path) -> None:
    written = {key: value for key, value in written.items() if value is not ABSENT}
    (tmp_path / "config.json").write_text(json.dumps(written))
    config = transformers.AutoConfig.from_pretrained(tmp_path, pad_token_id=0)
    with torch.device("meta"):
        real = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model = read_hf_model(tmp_path)
    sizes = sorted(parameter.numel() for parameter in real.parameters())
    assert sorted(model.tensor_sizes) == sizes
    assert model.num_parameters == sum(sizes)
    assert str(model.num_layers) in model.rationale
    # As transformers writes it, with all defaults spelt out.
    config.save_pretrained(tmp_path)
    assert read_hf_model(tmp_path).tensor_sizes == model.tensor_sizes


@pytest.mark.parametrize(
    "kind",
    ["deepseek_v3", "qwen2_moe", "qwen3_moe", "falcon", "gptj", "phi", "opt", "gpt_oss", "llava", "newest"],
)
def test_other_families_are_refused(kind: str) -> None:
    with pytest.raises(ToolkitError, match=f"type `{kind}` cannot be counted") as caught:
        hf_model({**SMALL, "model_type": kind}, "config.json")
    assert "--model 30B" in str(caught.value.fix)
    with pytest.raises(ToolkitError, match="cannot be counted"):
        hf_model({"model_type": kind, "text_config": {**SMALL, "model_type": "llama"}}, "config.json")


@pytest.mark.parametrize(
    "key", ["num_experts", "n_routed_experts", "num_local_experts", "moe_intermediate_size"]
)
def test_experts_that_the_family_does_not_have_are_refused(key: str) -> None:
    with pytest.raises(ToolkitError, match=f"`{key}` in a model of the type `llama`") as caught:
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
        ("{}", "type `None` cannot be counted"),
        ('{"model_type": "llama"}', "no `hidden_size`"),
        (json.dumps({**SMALL, "model_type": "llama", "hidden_size": "64"}), "`hidden_size` is '64'"),
        (json.dumps({**SMALL, "model_type": "llama", "vocab_size": 0}), "`vocab_size` is 0"),
        (json.dumps({**SMALL, "model_type": "llama", "num_hidden_layers": 999_999_999}), "is 999999999"),
        (json.dumps({**SMALL, "model_type": "llama", "vocab_size": 10**12}), "`vocab_size` is 10+"),
        (json.dumps({**SMALL, "model_type": "stablelm", "qk_layernorm": True}), "not counted"),
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
