"""DS11x: the optimizer that DeepSpeed makes."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from ds_toolkit.config.consumers import Consumer
from ds_toolkit.config.rules.registry import rule
from ds_toolkit.config.schema.optimization import (
    MUP_OPTIMIZERS,
    OPTIMIZER_PARAMS,
    REMOVED_OPTIMIZERS,
    ZERO_OPTIMIZERS,
)
from ds_toolkit.config.schema.torch_classes import TORCH_OPTIMIZERS
from ds_toolkit.config.subject import Config, is_true, json_pointer
from ds_toolkit.findings import Edit, Severity
from ds_toolkit.rules import Problem

_TYPE = json_pointer("optimizer", "type")
_CLIPPING = "gradient_clipping"
_MAX_GRAD_NORM = "max_grad_norm"


@rule("DS111", "unknown-optimizer", Severity.ERROR)
def unknown_optimizer(config: Config) -> Iterator[Problem]:
    """The optimizer is none of DeepSpeed's, and no class of torch.optim.

    DeepSpeed's own names (Adam, AdamW, Adagrad, Lamb, Lion, Muon and those of mup) may be written in any
    case; everything else must be the exact name of a class of torch.optim. The 1-bit optimizers are gone.

    Bad:
        {"train_batch_size": 8, "optimizer": {"type": "AdmaW", "params": {"lr": 1e-4}}}
    Bad:
        {"train_batch_size": 8, "optimizer": {"type": "sgd", "params": {"lr": 1e-4}}}
    Bad:
        {"train_batch_size": 8, "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-4}}}
    Good:
        {"train_batch_size": 8, "optimizer": {"type": "adamw", "params": {"lr": 1e-4}}}
    """
    name = config.section("optimizer").get("type")
    if not isinstance(name, str) or _is_known(name):
        return
    if name.lower() in REMOVED_OPTIMIZERS:
        yield Problem(_TYPE, f"DeepSpeed no longer has the optimizer `{name}`", "use Adam, AdamW or Lamb")
        return
    names = {plain.lower(): plain for plain in (*TORCH_OPTIMIZERS, "Adam", "AdamW", "Lamb", "Lion", "Muon")}
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.7)
    fix = (
        f"did you mean `{names[near[0]]}`?" if near else "use AdamW, or the exact name of a torch.optim class"
    )
    yield Problem(_TYPE, f"there is no optimizer `{name}`", fix)


@rule("DS112", "optimizer-without-type", Severity.ERROR)
def optimizer_without_type(config: Config) -> Iterator[Problem]:
    """An optimizer has params but no type, and DeepSpeed ignores the section.

    Bad:
        {"train_batch_size": 8, "optimizer": {"params": {"lr": 1e-4}}}
    Good:
        {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
    """
    optimizer = config.data.get("optimizer")
    if isinstance(optimizer, Mapping) and optimizer.get("type") is None:
        yield Problem("/optimizer", "an optimizer without `type` is ignored", 'add "type": "AdamW"')


@rule("DS113", "unknown-optimizer-param", Severity.ERROR)
def unknown_optimizer_param(config: Config) -> Iterator[Problem]:
    """An optimizer's argument is none that it takes: a TypeError when it is made.

    Bad:
        {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weigth_decay": 0.1}}}
    Bad:
        {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentm": 0.9}}}
    Good:
        {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}}}
    """
    optimizer = config.section("optimizer")
    name = str(optimizer.get("type"))
    known = OPTIMIZER_PARAMS.get(name.lower()) or TORCH_OPTIMIZERS.get(name)
    if known is None:
        return
    for key in config.section("optimizer", "params"):
        if key not in known and key != _MAX_GRAD_NORM:
            near = difflib.get_close_matches(key, known, n=1)
            fix = f"did you mean `{near[0]}`?" if near else "remove it"
            message = f"`{optimizer['type']}` takes no `{key}`"
            yield Problem(json_pointer("optimizer", "params", key), message, fix)


@rule("DS114", "max-grad-norm", Severity.ERROR)
def max_grad_norm(config: Config) -> Iterator[Problem]:
    """The optimizer's params hold `max_grad_norm`, and the engine refuses that: clipping is DeepSpeed's.

    Bad:
        {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "max_grad_norm": 1.0}}}
    Good:
        {"train_batch_size": 8, "gradient_clipping": 1.0,
         "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
    """
    if _MAX_GRAD_NORM in config.section("optimizer", "params"):
        pointer = json_pointer("optimizer", "params", _MAX_GRAD_NORM)
        # The top level is the section with the empty pointer.
        is_set = _CLIPPING in config.data
        edit = None if is_set else Edit(pointer, key=_CLIPPING, section="")
        message = f"the engine refuses `{_MAX_GRAD_NORM}` in the optimizer"
        fix = f"remove it: `{_CLIPPING}` is set" if is_set else f"write `{_CLIPPING}` at the top level"
        yield Problem(pointer, message, fix, edit)


@rule("DS115", "no-learning-rate", Severity.WARNING)
def no_learning_rate(config: Config) -> Iterator[Problem]:
    """The optimizer has no `lr`, and the default of its class holds: 0.001 for Adam, AdamW and Lion.

    Bad:
        {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.1}}}
    Good:
        {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}}}
    """
    optimizer, params = config.section("optimizer"), config.section("optimizer", "params")
    rates = {"lr", "muon_lr", "adam_lr"}
    if isinstance(optimizer.get("type"), str) and not rates & params.keys():
        place = "/optimizer/params" if "params" in optimizer else "/optimizer"
        yield Problem(
            place, "the optimizer has no learning rate, and its default holds", 'add "lr" to `params`'
        )


@rule("DS116", "lamb-with-fixed-loss-scale", Severity.ERROR)
def lamb_with_fixed_loss_scale(config: Config) -> Iterator[Problem]:
    """Lamb needs a loss scale that adapts, and the engine refuses a fixed one.

    Bad:
        {"train_batch_size": 8, "fp16": {"enabled": true, "loss_scale": 128},
         "optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}}
    Good:
        {"train_batch_size": 8, "fp16": {"enabled": true, "loss_scale": 0},
         "optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}}
    """
    scale = config.section("fp16").get("loss_scale", 0)
    if str(config.section("optimizer").get("type")).lower() == "lamb" and scale not in (0, "auto"):
        yield Problem("/fp16/loss_scale", "Lamb refuses a fixed loss scale", "write 0")


@rule("DS117", "untested-optimizer", Severity.ERROR)
def untested_optimizer(config: Config) -> Iterator[Problem]:
    """ZeRO does not know the optimizer, and the engine stops unless it is told to try.

    It knows Adam, AdamW, Adagrad, Lion and Muon. The Hugging Face Trainer and Accelerate set the switch
    themselves for optimizers made in code.

    Bad:
        {"train_batch_size": 8, "zero_optimization": {"stage": 1},
         "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    Good:
        {"train_batch_size": 8, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": true,
         "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    """
    name = config.section("optimizer").get("type")
    if not isinstance(name, str) or not _is_known(name) or name.lower() in ZERO_OPTIMIZERS:
        return
    if (config.zero_stage or 0) > 0 and not config.data.get("zero_allow_untested_optimizer"):
        yield Problem(
            _TYPE, f"ZeRO refuses `{name}`", 'add "zero_allow_untested_optimizer": true, or use AdamW'
        )


@rule("DS118", "muon-with-reduce-scatter", Severity.ERROR)
def muon_with_reduce_scatter(config: Config) -> Iterator[Problem]:
    """Muon needs whole gradients, and stage 3 refuses it unless `reduce_scatter` is false.

    Bad:
        {"train_batch_size": 8, "zero_optimization": {"stage": 3},
         "optimizer": {"type": "Muon", "params": {"lr": 0.02}}}
    Good:
        {"train_batch_size": 8, "zero_optimization": {"stage": 3, "reduce_scatter": false},
         "optimizer": {"type": "Muon", "params": {"lr": 0.02}}}
    """
    muon = str(config.section("optimizer").get("type")).lower() == "muon"
    if muon and config.zero_stage == 3 and is_true(config.zero.get("reduce_scatter", True)):
        message = "Muon and `reduce_scatter` cannot be used together at stage 3"
        yield Problem(_TYPE, message, 'add "reduce_scatter": false to `zero_optimization`')


@rule("DS119", "client-optimizer-with-offload", Severity.WARNING)
def client_optimizer_with_offload(config: Config) -> Iterator[Problem]:
    """Optimizer states are offloaded and the optimizer is left to the script, which must then pass a CPU one.

    DeepSpeed refuses any but DeepSpeedCPUAdam and DeepSpeedCPULion there, unless
    `zero_force_ds_cpu_optimizer` is false. Accelerate and the Hugging Face Trainer replace the optimizer by
    themselves.

    Bad:
        {"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    Good:
        {"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
         "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
    """
    in_script = config.section("optimizer").get("type") is None and "optimizer" not in config.data
    offloaded = config.offload_device("offload_optimizer") != "none" and (config.zero_stage or 0) > 0
    own = config.consumer is Consumer.NATIVE and "zero_force_ds_cpu_optimizer" not in config.data
    if in_script and offloaded and own:
        message = "the script has to pass DeepSpeedCPUAdam: the optimizer is offloaded and not configured"
        fix = 'add `optimizer`, or "zero_force_ds_cpu_optimizer": false'
        yield Problem("/zero_optimization", message, fix)


def _is_known(name: str) -> bool:
    return name.lower() in OPTIMIZER_PARAMS or name.lower() in MUP_OPTIMIZERS or name in TORCH_OPTIMIZERS
