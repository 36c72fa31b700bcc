"""Checkpoints of any size in DeepSpeed's layout, written a rank at a time without an engine.

    python benchmarks/checkpoints.py DIRECTORY SIZE STAGE RANKS

An engine of the same size would need many times the memory. What is written here is what `save_checkpoint` of
DeepSpeed 0.19.8 writes for ZeRO stages 2 and 3 in bf16 with Adam; zero_to_fp32.py reads it.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch

STEP = 100
VOCABULARY = 32_000
# Width and layers of decoder-only models of about so many parameters.
SIZES = {"340M": (1024, 24), "1.5B": (2048, 28), "3B": (2560, 36)}


def parameter_shapes(size: str) -> dict[str, torch.Size]:
    """Name and shape of every parameter of a model, in its order."""
    width, num_layers = SIZES[size]
    shapes = {"embed.weight": (VOCABULARY, width)}
    for layer in range(num_layers):
        prefix = f"layers.{layer}"
        for name in ("q", "k", "v", "o"):
            shapes[f"{prefix}.{name}.weight"] = (width, width)
        shapes[f"{prefix}.up.weight"] = (4 * width, width)
        shapes[f"{prefix}.down.weight"] = (width, 4 * width)
        shapes[f"{prefix}.norm.weight"] = (width,)
    return {name: torch.Size(shape) for name, shape in shapes.items()}


def write(directory: Path, size: str, stage: int, num_ranks: int) -> None:
    """Write a save directory with one tag."""
    shapes = parameter_shapes(size)
    tag = directory / f"global_step{STEP}"
    tag.mkdir(parents=True)
    num_elements = sum(shape.numel() for shape in shapes.values())
    for rank in range(num_ranks):
        if stage == 3:
            num_part = sum(math.ceil(shape.numel() / num_ranks) for shape in shapes.values())
            placeholders = {name: torch.empty(0, dtype=torch.bfloat16) for name in shapes}
            model_name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
            torch.save(_model_states(placeholders, shapes, num_ranks), tag / model_name)
        else:
            num_part = math.ceil(num_elements / (2 * num_ranks)) * 2
            # The last rank's padding is cut off.
            num_part = min(num_part, num_elements - rank * num_part)
        states = _optimizer_states(_some(num_part, seed=rank), stage, num_ranks)
        torch.save(states, tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    if stage != 3:
        # Written last, with the smallest share of the cache: consolidating does not read these weights.
        module = {name: _some(shape.numel(), seed=1).bfloat16().view(shape) for name, shape in shapes.items()}
        torch.save(_model_states(module, shapes, num_ranks), tag / "mp_rank_00_model_states.pt")
    (directory / "latest").write_text(tag.name)


def _some(num_elements: int, seed: int) -> torch.Tensor:
    # Not zeros, which a file system or a copy might treat in a way of its own.
    generator = torch.Generator().manual_seed(seed)
    pattern = torch.randn(2**20, generator=generator)
    return pattern.repeat(math.ceil(num_elements / len(pattern)))[:num_elements]


def _model_states(
    module: dict[str, torch.Tensor], shapes: dict[str, torch.Size], num_ranks: int
) -> dict[str, object]:
    return {
        "module": module,
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [shapes],
        "frozen_param_shapes": {},
        "frozen_param_fragments": {},
        "shared_params": {},
        "lr_scheduler": None,
        "skipped_steps": 0,
        "global_steps": STEP,
        "global_samples": STEP * num_ranks,
        "dp_world_size": num_ranks,
        "mp_world_size": 1,
        "ds_config": {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}},
        "ds_version": "0.19.8",
    }


def _optimizer_states(flat: torch.Tensor, stage: int, num_ranks: int) -> dict[str, object]:
    moments = {"step": torch.tensor(float(STEP)), "exp_avg": flat * 0.1, "exp_avg_sq": flat * flat}
    base = {"state": {0: moments}, "param_groups": [{"lr": 1e-4, "params": [0]}]}
    if stage == 3:
        states: dict[str, object] = {
            "zero_stage": 3,
            "partition_count": num_ranks,
            "optimizer_state_dict": base,
            "fp32_flat_groups": [flat],
        }
    else:
        states = {
            "zero_stage": stage,
            "partition_count": [num_ranks],
            "group_paddings": [0],
            "base_optimizer_state": base,
            "single_partition_of_fp32_groups": [flat],
        }
    return {"optimizer_state_dict": states, "ds_config": {}, "ds_version": "0.19.8"}


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
