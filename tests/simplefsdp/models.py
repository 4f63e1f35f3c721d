"""Small models for the front end's tests; functions at the top level so that workers can import them."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    """A residual MLP with a norm: rows that divide no world size evenly."""

    def __init__(self, dim: int = 12, hidden: int = 21) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, blocks, head; tokens (B, S) to logits (B, S, vocabulary)."""

    def __init__(self, layers: int = 3, dim: int = 12, vocabulary: int = 11, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.head = nn.Linear(dim, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_net(**kwargs: object) -> Net:
    """The same weights on every rank."""
    torch.manual_seed(7)
    return Net(**kwargs)  # type: ignore[arg-type]


def batch(step: int, rank: int, vocabulary: int = 11) -> torch.Tensor:
    """Tokens of shape (2, 5) that differ between steps and ranks."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, vocabulary, (2, 5), generator=generator)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Next-token cross entropy."""
    logits = model(tokens).float()
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
