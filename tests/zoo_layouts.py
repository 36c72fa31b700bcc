"""Small pipelines and mixtures of experts, each checkpoint beside the weights it should hold.

    torchrun --nproc_per_node 4 tests/zoo_layouts.py FOLDER

makes FOLDER/<case>/checkpoints and FOLDER/<case>/truth.pt: every name of the state dict of the whole model,
in its order, with the values of the live engines before saving (floating ones in fp32).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.utils import groups, safe_get_full_fp32_param
from torch import nn
from zoo import Norm, leave, stage0_masters

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

NUM_STEPS = 2
WIDTH = 5
NUM_TOKENS = 11


@dataclass(frozen=True)
class Case:
    """One engine; `num_stages` of a pipeline, or `ep_size` of a mixture of experts."""

    name: str
    zero: int
    bf16: bool = False
    num_stages: int = 0
    ep_size: int = 0
    tied_buffer: bool = True
    config: dict[str, Any] = field(default_factory=dict)

    def ds_config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_optimization": {"stage": self.zero},
            "bf16": {"enabled": self.bf16},
            **self.config,
        }


FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}


def cases(world_size: int) -> list[Case]:
    if world_size == 2:
        return [
            Case("pp2-stage1-bf16-2ranks", 1, bf16=True, num_stages=2),
            Case("pp2-stage0-untold-2ranks", 0, num_stages=2, tied_buffer=False),
            Case("moe-ep2-stage1-bf16-2ranks", 1, bf16=True, ep_size=2),
            Case("moe-ep1-stage2-fp32-2ranks", 2, ep_size=1),
        ]
    return [
        Case("pp2-stage0-fp32-4ranks", 0, num_stages=2),
        Case("pp2-stage0-bf16-4ranks", 0, bf16=True, num_stages=2),
        Case("pp2-stage1-fp32-4ranks", 1, num_stages=2, tied_buffer=False),
        Case("pp4-bf16optimizer-4ranks", 1, bf16=True, num_stages=4, config=FP32_GRADIENTS),
        Case(
            "pp2-parallel-write-4ranks",
            1,
            bf16=True,
            num_stages=2,
            config={"checkpoint": {"parallel_write": {"pipeline_stage": True}}},
        ),
        Case("moe-ep2-stage0-fp32-4ranks", 0, ep_size=2),
        Case("moe-ep2-stage0-bf16-4ranks", 0, bf16=True, ep_size=2),
        Case("moe-ep2-stage1-fp32-4ranks", 1, ep_size=2),
        Case("moe-ep2-stage2-bf16-4ranks", 2, bf16=True, ep_size=2),
        Case("moe-ep2-bf16optimizer-4ranks", 1, bf16=True, ep_size=2, config=FP32_GRADIENTS),
        Case(
            "moe-ep2-datafirst-4ranks",
            2,
            bf16=True,
            ep_size=2,
            config={"use_data_before_expert_parallelism": True},
        ),
    ]


class Embedding(nn.Module):
    """A tied layer: DeepSpeed keeps `weight` equal on all stages, and lets `shift` differ."""

    def __init__(self, *, with_buffer: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(NUM_TOKENS, WIDTH))
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        if with_buffer:
            self.register_buffer("positions", torch.arange(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(tokens, self.weight) + self.shift


def head(embedding: Embedding, hidden: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(hidden + embedding.shift, embedding.weight)


class Frozen(nn.Linear):
    """A layer that nothing in the optimizer names."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        for parameter in self.parameters():
            parameter.requires_grad = False


