"""A byte-level transformer of about a million parameters, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256
CONTEXT = 128
WIDTH = 128
LAYERS = 5
HEADS = 4


def shifted(hidden: Tensor) -> Tensor:
    """Half of the channels taken from the byte before: spelling is learned long before attention is."""
    before, own = hidden.chunk(2, dim=-1)
    return torch.cat((functional.pad(before, (0, 0, 1, -1)), own), dim=-1)


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each behind a normalisation and beside a residual."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.feed_forward_norm = nn.LayerNorm(WIDTH)
        self.expand = nn.Linear(WIDTH, 4 * WIDTH)
        self.contract = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        heads = self.qkv(shifted(self.attention_norm(hidden))).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended = attended.transpose(1, 2).reshape(batch, length, WIDTH)
        hidden = hidden + self.dropout(self.projection(attended))
        expanded = functional.gelu(self.expand(shifted(self.feed_forward_norm(hidden))))
        out: Tensor = hidden + self.dropout(self.contract(expanded))
        return out


class TinyLM(nn.Module):
    """Predicts the next byte."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.04)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, length, 256) for tokens (batch, length) of integers below 256."""
        hidden = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits
