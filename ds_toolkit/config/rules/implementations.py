"""DS13x: what the class that DeepSpeed picks for an optimizer cannot do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from ds_toolkit.config.rules.registry import rule
from ds_toolkit.config.schema.optimization import ADAM_SWITCHES, IMPLEMENTATIONS
from ds_toolkit.config.schema.param_values import OPTIMIZER_VALUES
from ds_toolkit.config.subject import Config, json_pointer
from ds_toolkit.findings import Severity
from ds_toolkit.rules import Problem

_CLASSES = {
    ("adam", "fused"): "FusedAdam",
    ("adam", "cpu"): "DeepSpeedCPUAdam",
    ("adam", "torch"): "torch's Adam",
    ("adamw", "fused"): "FusedAdam",
    ("adamw", "cpu"): "DeepSpeedCPUAdam",
    ("adamw", "torch"): "torch's AdamW",
    ("adagrad", "torch"): "torch's Adagrad",
    ("adagrad", "cpu"): "DeepSpeedCPUAdagrad",
    ("lion", "fused"): "FusedLion",
    ("lion", "cpu"): "DeepSpeedCPULion",
}
_CHOSEN_BY = {
    "fused": ", used unless `torch_adam` is true or the optimizer is offloaded,",
    "cpu": ", used because the optimizer is offloaded,",
    "torch": ", used because `torch_adam` is true,",
}


@rule("DS130", "param-of-another-implementation", Severity.ERROR)
def param_of_another_implementation(config: Config) -> Iterator[Problem]:
    """A param is known to one implementation of the optimizer and not to the one that DeepSpeed picks.

    Adam and AdamW are FusedAdam, DeepSpeedCPUAdam where the optimizer is offloaded, and torch's where
    `torch_adam` is true; Lion and Adagrad have two implementations. Each takes other arguments, and a
    TypeError stops the engine.

    Bad:
        {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "fused": true}}}
    Bad:
        {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": true,
         "bias_correction": true}}}
    Good:
        {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": true,
         "fused": true}}}
    Good:
        {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4,
         "bias_correction": true}}}
    """
    name, picked = _picked(config)
    if picked is None:
        return
    implementations = IMPLEMENTATIONS[name]
    removed_before = ADAM_SWITCHES if name in ("adam", "adamw") else frozenset()
    for key in config.section("optimizer", "params"):
        others = [other for other, known in implementations.items() if key in known]
        if not others or picked in others or key in removed_before:
            continue
        why = _CHOSEN_BY[picked] if name in ("adam", "adamw") or picked == "cpu" else ""
        message = f"{_CLASSES[name, picked]}{why} takes no `{key}`"
        known_to = " and ".join(_CLASSES[name, other] for other in others)
        torch_adam = others == ["torch"] and name in ("adam", "adamw")
        fix = 'add "torch_adam": true, or remove it' if torch_adam else f"remove it: only {known_to} takes it"
        yield Problem(json_pointer("optimizer", "params", key), message, fix)


@rule("DS131", "amsgrad-refused", Severity.ERROR)
def amsgrad_refused(config: Config) -> Iterator[Problem]:
    """`amsgrad` is on, and DeepSpeed's own Adam and Lamb refuse it when they are made; torch's Adam has it.

    A text counts as true, so that `"false"` is refused as well.

    Bad:
        {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "amsgrad": true}}}
    Bad:
        {"train_batch_size": 8, "optimizer": {"type": "Lamb", "params": {"lr": 1e-4, "amsgrad": true}}}
    Good:
        {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "amsgrad": false}}}
    Good:
        {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "amsgrad": true,
         "torch_adam": true}}}
    """
    name, picked = _picked(config)
    amsgrad = config.section("optimizer", "params").get("amsgrad")
    # Other values than true have a rule of their own.
    if amsgrad not in (True, 1) or not (name == "lamb" or picked in ("fused", "cpu")):
        return
    if name == "adagrad":
        # DeepSpeedCPUAdagrad takes it and does nothing with it; torch's has a rule of its own.
        return
    made = "FusedLamb" if name == "lamb" else _CLASSES[name, str(picked)]
    fix = "remove it" if name == "lamb" else 'remove it, or add "torch_adam": true'
    yield Problem(json_pointer("optimizer", "params", "amsgrad"), f"{made} has no AMSGrad variant", fix)


@rule("DS132", "optimizer-that-cannot-step", Severity.ERROR)
def optimizer_that_cannot_step(config: Config) -> Iterator[Problem]:
    """The engine steps an optimizer without a closure, and LBFGS stops at the first step without one.

    SparseAdam stops at the first gradient that is not sparse, and nearly every model has some.

    Bad:
        {"train_batch_size": 8, "optimizer": {"type": "LBFGS", "params": {"lr": 0.1}}}
    Good:
        {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    """
    pointer, name = json_pointer("optimizer", "type"), config.section("optimizer").get("type")
    if name == "LBFGS":
        message = "LBFGS needs a closure, and the engine gives none: the first step fails"
        yield Problem(pointer, message, "use another optimizer, such as AdamW")
    elif name == "SparseAdam":
        message = "SparseAdam stops at the first gradient that is not sparse"
        yield Problem(pointer, message, "use AdamW", severity=Severity.WARNING)


@rule("DS133", "zero-beta", Severity.ERROR)
def zero_beta(config: Config) -> Iterator[Problem]:
    """torch's Adam refuses a beta of 0 that comes from a file, however it is written.

    It wants both betas with a decimal point, and DeepSpeed's reader makes 0 of `0.0`: a ValueError, `betas
    must be either both floats or both Tensors`. The Trainer, Accelerate and Lightning keep the point.

    Bad:
        {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": true,
         "betas": [0.0, 0.999]}}}
    Good:
        {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": true,
         "betas": [1e-9, 0.999]}}}
    Good:
        {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0, 0.999]}}}
    """
    betas = config.section("optimizer", "params").get("betas")
    name, picked = _picked(config)
    # Betas that are wrong in another way have a rule of their own.
    if picked != "torch" or name not in ("adam", "adamw") or not OPTIMIZER_VALUES["betas"].takes(betas):
        return
    pointer = json_pointer("optimizer", "params", "betas")
    whole = [at for at, beta in enumerate(cast("list[float]", betas)) if isinstance(beta, int)]
    message, fix = "torch's Adam refuses a beta of 0, and a file cannot say 0.0", "write 1e-9 for it"
    if config.consumer.reads_json_only:
        message, fix = "torch's Adam refuses a beta of 0 without a decimal point", "write 0.0"
        document = config.document
        whole = [at for at in whole if document is None or document.float_in_json(f"{pointer}/{at}") is None]
    if whole:
        yield Problem(pointer, message, f"{fix}, or leave `torch_adam` out")


@rule("DS134", "nesterov-without-momentum", Severity.ERROR)
def nesterov_without_momentum(config: Config) -> Iterator[Problem]:
    """SGD refuses `nesterov` unless `momentum` is above zero and `dampening` is zero; both default to zero.

    Bad:
        {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1, "nesterov": true}}}
    Good:
        {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1, "nesterov": true,
         "momentum": 0.9}}}
    """
    params = config.section("optimizer", "params")
    if config.section("optimizer").get("type") != "SGD" or params.get("nesterov") not in (True, 1):
        return
    pointer = json_pointer("optimizer", "params", "nesterov")
    if params.get("momentum", 0) == 0:
        yield Problem(pointer, "SGD refuses `nesterov` without `momentum`", 'add "momentum": 0.9')
    elif params.get("dampening", 0) not in (0, "auto"):
        yield Problem(pointer, "SGD refuses `nesterov` with `dampening`", "remove `dampening`")


@rule("DS135", "partial-offload-of-another-optimizer", Severity.ERROR)
def partial_offload_of_another_optimizer(config: Config) -> Iterator[Problem]:
    """`offload_optimizer.ratio` below 1 goes with DeepSpeedCPUAdam alone: with Adam or AdamW, not torch's.

    Stage 3 stops with `Hybrid Optimizer Only Supports DeepSpeedCPUAdam`.

    Bad:
        {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": true}},
         "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}
    Bad:
        {"train_batch_size": 8, "zero_allow_untested_optimizer": true,
         "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
         "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}
    Good:
        {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
         "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}
    """
    ratio = config.section("zero_optimization", "offload_optimizer").get("ratio", 1)
    partial = isinstance(ratio, int | float) and 0 <= ratio < 1
    offloaded = config.zero_stage == 3 and config.offload_device("offload_optimizer") != "none"
    name, picked = _picked(config)
    if partial and offloaded and name and (name not in ("adam", "adamw") or picked != "cpu"):
        pointer = json_pointer("zero_optimization", "offload_optimizer", "ratio")
        fix = "remove `torch_adam`, or `ratio`" if picked == "torch" else "use AdamW, or remove it"
        yield Problem(pointer, "only DeepSpeedCPUAdam can be offloaded in part", fix)


def _picked(config: Config) -> tuple[str, str | None]:
    """The name in lower case, and the implementation that DeepSpeed picks where it has a choice."""
    optimizer, params = config.section("optimizer"), config.section("optimizer", "params")
    name = optimizer.get("type")
    name = name.lower() if isinstance(name, str) else ""
    if name not in IMPLEMENTATIONS:
        return name, None
    if name in ("adam", "adamw") and params.get("torch_adam"):
        return name, "torch"
    # The engine does not ask for the stage here.
    if config.offload_device("offload_optimizer") != "none":
        return name, "cpu"
    return name, "torch" if name == "adagrad" else "fused"
