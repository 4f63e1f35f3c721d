"""A small stack of equal layers, and what `explain` says of such models on devices that are not there.

Owns the model and the imagined run that tests of plans share. Must not know what is planned.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import simplefsdp
from simplefsdp.explainer.report import Report
from simplefsdp.explainer.wrapping import wrap_options

VOCABULARY = 40
WIDTH = 16


class Layer(nn.Module):
    """A residual layer of two parameters.

    Args:
        activation: between them.
    """

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.activation(self.up(x)))
        return out


class Tower(nn.Module):
    """An embedding, equal layers and a head; tokens (B, S) to logits (B, S, VOCABULARY).

    Args:
        layers: how many.
        activation: of the layers.
        is_checkpointed: whether layers run again in backward instead of keeping their activations.
    """

    def __init__(
        self,
        layers: int,
        *,
        activation: Callable[[Tensor], Tensor] = torch.tanh,
        is_checkpointed: bool = True,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(activation) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.is_checkpointed = is_checkpointed

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)
        out: Tensor = self.head(x)
        return out


def explained(
    make: Callable[[], nn.Module],
    *,
    ranks: int = 16,
    batch: int = 4,
    sequence: int = 32,
    sharding_factor: int | None = None,
    planner: str = "none",
    blocks: tuple[str, ...] = ("layers.*",),
    memory_budget_gb: float | None = 4.0,
    reshard_after_forward: bool = True,
    eager: bool = False,
) -> Report:
    """What `explain` says of a model in bf16 on imagined H100s.

    Args:
        make: builds a model of tokens (batch, sequence).
        ranks, batch, sequence: of the run.
        sharding_factor, planner, blocks, memory_budget_gb, reshard_after_forward: as in `wrap_options`.
        eager: also read what eager mode would run.
    """
    wrap = wrap_options(
        gpus=ranks,
        sharding_factor=sharding_factor,
        precision="bf16",
        planner=planner,
        blocks=blocks,
        memory_budget_gb=memory_budget_gb,
        reshard_after_forward=reshard_after_forward,
        profile="h100_sxm",
    )
    with torch.device("meta"):
        model, tokens = make(), torch.zeros(batch, sequence, dtype=torch.int64)
    return simplefsdp.explain(model, tokens, ranks=ranks, wrap=wrap, eager=eager)