class PartlyFrozen(nn.Module):
    """A frozen weight beside trained ones, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.bias.requires_grad = False
        self.norm = Norm(WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(hidden))


def unchanged(hidden: torch.Tensor) -> torch.Tensor:
    return hidden


def layers(case: Case) -> list[Any]:
    tied = {"with_buffer": case.tied_buffer}
    return [
        TiedLayerSpec("embedding", Embedding, **tied),
        LayerSpec(nn.Tanh),
        LayerSpec(nn.Linear, WIDTH, WIDTH),
        LayerSpec(Frozen),
        unchanged,
        LayerSpec(PartlyFrozen),
        LayerSpec(nn.Linear, WIDTH, WIDTH, bias=False),
        TiedLayerSpec("embedding", Embedding, forward_fn=head, **tied),
    ]


def loss_of(output: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.float(), tokens)


class Expert(nn.Module):
    """Trained and frozen weights, and a buffer that tells experts apart."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 3)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.down = nn.Linear(3, WIDTH)
        self.register_buffer("number", torch.tensor(-1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(hidden) * self.frozen)


class Mixture(nn.Module):
    """Two layers of experts, which `ep_sizes` ranks share out; frozen and trained weights around them."""

    def __init__(self, ep_sizes: tuple[int, int]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, WIDTH)
        self.block = nn.ModuleDict({"moe": MoE(WIDTH, Expert(), num_experts=4, ep_size=ep_sizes[0])})
        self.between = Frozen()
        self.last = MoE(WIDTH, Expert(), num_experts=2, ep_size=ep_sizes[1], use_residual=True)
        self.head = nn.Linear(WIDTH, NUM_TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, *_ = self.block["moe"](self.embedding(tokens))
        hidden, *_ = self.last(torch.tanh(self.between(hidden)))
        return self.head(hidden)


def full(engine: deepspeed.DeepSpeedEngine, parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's fp32 values; all ranks that share it call this."""
    masters = stage0_masters(engine)
    if parameter in masters:
        value = masters[parameter]
    elif hasattr(parameter, "_hp_mapping"):
        value = safe_get_full_fp32_param(parameter)
    else:
        value = parameter
    return value.detach().float().clone().reshape(parameter.shape)


def own_weights(engine: deepspeed.DeepSpeedEngine) -> dict[str, torch.Tensor]:
    """What this rank has of the model, under the names that it has there."""
    weights = {name: full(engine, value) for name, value in engine.module.named_parameters()}
    for name, buffer in engine.module.named_buffers():
        weights[name] = buffer.float().clone() if buffer.is_floating_point() else buffer.clone()
    return weights


def make_pipeline(case: Case, folder: Path) -> None:
    torch.manual_seed(1)
    names = list(PipelineModule(layers(case), num_stages=1, loss_fn=loss_of).state_dict())
    torch.manual_seed(1)
    model = PipelineModule(
        layers(case), num_stages=case.num_stages, loss_fn=loss_of, partition_method="uniform"
    )
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trainable, config=case.ds_config())
    generator = torch.Generator().manual_seed(model.mpu().get_data_parallel_rank())
    batches = iter([torch.randint(0, NUM_TOKENS, (4,), generator=generator) for _ in range(NUM_STEPS)])
    data = ((tokens, tokens) for tokens in batches)
    for _ in range(NUM_STEPS):
        engine.train_batch(data_iter=data)
    weights = {}
    for part in gathered(own_weights(engine)):
        # Ranks of earlier stages come first, and what they have is what counts.
        weights = {**part, **weights}
    save(engine, folder, {name: weights[name] for name in names})


def make_mixture(case: Case, folder: Path) -> None:
    # Another engine's groups of ranks would be taken over, whatever the configuration says.
    for known in (groups._EXPERT_PARALLEL_GROUP, groups._EXPERT_DATA_PARALLEL_GROUP):
        known.clear()
    torch.manual_seed(1 + dist.get_rank())
    # DeepSpeed 0.19.8 puts groups of experts in the order of a set of strings, which differs from rank to
    # rank: an optimizer that splits several such groups may stand still.
    model = Mixture((case.ep_size, case.ep_size if case.zero else 1))
    parameters = list(model.parameters())
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trainable, config=case.ds_config())
    for layer in (model.block["moe"], model.last):
        for local, expert in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
            expert.number.fill_(first_expert(layer) + local)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(NUM_STEPS):
        tokens = torch.randint(0, NUM_TOKENS, (8,), generator=generator)
        engine.backward(loss_of(engine(tokens), tokens))
        engine.step()
    names = list(engine.module.state_dict())
    renamed = {globally(model, name): value for name, value in own_weights(engine).items()}
    weights = {}
    for part in gathered(renamed):
        weights = {**part, **weights}
    save(engine, folder, {name: weights[name] for name in whole_names(model, names)})


def first_expert(layer: MoE) -> int:
    return groups._get_expert_parallel_rank(layer.expert_group_name) * layer.num_local_experts


def globally(model: Mixture, name: str) -> str:
    before, found, after = name.partition("deepspeed_experts.")
    if not found:
        return name
    layer = model.block["moe"] if before.startswith("block") else model.last
    number, _, rest = after.partition(".")
    return f"{before}{found}{first_expert(layer) + int(number)}.{rest}"


def whole_names(model: Mixture, names: list[str]) -> list[str]:
    """Names of the model as if one rank had all experts."""
    whole: list[str] = []
    for name in names:
        before, found, after = name.partition("deepspeed_experts.")
        if not found:
            whole.append(name)
        elif after.startswith("0."):
            layer = model.block["moe"] if before.startswith("block") else model.last
            rests = [
                other.split("deepspeed_experts.0.")[1] for other in names if f"{before}{found}0." in other
            ]
            numbered = [
                f"{before}{found}{number}.{rest}" for number in range(layer.num_experts) for rest in rests
            ]
            whole += [] if numbered[0] in whole else numbered
    return whole


def gathered(weights: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, weights)
    return parts


def save(engine: deepspeed.DeepSpeedEngine, folder: Path, truth: dict[str, torch.Tensor]) -> None:
    engine.save_checkpoint(str(folder / "checkpoints"))
    if dist.get_rank() == 0:
        torch.save(truth, folder / "truth.pt")
    engine.destroy()


def main() -> None:
    folder = Path(sys.argv[1])
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    # A pipeline's engine leaves its stages behind, for mixtures of experts that come after it.
    for case in sorted(cases(dist.get_world_size()), key=lambda case: case.num_stages):
        if dist.get_rank() == 0:
            (folder / case.name).mkdir(parents=True)
        dist.barrier()
        (make_pipeline if case.num_stages else make_mixture)(case, folder / case.name)
    dist.barrier()
    leave()


if __name__ == "__main__":
    main()
