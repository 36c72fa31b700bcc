"""What real engines hold and send on every rank, for the planner's tests: JSON lines on standard output.

Many engines, one after another in one process group. Memory is read from the live tensors of the process: all
of them at every operation, and sorted by whom they belong to; communication is counted where DeepSpeed hands
it to its backend.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import deepspeed
import torch
from deepspeed.comm import comm
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from live_tensors import LiveTensors, Settled, tensors_in
from resilience import training
from torch import nn

# Odd and narrow, so that padding is more than a hundredth of it.
WIDTH = 21
# Not a multiple of the numbers of ranks: shares end inside of parameters.
NUM_BLOCKS = 33
# More elements than a bias has and fewer than a matrix.
THRESHOLD = 100
BUCKET = 1_000
# The module's buffer, Adam's step counters, and with offloading norms of gradients: numbers, not tensors.
FEW_BYTES = 700


class Narrow(nn.Module):
    """Blocks of a matrix and a bias, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS))
        self.register_buffer("offset", torch.zeros(WIDTH))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs + self.offset.to(inputs.dtype)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.float()


def config(case: dict[str, Any]) -> dict[str, object]:
    zero: dict[str, object] = {
        "stage": case["stage"],
        "reduce_bucket_size": BUCKET,
        "allgather_bucket_size": BUCKET,
        "stage3_param_persistence_threshold": THRESHOLD,
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_reuse_distance": case.get("reuse", 10**9),
        "overlap_comm": case.get("overlap", False),
    }
    if case.get("offload"):
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    settings: dict[str, object] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": case["accumulation"],
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": zero,
    }
    if case["precision"] != "fp32":
        settings[case["precision"]] = {"enabled": True}
    return settings


def new_engine(case: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = Narrow()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(case))
    return engine


def micro_steps(engine: Any, count: int) -> Iterator[None]:
    """Forward and backward; gives control to the caller before each `engine.step`."""
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    for _ in range(count):
        loss = engine(torch.randn(1, WIDTH, dtype=dtype)).pow(2).mean()
        engine.backward(loss)
        del loss
        yield
        engine.step()


def owners(engine: Any) -> dict[str, dict[int, int]]:
    """Storages by what they are for; the first owner counts."""
    optimizer = engine.optimizer
    parameters = list(engine.module.parameters())
    inner = getattr(optimizer, "optimizer", optimizer)
    masters = [
        getattr(optimizer, name)
        for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups")
        if hasattr(optimizer, name)
    ]
    gradients = [parameter.grad for parameter in [*parameters, *tensors_in(masters)]]
    gradients += [
        getattr(optimizer, name, None)
        for name in (
            "averaged_gradients",
            "all_grad_tensors",
            "grads_in_partition",
            "grad_partitions_flat_buffer",
            "accumulated_grads_in_cpu",
        )
    ]
    staging = [
        getattr(optimizer, name, None)
        for name in (
            "param_buffer_of_bit16_for_cpu_offload_groups",
            "temp_grad_buffer_for_cpu_offload",
            "temp_grad_buffer_for_gpu_offload",
        )
    ]
    shards = [parameter.ds_tensor for parameter in parameters if hasattr(parameter, "ds_tensor")]
    gathered = [parameter.data for parameter in parameters if not getattr(parameter, "ds_persist", True)]
    whole = [parameter.data for parameter in parameters if getattr(parameter, "ds_persist", True)]
    flats = getattr(optimizer, "bit16_groups_flat", [])
    buckets = [bucket.buffer for bucket in getattr(optimizer, "ipg_buckets", {}).values()]
    groups = {
        # Gradients lie in a bucket before they are reduced.
        "buffers": tensors_in([buckets, gathered, staging]),
        "weights": tensors_in([whole, shards, flats]),
        "gradients": tensors_in(gradients),
        # Moments are as large as their master; the step counter is one number.
        "optimizer": (
            tensor.detach()
            for tensor in tensors_in([masters, list(inner.state.values())])
            if tensor.numel() > 1
        ),
    }
    seen: set[int] = set()
    result = {}
    for name, tensors in groups.items():
        with torch.no_grad():
            found = {
                address: size for address, size in plain_storages(tensors).items() if address not in seen
            }
        seen |= found.keys()
        result[name] = found
    return result


def plain_storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    return {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if tensor.untyped_storage().nbytes()
    }


