"""DS8xx: what the program that hands the configuration to DeepSpeed refuses or changes."""

from __future__ import annotations

from collections.abc import Iterator

from ds_toolkit.config.consumers import Consumer
from ds_toolkit.config.reader import BYTE_ORDER_MARK
from ds_toolkit.config.rules.batch import BATCH_SIZES
from ds_toolkit.config.rules.registry import rule
from ds_toolkit.config.subject import Config, json_pointer
from ds_toolkit.findings import Severity
from ds_toolkit.rules import Problem

_ACCUMULATION = "gradient_accumulation_steps"


@rule("DS801", "accumulation-under-lightning", Severity.ERROR)
def accumulation_under_lightning(config: Config) -> Iterator[Problem]:
    """Lightning refuses `gradient_accumulation_steps`: its Trainer has `accumulate_grad_batches`.

    Bad (consumer=lightning):
        {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}
    Good (consumer=lightning):
        {"train_micro_batch_size_per_gpu": 1}
    """
    if config.consumer is Consumer.LIGHTNING and _ACCUMULATION in config.data:
        message = f"Lightning refuses `{_ACCUMULATION}`"
        yield Problem(json_pointer(_ACCUMULATION), message, "pass accumulate_grad_batches to the Trainer")


@rule("DS802", "no-zero-under-accelerate", Severity.ERROR)
def no_zero_under_accelerate(config: Config) -> Iterator[Problem]:
    """Accelerate refuses a configuration without `zero_optimization`, and so does the Trainer, which uses it.

    Bad (consumer=accelerate):
        {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}}
    Bad (consumer=hf):
        {"train_batch_size": "auto", "bf16": {"enabled": "auto"}}
    Good (consumer=accelerate):
        {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "zero_optimization": {"stage": 0}}
    """
    # Batch sizes alone are a fragment, which somebody asks the Trainer's resolving about.
    fragment = config.consumer is Consumer.HF and config.data.keys() <= BATCH_SIZES
    if config.consumer.uses_accelerate and "zero_optimization" not in config.data and not fragment:
        message = f"{config.consumer.label} wants `zero_optimization`"
        yield Problem("", message, 'add "zero_optimization": {"stage": 0}, or another stage')


@rule("DS803", "comments-for-a-json-reader", Severity.ERROR)
def comments_for_a_json_reader(config: Config) -> Iterator[Problem]:
    """The file is HJSON, which DeepSpeed reads, but it is first read as strict JSON.

    Comments, trailing commas and texts without quotes end the Trainer, Accelerate and Lightning, and so does
    the byte order mark that some editors of Windows begin a file with. Notes can be kept under keys that
    begin with `_` or `x-`.

    Bad (consumer=lightning, text=hjson):
        {
          # of one GPU
          "train_micro_batch_size_per_gpu": 1
        }
    Good (consumer=lightning, text=hjson):
        {
          "_note": "of one GPU",
          "train_micro_batch_size_per_gpu": 1
        }
    """
    if config.document is None or not config.consumer.reads_json_only:
        return
    if config.document.text.startswith(BYTE_ORDER_MARK):
        message = f"{config.consumer.label} stops at the byte order mark that the file begins with"
        yield Problem("", message, "save it as UTF-8 without a byte order mark")
    elif not config.document.is_json:
        message = f"{config.consumer.label} reads JSON only, and this is HJSON"
        yield Problem("", message, "remove comments and trailing commas, and quote keys and texts")


@rule("DS804", "optimizer-under-lightning", Severity.WARNING)
def optimizer_under_lightning(config: Config) -> Iterator[Problem]:
    """Lightning warns of an optimizer or a scheduler in the configuration: `configure_optimizers` makes them.

    Bad (consumer=lightning):
        {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
    Good (consumer=lightning):
        {"train_micro_batch_size_per_gpu": 1}
    """
    if config.consumer is Consumer.LIGHTNING:
        for key in ("optimizer", "scheduler"):
            if key in config.data:
                message = f"Lightning makes the {key} in configure_optimizers"
                yield Problem(json_pointer(key), message, "remove it")


@rule("DS805", "progress-under-accelerate", Severity.INFO)
def progress_under_accelerate(config: Config) -> Iterator[Problem]:
    """Accelerate overwrites `steps_per_print`: DeepSpeed prints no progress under it, nor under the Trainer.

    Bad (consumer=accelerate):
        {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, "steps_per_print": 100}
    Good (consumer=accelerate):
        {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
    """
    if config.consumer.uses_accelerate and config.data.get("steps_per_print") not in (None, "auto"):
        message = f"{config.consumer.label} overwrites `steps_per_print`"
        yield Problem(json_pointer("steps_per_print"), message, "remove it")


@rule("DS806", "scheduler-without-optimizer", Severity.WARNING)
def scheduler_without_optimizer(config: Config) -> Iterator[Problem]:
    """Under Accelerate a scheduler is configured, and the script has to pass a DummyScheduler for it.

    A script that makes both by itself is refused; one that makes the optimizer alone has to wrap the
    scheduler.

    Bad (consumer=accelerate):
        {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1},
         "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}
    Good (consumer=accelerate):
        {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1},
         "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
         "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}
    """
    alone = "scheduler" in config.data and "optimizer" not in config.data
    if config.consumer is Consumer.ACCELERATE and alone:
        message = "the script has to pass a DummyScheduler: a scheduler is configured, an optimizer is not"
        yield Problem("/scheduler", message, "configure both, or neither")
