"""Small checkpoints written by DeepSpeed itself, each beside the weights it should hold.

    torchrun --nproc_per_node 2 tests/zoo.py FOLDER

makes FOLDER/<case>/checkpoints (what `engine.save_checkpoint` writes), FOLDER/<case>/truth.pt (every name of
the model's state dict, floating values in fp32, taken from the live engine before saving), FOLDER/<case>/
buffers.pt (the buffers as they are), and FOLDER/<case>/upstream.pt, what DeepSpeed's own zero_to_fp32 makes
of it, where it can read the checkpoint. Some cases have FOLDER/<case>/universal too, what DeepSpeed's
converter to universal checkpoints makes of it.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import nn
from user_settings import Settings

# DeepSpeed would build this C++ extension for the CPU; no compiler is needed without it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

NUM_STEPS = 3
UNIVERSAL = ("stage1-fp32-2ranks", "stage2-bf16-3ranks", "stage3-bf16-2ranks", "stage1-bf16optimizer")
WIDTH = 7
# DeepSpeed's name for torch's format of before 1.6.
OLD_FORMAT = {"checkpoint_serialization": False}
TO_CPU = {"device": "cpu"}


@dataclass(frozen=True)
class Case:
    """One engine: which ZeRO stage, which precision, and what is special about it."""

    name: str
    stage: int
    bf16: bool = False
    zero: tuple[tuple[str, object], ...] = ()
    config: tuple[tuple[str, object], ...] = ()
    exclude_frozen: bool = False
    frozen_tie: bool = False
    odd: bool = False
    seed: int = 1

    def ds_config(self) -> dict[str, object]:
        return {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_optimization": {"stage": self.stage, **dict(self.zero)},
            # Other optimizers for offloading would have to be compiled.
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": self.bf16},
            **dict(self.config),
        }


def cases(world_size: int) -> list[Case]:
    plain = [
        Case(f"stage{stage}-{'bf16' if bf16 else 'fp32'}-{world_size}ranks", stage, bf16)
        for stage in (0, 1, 2, 3)
        for bf16 in (False, True)
        if stage > 0 or world_size == 2
    ]
    if world_size != 2:
        return plain
    # 20 elements a sub-group: each holds one parameter or two, and there are many of them.
    special = [
        Case("stage3-subgroups", 3, zero=(("sub_group_size", 20), ("stage3_param_persistence_threshold", 0))),
        # Here `truth.pt` is wrong: safe_get_full_fp32_param does not know the order of round_robin_gradients.
        Case("stage2-roundrobin", 2, bf16=True, zero=(("round_robin_gradients", True),)),
        Case("stage1-no-frozen", 1, exclude_frozen=True),
        Case("stage2-no-frozen", 2, bf16=True, exclude_frozen=True),
        Case("stage3-no-frozen", 3, exclude_frozen=True),
        Case("stage1-aligned", 1, bf16=True, zero=(("parameter_alignment", True),)),
        Case("stage2-elastic", 2, zero=(("elastic_checkpoint", True),)),
        Case("stage1-offload", 1, bf16=True, zero=(("offload_optimizer", TO_CPU),)),
        Case("stage2-offload", 2, zero=(("offload_optimizer", TO_CPU),)),
        Case("stage3-offload", 3, bf16=True, zero=(("offload_optimizer", TO_CPU), ("offload_param", TO_CPU))),
        Case("stage3-hpz", 3, bf16=True, zero=(("zero_hpz_partition_size", 2),)),
        Case("stage0-odd-fp32", 0, odd=True),
        Case("stage0-odd-bf16", 0, bf16=True, odd=True),
        Case("stage1-odd-bf16", 1, bf16=True, odd=True),
        Case("stage2-odd-fp32", 2, odd=True),
        Case("stage3-odd-bf16", 3, bf16=True, odd=True),
        Case("stage2-oldformat", 2, bf16=True, config=(("checkpoint", OLD_FORMAT),)),
        Case("stage3-oldformat", 3, config=(("checkpoint", OLD_FORMAT),)),
        Case("stage2-no-frozen-tied", 2, bf16=True, exclude_frozen=True, frozen_tie=True),
        Case("stage3-no-frozen-tied", 3, exclude_frozen=True, frozen_tie=True),
        # Another run with the same settings: only its values tell.
        Case("stage1-bf16-otherseed", 1, bf16=True, seed=2),
        Case("stage1-bf16optimizer", 1, bf16=True, config=(("data_types", {"grad_accum_dtype": "fp32"}),)),
    ]
    return plain + special


class Norm(nn.BatchNorm1d):
    """BatchNorm that computes in fp32: under bf16 DeepSpeed converts parameters and leaves buffers alone."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = nn.functional.batch_norm(
            hidden.float(),
            self.running_mean,
            self.running_var,
            self.weight.float(),
            self.bias.float(),
            training=True,
        )
        return out.to(hidden.dtype)


