"""A neighbour of the plain script."""

import deepspeed.ops
import torch
from torch import nn

WIDTH = 7
torch.set_num_threads(1)
# No C++ compiler is wanted for these tests: DeepSpeed asks this table whether it may build.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class PlainModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(inputs))
