"""Models that no formula here counts: built by the real transformers, without memory for weights."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

import jobs
import pytest
import transformers

from ds_toolkit.advise import hf_counting
from ds_toolkit.advise.hf_counting import read_hf_model
from ds_toolkit.errors import ToolkitError
from ds_toolkit.integrations import hf_parameters
from ds_toolkit.plan.hf_layers import EXACT_MODEL_TYPES
from ds_toolkit.plan.hf_model import hf_model

OPT = {"model_type": "opt", "architectures": ["OPTForCausalLM"]}


def written(folder: Path, data: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(data))
    return folder


@pytest.mark.parametrize(
    ("data", "counted_as", "num_parameters", "num_layers", "hidden_size"),
    [
        # What the weights of the published checkpoints come to.
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "BertForM", 109_514_298, 12, 768),
        ({"model_type": "bert"}, "BertForMaskedLM", 109_514_298, 12, 768),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "T5", 60_506_624, 12, 512),
        ({"model_type": "t5", "architectures": ["T5WithLMHeadModel"]}, "T5", 60_506_624, 12, 512),
        ({"model_type": "gptj"}, "GPTJForCausalLM", 6_050_882_784, 28, 4096),
        ({**OPT, "ffn_dim": 3072}, "OPTForCausalLM", 125_239_296, 12, 768),
        # One number for a class, and none of the language model's.
        (
            {"model_type": "bert", "architectures": ["BertForSequenceClassification"]},
            "BertForSequenceClassification",
            109_483_778,
            12,
            768,
        ),
        ({"model_type": "mistral", "architectures": ["MistralModel"]}, "MistralM", 7_110_660_096, 32, 4096),
        # Neither has one embedding that its input goes through: two halves, and sounds.
        ({"model_type": "clip"}, "CLIPModel", 151_277_313, 12, 512),
        ({"model_type": "hubert"}, "HubertModel", 94_371_712, 12, 768),
    ],
)
def test_the_class_that_the_file_names_is_counted(
    data: dict[str, object], counted_as: str, num_parameters: int, num_layers: int, hidden_size: int
) -> None:
    answer = hf_parameters.count(data)
    sizes = answer["tensor_sizes"]
    assert isinstance(sizes, list)
    assert str(answer["class"]).startswith(counted_as)
    assert (sum(sizes), answer["num_layers"], answer["hidden_size"]) == (
        num_parameters,
        num_layers,
        hidden_size,
    )
    assert answer["experts"] is None


@pytest.mark.parametrize("kind", sorted(EXACT_MODEL_TYPES))
def test_both_ways_agree(kind: str) -> None:
    config = transformers.AutoConfig.for_model(kind, num_hidden_layers=5, pad_token_id=0)
    data = json.loads(config.to_json_string(use_diff=False))
    formula, answer = hf_model(data, "config.json"), hf_parameters.count(data)
    model = hf_counting._model(data, answer, "config.json")
    assert sorted(model.tensor_sizes) == sorted(formula.tensor_sizes)
    for name in ("num_parameters", "num_layers", "hidden_size", "vocabulary_size", "num_active_parameters"):
        assert getattr(model, name) == getattr(formula, name), name
    assert model.largest_layer_parameters == formula.largest_layer_parameters
    assert (model.experts is None) == (formula.experts is None)
    if model.experts is not None and formula.experts is not None:
        assert model.experts.experts_per_token == formula.experts.experts_per_token
        # Biases of experts and gates of shared ones count in the width.
        assert model.experts.active_width == pytest.approx(formula.experts.active_width, rel=0.001)


def test_experts_of_a_family_without_a_formula() -> None:
    data = {"model_type": "qwen3_next", "num_hidden_layers": 4, "num_experts": 16, "num_experts_per_tok": 3}
    answer = hf_parameters.count(data)
    experts, sizes = answer["experts"], answer["tensor_sizes"]
    assert isinstance(experts, dict)
    assert isinstance(sizes, list)
    one_expert = 3 * 2048 * 512
    assert sum(sizes) - experts["num_active_parameters"] == 4 * 13 * one_expert
    # Three routed, and the shared one.
    assert (experts["experts_per_token"], experts["active_width"]) == (3, 4 * 512)
    unknown = hf_parameters.count({"model_type": "deepseek_v2", "num_hidden_layers": 2})
    assert unknown["experts"] is None
    assert "not known" in str(unknown["notes"])


def test_parts_that_are_not_modelled_are_named() -> None:
    translator = hf_parameters.count({"model_type": "t5"})
    assert "cross-attention is not counted" in str(translator["notes"])
    seeing = hf_parameters.count(
        {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": {}}
    )
    assert "text part alone" in str(seeing["notes"])
    old = hf_parameters.count({"model_type": "t5", "architectures": ["T5WithLMHeadModel"]})
    assert "has no `T5WithLMHeadModel`" in str(old["notes"])


def test_how_a_model_is_run_does_not_matter() -> None:
    elsewhere = {
        **OPT,
        "_attn_implementation": "flash_attention_2",
        "attn_implementation": "somebody/kernels",
        "experts_implementation": "somebody/kernels",
        "quantization_config": {"quant_method": "fp8"},
        "_name_or_path": "somebody/model",
    }
    assert hf_parameters.count(elsewhere) == hf_parameters.count(OPT)


@pytest.mark.parametrize(
    ("data", "says", "fix"),
    [
        ({"model_type": "newest"}, "`newest` are unknown to transformers", "pip install -U transformers"),
        ({"model_type": "newest", "auto_map": {}}, "without the code that comes with the model", ""),
        ({**OPT, "architectures": ["Mine"], "auto_map": {}}, "`Mine` cannot be counted without the code", ""),
        # Names of transformers that are no model of such a configuration.
        ({**OPT, "architectures": ["pipeline"], "auto_map": {}}, "`pipeline` cannot be counted", ""),
        ({**OPT, "architectures": ["BertModel"], "auto_map": {}}, "`BertModel` cannot be counted", ""),
    ],
)
def test_what_transformers_cannot_build_is_refused(data: dict[str, object], says: str, fix: str) -> None:
    with pytest.raises(hf_parameters.CannotCountError, match=says) as caught:
        hf_parameters.count(data)
    assert caught.value.args[2] == fix


def test_the_command_says_how_it_counted_and_runs_nothing_of_the_checkpoints(tmp_path: Path) -> None:
    traps = written(tmp_path / "traps", {**OPT, "auto_map": {"AutoModelForCausalLM": "modeling.Mine"}})
    for name in ("modeling", "torch", "transformers", "json", "sitecustomize"):
        (traps / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    done = jobs.run(
        [jobs.BIN / "ds-toolkit", "plan", "memory", "--model", ".", "--gpus", "8", "--json"], cwd=traps
    )
    answer = json.loads(done.check().output)
    version = transformers.__version__
    assert answer["model"] == (
        "config.json: opt, 12 blocks of width 768, 125.2M parameters,"
        f" counted by transformers {version} as OPTForCausalLM"
    )
    assert answer["memory"][0]["gpu"]["weights_bytes"] == 2 * 125_239_296
    mine = written(traps, {"model_type": "mine", "auto_map": {"AutoConfig": "modeling.MyConfig"}})
    refused = jobs.run([jobs.BIN / "ds-toolkit", "gen-config", "--model", ".", "--dry-run"], cwd=mine)
    assert refused.exit_code == 2
    assert "error: models of the type `mine` cannot be counted without the code" in refused.output
    assert "--model 30B" in refused.output
    assert not (tmp_path / "ran").exists()


def test_modules_beside_the_script_do_not_pass_for_frameworks(tmp_path: Path) -> None:
    script = Path(shutil.copy(hf_parameters.__file__, tmp_path))
    (tmp_path / "transformers.py").write_text("raise SystemExit(3)\n")
    done = subprocess.run(
        [sys.executable, script], input='{"model_type": "newest"}', capture_output=True, text=True, check=True
    )
    assert "unknown to transformers" in json.loads(done.stdout)["error"]["what"]


def test_without_transformers_it_says_what_to_install(tmp_path: Path) -> None:
    # Packages as they are here, but for those two.
    venv.create(tmp_path / "bare", symlinks=True)
    packages = tmp_path / "packages"
    packages.mkdir()
    for entry in Path(site.getsitepackages()[0]).iterdir():
        if not entry.name.startswith(("transformers", "torch")) and entry.suffix != ".pth":
            (packages / entry.name).symlink_to(entry)
    environment = {"PYTHONPATH": f"{jobs.REPOSITORY}{os.pathsep}{packages}", "COLUMNS": "200"}
    model = written(tmp_path / "model", OPT)
    command = [tmp_path / "bare" / "bin" / "python", "-m", "ds_toolkit", "plan", "memory", "--model", model]
    done = jobs.run(command, environment=environment)
    assert done.exit_code == 2
    assert "counted by transformers, which is not installed here" in done.output
    assert "pip install transformers torch, or give the number of parameters" in done.output
    # By formula nothing is needed.
    written(model, transformers.LlamaConfig().to_dict())
    assert "counted by formula" in jobs.run(command, environment=environment).check().output


def test_a_size_that_breaks_the_models_own_code(tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match="type `falcon` cannot be counted") as caught:
        read_hf_model(written(tmp_path, {"model_type": "falcon", "hidden_size": "wide"}))
    assert "hidden_size" in str(caught.value.why)
    assert caught.value.where == str(tmp_path / "config.json")


def test_it_ends_when_its_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_counting, "_SECONDS", 0.2)
    with pytest.raises(ToolkitError, match="type `opt` cannot be counted") as caught:
        read_hf_model(written(tmp_path, {**OPT, "vocab_size": 1001}))
    assert "did not build the model in 0.2 s" in str(caught.value.why)


def test_a_process_that_dies_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deadly = tmp_path / "deadly.py"
    deadly.write_text("import os, sys; print('last', file=sys.stderr, flush=True); os.kill(os.getpid(), 9)")
    monkeypatch.setattr(hf_counting, "_SCRIPT", deadly)
    with pytest.raises(ToolkitError, match="cannot be counted") as caught:
        read_hf_model(written(tmp_path, {**OPT, "vocab_size": 1002}))
    assert "ended with -9: last" in str(caught.value.why)
