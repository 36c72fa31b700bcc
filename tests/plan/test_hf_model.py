from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from ds_toolkit.errors import ToolkitError
from ds_toolkit.plan.hf_model import hf_model, read_hf_model

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 176,
    "vocab_size": 1000,
}
CASES = {
    "llama": transformers.LlamaConfig(**SMALL),
    "llama with biases and tied": transformers.LlamaConfig(
        **SMALL, attention_bias=True, tie_word_embeddings=True
    ),
    "mistral": transformers.MistralConfig(**SMALL, head_dim=16),
    "mixtral": transformers.MixtralConfig(**SMALL, num_local_experts=4),
    "qwen2": transformers.Qwen2Config(**SMALL),
    "qwen3": transformers.Qwen3Config(**SMALL, head_dim=32),
    "gpt2": transformers.GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=1000, n_positions=128),
    "gpt_neox": transformers.GPTNeoXConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256, vocab_size=1000
    ),
}


@pytest.mark.parametrize("config", CASES.values(), ids=CASES.keys())
def test_parameters_are_those_of_the_real_model(
    config: transformers.PretrainedConfig, tmp_path: Path
) -> None:
    with torch.device("meta"):
        real = transformers.AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    model = read_hf_model(tmp_path)
    sizes = sorted(parameter.numel() for parameter in real.parameters())
    assert sorted(model.tensor_sizes) == sizes
    assert model.num_parameters == sum(sizes)
    assert str(model.num_layers) in model.rationale
    assert "counted as" not in model.rationale


def test_an_unknown_family_is_counted_like_llama_with_a_note() -> None:
    model = hf_model({**SMALL, "model_type": "newest"}, "config.json")
    assert model.num_parameters == hf_model({**SMALL, "model_type": "llama"}, "config.json").num_parameters
    assert "counted as Llama" in model.rationale
    assert hf_model({"text_config": {**SMALL, "model_type": "llama"}}, "x").hidden_size == 64


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", "not an object"),
        ("{}", "no `hidden_size`|no `vocab_size`|no `num"),
        (json.dumps({**SMALL, "hidden_size": "64"}), "`hidden_size` is '64'"),
        (json.dumps({**SMALL, "vocab_size": 0}), "`vocab_size` is 0"),
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
