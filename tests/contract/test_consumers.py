"""What the Trainer, Accelerate and Lightning really fill in and refuse, by their own code."""

from __future__ import annotations

import copy
import inspect
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_toolkit.config.consumers import Consumer
from ds_toolkit.config.linter import lint
from ds_toolkit.config.members import members
from ds_toolkit.config.schema import DsConfig, Section

with warnings.catch_warnings():
    # What these packages do as they are imported is not ours to judge.
    warnings.simplefilter("ignore")
    import accelerate
    import pytorch_lightning.strategies.deepspeed as lightning
    from accelerate.utils import DeepSpeedPlugin
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

pytestmark = pytest.mark.filterwarnings("ignore")
PARAMS = {
    "optimizer": ("lr", "betas", "eps", "weight_decay", "amsgrad", "torch_adam"),
    "scheduler": (
        "warmup_min_lr",
        "warmup_max_lr",
        "warmup_num_steps",
        "total_num_steps",
        "warmup_type",
        "cos_min_ratio",
    ),
}


def everything_auto(section: type[Section] = DsConfig) -> dict[str, Any]:
    """A configuration with every key that the schema knows, and "auto" at each of them."""
    from ds_toolkit.config.members import known_keys
    from ds_toolkit.config.schema import keys_of

    config: dict[str, Any] = {}
    for key in keys_of(section):
        subsection = known_keys(section)[key].subsection
        config[key] = "auto" if subsection is None else everything_auto(subsection)
    if section is DsConfig:
        config |= {
            name: {"type": "auto", "params": dict.fromkeys(keys, "auto")} for name, keys in PARAMS.items()
        }
    return config


def autos(config: dict[str, Any]) -> set[str]:
    found = {".".join(member.path) for member in members(config) if member.value == "auto"}
    for name in PARAMS:
        found |= {f"{name}.params.{key}" for key, value in config[name]["params"].items() if value == "auto"}
    return found


def test_the_trainer_fills_in_what_we_say_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Some keys are filled in at stage 3 only.
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    config = everything_auto()
    before = autos(config)
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], deepspeed=config)
    resolver = arguments.hf_deepspeed_config
    assert isinstance(resolver, HfTrainerDeepSpeedConfig)
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=64))
    resolver.trainer_config_finalize(arguments, model, 1000)
    assert before - autos(resolver.config) == Consumer.HF.resolved


def test_accelerate_fills_in_what_we_say() -> None:
    named = "".join(
        inspect.getsource(part)
        for part in (
            accelerate.Accelerator._prepare_deepspeed,
            DeepSpeedPlugin.__post_init__,
            DeepSpeedPlugin.set_mixed_precision,
        )
    )
    for key in Consumer.ACCELERATE.resolved:
        assert f'"{key}"' in named or f"            {key}=" in named, key
    assert "optimizer.params.betas" not in named
    assert "optimizer.params.eps" not in named


def test_accelerate_fills_in_a_stage_and_refuses_what_it_cannot_fill_in() -> None:
    config = {"train_batch_size": 8, "zero_optimization": {"stage": "auto", "overlap_comm": "auto"}}
    plugin = DeepSpeedPlugin(hf_ds_config=copy.deepcopy(config))
    assert plugin.deepspeed_config["zero_optimization"]["stage"] in (0, 1, 2, 3)
    with pytest.raises(ValueError, match=r"overlap_comm.*not found in kwargs"):
        plugin.deepspeed_config_process(must_match=False)


@pytest.mark.parametrize(
    "more",
    [
        {"data_types": {"keep_in_fp32_modules": "auto"}},
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"update_interval": "auto"},
            },
        },
        {"_note": "auto"},
    ],
)
def test_what_deepspeed_takes_or_ignores_stops_accelerate_where_it_is_auto(more: dict[str, Any]) -> None:
    config = {"train_batch_size": 8, "zero_optimization": {"stage": 2}, **more}
    plugin = DeepSpeedPlugin(hf_ds_config=copy.deepcopy(config))
    with pytest.raises(ValueError, match="not found in kwargs"):
        plugin.deepspeed_config_process(must_match=False)
    for consumer in (Consumer.HF, Consumer.ACCELERATE):
        assert [finding.code for finding in lint(config, consumer=consumer)] == ["DS019"]


def test_accelerate_writes_bf16_beside_its_old_name() -> None:
    plugin = DeepSpeedPlugin(
        hf_ds_config={"bfloat16": {"enabled": True}, "zero_optimization": {"stage": 1}, "train_batch_size": 8}
    )
    plugin.set_mixed_precision("no")
    assert plugin.deepspeed_config["bf16"] == {"enabled": False}


def test_the_trainer_refuses_a_configuration_without_zero(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ZeRO optimization config"):
        TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, report_to=[], deepspeed={"train_batch_size": "auto"}
        )


def test_accelerate_refuses_a_configuration_without_zero_and_overwrites_the_progress() -> None:
    with pytest.raises(ValueError, match="ZeRO optimization config"):
        DeepSpeedPlugin(hf_ds_config={"train_batch_size": 8})
    plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 1}, "steps_per_print": 10})
    assert plugin.deepspeed_config["steps_per_print"] == float("inf")


@pytest.mark.parametrize(
    "reader", [HfTrainerDeepSpeedConfig, lambda path: DeepSpeedPlugin(hf_ds_config=path)]
)
@pytest.mark.parametrize(
    "text",
    [
        '{\n  // a comment\n  "zero_optimization": {"stage": 1}\n}',
        '\ufeff{"zero_optimization": {"stage": 1}}',
    ],
)
def test_both_read_json_only(reader: Any, text: str, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"Expecting|property name|BOM"):
        reader(str(path))


def lightning_strategy(config: dict[str, Any]) -> Any:
    # Its constructor asks for a GPU.
    strategy = object.__new__(lightning.DeepSpeedStrategy)
    strategy.config = config
    strategy._lightning_module = SimpleNamespace(
        trainer=SimpleNamespace(accumulate_grad_batches=4, gradient_clip_val=0.5)
    )
    return strategy


def test_lightning_refuses_accumulation_and_fills_in_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = lightning_strategy({"gradient_accumulation_steps": 2})
    with pytest.raises(Exception, match="Do not set `gradient_accumulation_steps`"):
        strategy._format_batch_size_and_grad_accum_config()
    monkeypatch.setattr(lightning.DeepSpeedStrategy, "_auto_select_batch_size", lambda self: 3)
    strategy = lightning_strategy({"bf16": {"enabled": "auto"}})
    strategy._format_batch_size_and_grad_accum_config()
    assert strategy.config == {
        "bf16": {"enabled": "auto"},
        "gradient_accumulation_steps": 4,
        "train_micro_batch_size_per_gpu": 3,
        "gradient_clipping": 0.5,
    }


def test_lightning_reads_json_only_and_would_rather_make_the_optimizer_itself(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text('{\n  // a comment\n  "train_micro_batch_size_per_gpu": 1\n}')
    with pytest.raises(ValueError, match="property name"):
        lightning_strategy({})._load_config(str(path))
    source = inspect.getsource(lightning.DeepSpeedStrategy._initialize_deepspeed_train)
    assert '"optimizer" in self.config' in source
    assert "recommended to define it in `LightningModule.configure_optimizers`" in source