def held(case: dict[str, Any]) -> dict[str, object]:
    """The most that is held of each kind, and of all tensors together, at any moment of a step.

    And what no kind explains of all tensors: after a step, and between the backward pass and the step.
    """
    live = LiveTensors()
    with live, replaced_backend(Settled):
        engine = new_engine(case)
        for _ in micro_steps(engine, case["accumulation"]):
            pass
        inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
        handles = [
            # Adam's own temporaries are of torch's loop; DeepSpeed's Adams have none.
            inner.register_step_pre_hook(lambda *_: setattr(live, "is_watching", False)),
            inner.register_step_post_hook(lambda *_: setattr(live, "is_watching", True)),
        ]
        unexplained = [unowned_bytes(live, engine)]
        most = kinds(engine)

        def look(*_: object) -> None:
            for name, size in kinds(engine).items():
                most[name] = max(most[name], size)

        # The last parameter to get its gradient: everything of the backward pass is there.
        parameter = next(iter(engine.module.parameters()))
        if case["stage"] < 3:
            handles.append(parameter.register_post_accumulate_grad_hook(look))
        else:
            # Everything that a forward pass gathers is there at its end, unless it was given up.
            handles.append(engine.module.blocks[-1].register_forward_hook(look))
        live.is_watching = True
        for _ in micro_steps(engine, case["accumulation"]):
            look()
            unexplained.append(unowned_bytes(live, engine))
        live.is_watching = False
        for handle in handles:
            handle.remove()
        engine.destroy()
    return {"sizes": sizes(engine), "all": live.most_bytes, "unexplained": unexplained, **most}


def unowned_bytes(live: LiveTensors, engine: Any) -> int:
    owned = sum(kinds(engine).values())
    return live.settled_bytes(owned + FEW_BYTES) - owned


def kinds(engine: Any) -> dict[str, int]:
    return {name: sum(found.values()) for name, found in owners(engine).items()}


def fused(case: dict[str, Any]) -> dict[str, object]:
    """The most that stage 0 holds in a step with DeepSpeed's wrapper for fused optimizers.

    The optimizer in it is torch's: DeepSpeed's own would be compiled first, and has no tensors but its state.
    """
    live = LiveTensors()
    with live:
        model = Narrow().bfloat16()
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer = FP16_Optimizer(inner, low_precision_dtype=torch.bfloat16, clip_grad=1.0)
        inner.register_step_pre_hook(lambda *_: setattr(live, "is_watching", False))
        model(torch.randn(1, WIDTH, dtype=torch.bfloat16)).pow(2).mean().backward()
        live.is_watching = True
        optimizer.step()
    return {"sizes": [parameter.numel() for parameter in model.parameters()], "all": live.most_bytes}


class Counting:
    """A backend that adds up the bytes of every collective: the whole message, not one rank's part of it."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.bytes: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.backend, name)
        if name not in (
            "all_reduce",
            "reduce",
            "reduce_scatter_tensor",
            "all_gather_into_tensor",
            "broadcast",
        ):
            return value

        def counted(*arguments: Any, **keywords: Any) -> Any:
            sizes = [part.nbytes for part in tensors_in([*arguments, *keywords.values()])]
            self.bytes[name] = self.bytes.get(name, 0) + max(sizes)
            return value(*arguments, **keywords)

        return counted


@contextlib.contextmanager
def replaced_backend(around: type[Any]) -> Iterator[Any]:
    backend = comm.cdb
    comm.cdb = around(backend)
    try:
        yield comm.cdb
    finally:
        comm.cdb = backend


def sent(case: dict[str, Any]) -> dict[str, object]:
    """Bytes of one step's collectives by kind, after two steps that DeepSpeed learns from."""
    engine = new_engine(case)
    for _ in range(2):
        for _ in micro_steps(engine, case["accumulation"]):
            pass
    with replaced_backend(Counting) as counted:
        for _ in micro_steps(engine, case["accumulation"]):
            pass
    engine.destroy()
    return {"sizes": sizes(engine), **counted.bytes}


def sizes(engine: Any) -> list[int]:
    return [getattr(parameter, "ds_numel", parameter.numel()) for parameter in engine.module.parameters()]


def main() -> None:
    warnings.filterwarnings("ignore")
    training.start()
    cases = json.loads(sys.argv[1])
    # First engines import what DeepSpeed imports late. What exists then belongs to no engine to come, and
    # scanning it again and again would take most of the time.
    for stage in (2, 3):
        held({"stage": stage, "precision": "fp32", "accumulation": 1})
    gc.collect()
    gc.freeze()
    for case in cases:
        answer = {"held": held, "sent": sent, "fused": fused}[case["question"]](case)
        line = json.dumps({"rank": comm.get_rank(), "case": case, **answer})
        # One write a line: ranks share the output.
        os.write(1, f"\nMEASURED {line}\n".encode())
        gc.collect()
    training.finish()


if __name__ == "__main__":
    main()
