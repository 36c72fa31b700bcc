"""DS5xx: how gradients travel."""

from __future__ import annotations

from collections.abc import Iterator

from ds_toolkit.config.rules.registry import rule
from ds_toolkit.config.subject import Config, is_true, json_pointer
from ds_toolkit.findings import Severity
from ds_toolkit.rules import Problem

_ZERO = "zero_optimization"


@rule("DS501", "sum-where-it-is-refused", Severity.ERROR)
def sum_where_it_is_refused(config: Config) -> Iterator[Problem]:
    """Gradients cannot be summed instead of averaged at stage 3, with ZenFlow or with DeepCompile.

    Bad:
        {"train_batch_size": 8, "gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3}}
    Good:
        {"train_batch_size": 8, "gradient_allreduce_op": "sum", "zero_optimization": {"stage": 2}}
    """
    if str(config.data.get("gradient_allreduce_op")).lower() != "sum":
        return
    obstacles = {
        "stage 3": config.zero_stage == 3,
        "ZenFlow": config.zero.get("zenflow") not in (None, "auto"),
        "DeepCompile": is_true(config.section("compile").get("deepcompile")),
    }
    for obstacle, there in obstacles.items():
        if there:
            message = f"gradients cannot be summed with {obstacle}"
            yield Problem(json_pointer("gradient_allreduce_op"), message, "write mean")
            return


@rule("DS502", "prescale-with-reduce-scatter", Severity.ERROR)
def prescale_with_reduce_scatter(config: Config) -> Iterator[Problem]:
    """Stages 2 and 3 divide gradients after they are reduced; dividing before needs `reduce_scatter` off.

    Bad:
        {"train_batch_size": 8, "prescale_gradients": true, "zero_optimization": {"stage": 2}}
    Bad:
        {"train_batch_size": 8, "gradient_predivide_factor": 2.0, "zero_optimization": {"stage": 3}}
    Good:
        {"train_batch_size": 8, "prescale_gradients": true,
         "zero_optimization": {"stage": 2, "reduce_scatter": false}}
    """
    scattered = config.zero_stage in (2, 3) and is_true(config.zero.get("reduce_scatter", True))
    # A sum is divided by nothing.
    if not scattered or str(config.data.get("gradient_allreduce_op", "mean")).lower() == "sum":
        return
    fix = 'add "reduce_scatter": false, or remove it'
    if config.data.get("prescale_gradients") is True:
        message = f"stage {config.zero_stage} refuses `prescale_gradients` with `reduce_scatter`"
        yield Problem(json_pointer("prescale_gradients"), message, fix)
    if config.data.get("gradient_predivide_factor", 1.0) not in (1.0, "auto"):
        message = f"stage {config.zero_stage} refuses `gradient_predivide_factor` with `reduce_scatter`"
        yield Problem(json_pointer("gradient_predivide_factor"), message, fix)


@rule("DS503", "overlap-of-unmanaged-accumulation", Severity.ERROR)
def overlap_of_unmanaged_accumulation(config: Config) -> Iterator[Problem]:
    """Without managed accumulation reductions may overlap backward at stages 2 and 3 only.

    The engine stops otherwise, and with pipelines and DeepCompile too.

    Bad:
        {"train_batch_size": 8, "managed_gradient_accumulation": false,
         "zero_optimization": {"stage": 1, "overlap_comm": true}}
    Good:
        {"train_batch_size": 8, "managed_gradient_accumulation": false,
         "zero_optimization": {"stage": 2, "overlap_comm": true}}
    """
    if config.data.get("managed_gradient_accumulation") is not False:
        return
    pointer = json_pointer("managed_gradient_accumulation")
    if is_true(config.zero.get("overlap_comm")) and config.zero_stage in (0, 1):
        message = f"stage {config.zero_stage} cannot overlap what the script accumulates itself"
        yield Problem(json_pointer(_ZERO, "overlap_comm"), message, "remove it, or use stage 2")
    elif is_true(config.section("compile").get("deepcompile")):
        yield Problem(pointer, "DeepCompile accumulates gradients itself", "remove it")


@rule("DS504", "key-without-effect", Severity.WARNING)
def key_without_effect(config: Config) -> Iterator[Problem]:
    """DeepSpeed parses a key and does nothing with it.

    `disable_allgather` is never read again; `allgather_size` counts beside the boolean form of
    `zero_optimization` only; `data_parallel_size` counts beside `sequence_parallel_size` only.

    Bad:
        {"train_batch_size": 8, "disable_allgather": true}
    Bad:
        {"train_batch_size": 8, "allgather_size": 500000000, "zero_optimization": {"stage": 1}}
    Good:
        {"train_batch_size": 8, "zero_optimization": {"stage": 1, "allgather_bucket_size": 500000000}}
    """
    old_zero = isinstance(config.data.get(_ZERO), bool)
    without_effect = {
        "disable_allgather": config.data.get("disable_allgather") not in (None, False),
        "allgather_size": "allgather_size" in config.data and not old_zero,
        "data_parallel_size": "data_parallel_size" in config.data
        and "sequence_parallel_size" not in config.data,
    }
    for key, there in without_effect.items():
        if there:
            yield Problem(json_pointer(key), f"DeepSpeed does nothing with `{key}` here", "remove it")


@rule("DS505", "autotp-by-the-wrong-key", Severity.WARNING)
def autotp_by_the_wrong_key(config: Config) -> Iterator[Problem]:
    """`tensor_parallel.tp.tp_size` alone leaves tensor parallelism off; `autotp_size` switches it on.

    Bad:
        {"train_batch_size": 8, "tensor_parallel": {"tp": {"tp_size": 4}}}
    Good:
        {"train_batch_size": 8, "tensor_parallel": {"autotp_size": 4}}
    """
    section = config.section("tensor_parallel")
    group = next((name for name in ("tp", "tensor_parallel") if name in section), None)
    size = config.section("tensor_parallel", group).get("tp_size", 1) if group else 1
    if group and size not in (1, "auto") and not section.get("autotp_size"):
        message = "tensor parallelism stays off: `tp_size` is set by the engine"
        yield Problem(json_pointer("tensor_parallel", group, "tp_size"), message, "write `autotp_size`")