class Model(nn.Module):
    """Odd sizes, tied and frozen weights, an empty one, BatchNorm's buffers, an integer and a boolean one."""

    def __init__(self, *, with_empty: bool, frozen_tie: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, WIDTH)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        if with_empty:
            self.empty = nn.Parameter(torch.zeros(0, 3))
        self.up = nn.Linear(WIDTH, 11)
        self.norm = Norm(11)
        self.frozen = nn.Linear(11, 5)
        self.down = nn.Linear(5, WIDTH)
        self.head = nn.Linear(WIDTH, 13, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.arange(5))
        self.register_buffer("average", torch.randn(3).bfloat16())
        self.register_buffer("mask", torch.tensor([True, False, True]))
        for parameter in self.frozen.parameters():
            parameter.requires_grad = False
        self.embedding.weight.requires_grad = not frozen_tie

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.up(self.embedding(tokens) * self.scale))
        return self.head(self.down(torch.tanh(self.frozen(hidden))))


class OddModel(nn.Module):
    """A convolution, and buffers of any type and order."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2)
        self.head = nn.Linear(4, 13)
        for name, buffer in {
            "doubles": torch.randn(3, dtype=torch.float64),
            "halves": torch.randn(3).half(),
            "number": torch.tensor(7),
            "small": torch.tensor([-3, 4], dtype=torch.int8),
            "flags": torch.tensor([True, False]),
            "wave": torch.randn(2, dtype=torch.complex64),
            "quantized": torch.randn(5).to(torch.float8_e4m3fn),
            "image": torch.randn(1, 2, 3, 3).to(memory_format=torch.channels_last),
            "nothing": torch.zeros(0, 2),
        }.items():
            self.register_buffer(name, buffer)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        pixels = tokens[:, None, None, None].to(self.head.weight.dtype)
        hidden = self.conv(pixels.expand(-1, 3, 2, 2)).flatten(1)
        return self.head(torch.tanh(hidden))


def full_weights(engine: deepspeed.DeepSpeedEngine) -> dict[str, torch.Tensor]:
    """What the checkpoint must give back: fp32 weights, and buffers (floating ones in fp32)."""
    masters = stage0_masters(engine)
    weights = {}
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        owned = parameter.requires_grad and parameter_shape(parameter).numel() > 0
        if parameter in masters:
            full = masters[parameter]
        elif owned and engine.zero_optimization_stage() > 0:
            full = safe_get_full_fp32_param(parameter)
        else:
            with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
                full = parameter.detach()
        weights[name] = full.detach().float().clone().reshape(parameter_shape(parameter))
    for name, buffer in engine.module.named_buffers():
        is_converted = buffer.is_floating_point() and buffer.element_size() > 1
        weights[name] = buffer.float().clone() if is_converted else buffer.clone()
    return weights


def stage0_masters(engine: deepspeed.DeepSpeedEngine) -> dict[torch.Tensor, torch.Tensor]:
    """The fp32 masters that stage 0 in bf16 keeps beside the model."""
    wrapper = engine.optimizer
    if engine.zero_optimization_stage() > 0 or not hasattr(wrapper, "fp32_groups"):
        return {}
    pairs = zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True)
    return {low: full for lows, fulls in pairs for low, full in zip(lows, fulls, strict=True)}


def parameter_shape(parameter: torch.Tensor) -> torch.Size:
    return getattr(parameter, "ds_shape", parameter.shape)


def make(case: Case, folder: Path) -> None:
    torch.manual_seed(case.seed)
    if case.odd:
        model: nn.Module = OddModel()
    else:
        # DeepSpeed cannot gather a parameter of no elements (stage 3), nor broadcast one of no dimensions.
        model = Model(with_empty=case.stage < 3, frozen_tie=case.frozen_tie)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # Not the order of the model, so that nothing can depend on it.
    groups = [
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": 0.1},
    ]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=case.ds_config())
    if case.stage == 0:
        # What lies in another order from the beginning cannot be broadcast.
        engine.module.to(memory_format=torch.channels_last)
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    for _ in range(NUM_STEPS):
        tokens = torch.randint(0, 13, (8,), generator=generator)
        loss = nn.functional.cross_entropy(engine(tokens).float(), tokens)
        engine.backward(loss)
        engine.step()
    weights = full_weights(engine)
    buffers = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    engine.save_checkpoint(
        str(folder / "checkpoints"),
        client_state={"note": "ours", "path": Path("of/a/user"), "settings": Settings(seed=1)},
        exclude_frozen_parameters=case.exclude_frozen,
    )
    if dist.get_rank() == 0:
        torch.save(weights, folder / "truth.pt")
        torch.save(buffers, folder / "buffers.pt")
        if case.stage > 0 and not isinstance(engine.optimizer, BF16_Optimizer) and not case.config:
            upstream = get_fp32_state_dict_from_zero_checkpoint(str(folder / "checkpoints"))
            torch.save(dict(upstream), folder / "upstream.pt")
        if case.name in UNIVERSAL:
            convert(folder)
    engine.destroy()


def convert(folder: Path) -> None:
    tag = f"global_step{NUM_STEPS}"
    (folder / "universal").mkdir()
    ds_to_universal.main(
        SimpleNamespace(
            input_folder=str(folder / "checkpoints" / tag),
            output_folder=str(folder / "universal" / tag),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )


def leave() -> NoReturn:
    """End the process: DeepSpeed's threads may abort an interpreter that shuts down the usual way."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    folder = Path(sys.argv[1])
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for case in cases(dist.get_world_size()):
        if dist.get_rank() == 0:
            (folder / case.name).mkdir(parents=True)
        dist.barrier()
        make(case, folder / case.name)
    dist.barrier()
    dist.destroy_process_group()
    leave()


if __name__ == "__main__":
    main()
