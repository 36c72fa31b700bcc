"""Small checkpoints of models that DeepSpeed's AutoTP has split, each beside the model before it was split.

    torchrun --nproc_per_node 4 tests/zoo_tensor_parallel.py FOLDER    (or 3)

makes FOLDER/<case>/checkpoints and FOLDER/<case>/truth.pt. The learning rate is zero: what was split is what
must come out again, rounded to bf16 where the model was trained in bf16.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from torch import nn
from zoo import leave

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

WIDTH = 6
TOKENS = 10


@dataclass(frozen=True)
class Case:
    """One engine: which ZeRO stage, which precision."""

    stage: int
    precision: str
    tp_size: int = 2

    @property
    def name(self) -> str:
        return f"tp{self.tp_size}-stage{self.stage}-{self.precision}"

    def ds_config(self) -> dict[str, object]:
        config: dict[str, object] = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0, "torch_adam": True}},
            "zero_optimization": {"stage": self.stage},
            "bf16": {"enabled": self.precision != "fp32"},
            "tensor_parallel": {"autotp_size": self.tp_size, "partition_config": PARTITION},
        }
        if self.precision == "bf16optimizer":
            config["data_types"] = {"grad_accum_dtype": "fp32"}
        return config


PARTITION = {
    "use_default_specs": False,
    "layer_specs": [
        {
            "patterns": [r".*\.fused\.weight$"],
            "partition_type": "column",
            "shape": [3, -1],
            "partition_dim": 0,
        },
        {"patterns": [r".*\.up\.weight$", r".*\.frozen\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.down\.weight$", r".*\.out\.weight$"], "partition_type": "row"},
    ],
}


# DeepSpeed keeps the first tensor-parallel size of a process, so each needs processes of its own: of four
# ranks two share each part of the model, of three none do.
CASES = {
    4: [
        Case(0, "fp32"),
        Case(1, "bf16"),
        Case(1, "bf16optimizer"),
        Case(2, "fp32"),
        Case(2, "bf16"),
        Case(3, "fp32"),
    ],
    3: [Case(0, "bf16", tp_size=3), Case(1, "fp32", tp_size=3), Case(3, "bf16", tp_size=3)],
}


class Layer(nn.Module):
    """Columns and rows that are split, with and without bias, three sub-parameters in one, a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Linear(WIDTH, 3 * 4)
        self.out = nn.Linear(4, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        # Seven rows for two ranks: four and three; for three: three, two and two.
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH, bias=False)
        self.frozen = nn.Linear(WIDTH, 8)
        self.mix = nn.Linear(8, WIDTH)
        self.frozen.weight.requires_grad = False
        self.frozen.bias.requires_grad = False

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        first, second, third = self.fused(hidden).chunk(3, dim=-1)
        hidden = self.norm(hidden + self.out(first * second + third))
        return hidden + self.down(torch.tanh(self.up(hidden)))


class Model(nn.Module):
    """Two layers between an embedding and a head that share their weight; buffers of two types."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.arange(5))
        self.register_buffer("average", torch.randn(3).bfloat16())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def make(case: Case, folder: Path) -> None:
    torch.manual_seed(1)
    model = Model()
    rounded = case.precision != "fp32"
    weights = {
        name: (value.bfloat16() if rounded else value).float() if value.is_floating_point() else value.clone()
        for name, value in model.state_dict().items()
    }
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trainable, config=case.ds_config())
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, TOKENS, (2, 8), generator=generator)
    loss = nn.functional.cross_entropy(engine(tokens).float().flatten(0, 1), tokens.flatten())
    engine.backward(loss)
    engine.step()
    engine.save_checkpoint(str(folder / "checkpoints"))
    if dist.get_rank() == 0:
        torch.save(weights, folder / "truth.pt")
    engine.destroy()


class MegatronPart(nn.Module):
    """What one of two tensor-parallel ranks has of a model that splits itself, as Megatron's models do."""

    def __init__(self, whole: dict[str, torch.Tensor], rank: int) -> None:
        super().__init__()
        embedding = nn.functional.pad(whole["embedding.weight"], (0, 0, 0, 1))
        self.embedding = holding(embedding.chunk(2)[rank])
        self.column = holding(whole["column.weight"].chunk(2)[rank])
        self.dense = holding(whole["dense.weight"].chunk(2, dim=1)[rank])
        gate, up = whole["swiglu.weight"].chunk(2)
        self.swiglu = holding(torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]]))
        queries, keys, values = whole["qkv.weight"].split([8, 2, 2])
        self.qkv = holding(torch.cat([part.chunk(2)[rank] for part in (queries, keys, values)]))
        self.norm = holding(whole["norm.weight"])
        self.shared = holding(whole["shared.weight"])

    def forward(self) -> torch.Tensor:
        return sum(parameter.square().sum() for parameter in self.parameters())


MEGATRON_SHAPES = {
    "embedding.weight": (11, 6),
    "column.weight": (8, 6),
    "dense.weight": (6, 8),
    "swiglu.weight": (12, 6),
    "qkv.weight": (12, 6),
    "norm.weight": (6,),
    "shared.weight": (6,),
}
MEGATRON_INFO = {
    "universal_checkpoint_version": 0.2,
    "tp_replicated_parameter_patterns": [r"norm\.weight"],
    "parameter_to_average_patterns": [r"shared\.\w+"],
    "parameter_with_row_parallelism_patterns": [r".*dense.weight"],
    "vocabulary_parameter_patterns": ["embedding.weight"],
    "parameter_with_2_sub_params_cat_dim_0": ["swiglu"],
    "parameter_with_sub_params": [
        {"patterns": ["^qkv.weight"], "shape": ((8, 2, 2), 6), "partition_dim": 0},
    ],
    "original_vocab_size": 11,
    "padded_vocab_size": 12,
}


def holding(tensor: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(tensor.clone().contiguous())
    return module


def make_megatron(folder: Path) -> None:
    """Two tags: `told`, with the client's own word on how its tensors are split, and `silent`, without."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(1)
    whole = {name: torch.randn(shape) for name, shape in MEGATRON_SHAPES.items()}
    topology = PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp=2)
    mpu = PipelineParallelGrid(topology=topology)
    model = MegatronPart(whole, mpu.get_slice_parallel_rank())
    config = Case(1, "fp32").ds_config()
    del config["tensor_parallel"]
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config, mpu=mpu
    )
    engine.backward(engine())
    engine.step()
    info = {"universal_checkpoint_info": MEGATRON_INFO}
    engine.save_checkpoint(str(folder / "checkpoints"), tag="silent")
    engine.save_checkpoint(str(folder / "checkpoints"), tag="told", client_state=info)
    if dist.get_rank() == 0:
        torch.save(whole, folder / "truth.pt")
    engine.destroy()


def main() -> None:
    folder = Path(sys.argv[1])
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for case in CASES[dist.get_world_size()]:
        if dist.get_rank() == 0:
            (folder / case.name).mkdir(parents=True)
        dist.barrier()
        make(case, folder / case.name)
    if dist.get_world_size() == 4:
        make_megatron(folder / "megatron")
    dist.barrier()
    dist.destroy_process_group()
    leave()


if __name__ == "__main__":
    main()
