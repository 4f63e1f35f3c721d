"""Small models and traced graphs for the tests of the passes.

`trace` runs a wrapped model through the debug backend on a fake process group, so a test sees the forward and backward
graph of one rank without any communication.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from inductor_passes import PassConfig, aot_eager_backend
from inductor_passes.graph import find_kind, starts
from inductor_passes.report import PassRecord, members_of, schedule_lines
from simplefsdp import MixedPrecisionPolicy, simple_fsdp
from tests.helpers.worlds import fake_process_group

VOCABULARY, DIM, HIDDEN, HEADS, SEQUENCE, BATCH = 128, 64, 128, 4, 16, 2


class Block(nn.Module):
    """A Llama block: attention and a gated MLP, each after an RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.w1, self.w3 = (nn.Linear(DIM, HIDDEN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (w(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(attention.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class ToyLlama(nn.Module):
    """Embedding, blocks, norm and head; 9 weights per block and 3 outside."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).float()


class Mlp(nn.Module):
    """Two residual blocks of three weights; "none", "full" or "selective" activation checkpointing."""

    def __init__(self, mode: str = "none", dim: int = 16) -> None:
        super().__init__()
        self.mode = mode
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.RMSNorm(dim),
                    "up": nn.Linear(dim, 2 * dim, bias=False),
                    "down": nn.Linear(2 * dim, dim, bias=False),
                }
            )
            for _ in range(2)
        )

    def block(self, layer: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
        return x + layer["down"](torch.tanh(layer["up"](layer["norm"](x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.mode == "none":
                x = self.block(layer, x)
            elif self.mode == "full":
                x = checkpoint(self.block, layer, x, use_reentrant=False)
            else:
                x = checkpoint(self.block, layer, x, use_reentrant=False, context_fn=_selective)
        return x


def _selective():
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])


@dataclass
class Traced:
    """The graphs of one forward and backward, and what the passes said about them."""

    backend: Any

    def graph(self, kind: str) -> fx.Graph:
        """The only graph of that kind: "forward", "backward" or "inference"."""
        (graph,) = (gm.graph for name, gm in self.backend.graphs if name == kind)
        return graph

    def lines(self, kind: str) -> list[str]:
        """Schedule lines of one graph."""
        return schedule_lines(self.graph(kind))

    def gathered(self, kind: str) -> list[str]:
        """Parameters gathered in one graph, in order of issue."""
        return members(self.graph(kind), "all_gather")

    def reduced(self, kind: str) -> list[str]:
        """Parameters whose gradient is reduce-scattered in one graph, in order of issue."""
        return members(self.graph(kind), "reduce_scatter")

    def record(self, name: str) -> PassRecord:
        """The only record of one pass."""
        (record,) = (record for record in self.backend.records if record.name == name)
        return record


def members(graph: fx.Graph, kind: str) -> list[str]:
    """Parameters carried by the collectives of one kind, in order of issue."""
    return [name for start in starts(graph) if find_kind(start) == kind for name in members_of(start)]


def saved_gathers(traced: Traced) -> list[fx.Node]:
    """Values saved for backward that are made of parameters and nothing else, found by their ancestors."""
    graph = traced.graph("forward")
    sources: dict[fx.Node, set[fx.Node]] = {}
    gathered: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            sources[node] = {node}
            continue
        sources[node] = set().union(*(sources[parent] for parent in node.all_input_nodes), set())
        if find_kind(node) == "all_gather" or not gathered.isdisjoint(node.all_input_nodes):
            gathered.add(node)
    shards = {p for node in graph.nodes if find_kind(node) == "all_gather" for p in sources[node]}
    results = graph.output_node().args[0]
    return [node for node in results[1:] if node in gathered and sources[node] <= shards]


def trace(
    model: nn.Module, *inputs: torch.Tensor, config: PassConfig | None = None, **options: Any
) -> Traced:
    """Wrap a model for a running fake process group and trace one forward and backward of it.

    Args:
        model: module to wrap; `options` go to `simple_fsdp`.
        inputs: arguments of the model.
        config: options of the passes.
    """
    simple_fsdp(model, **options)
    return trace_wrapped(model, *inputs, config=config)


def trace_wrapped(model: nn.Module, *inputs: torch.Tensor, config: PassConfig | None = None) -> Traced:
    """Trace one forward and backward of a wrapped model."""
    torch._dynamo.reset()
    backend = aot_eager_backend(config)
    torch.compile(model, backend=backend, fullgraph=True)(*inputs).sum().backward()
    return Traced(backend)


def tokens() -> torch.Tensor:
    """One batch for `ToyLlama`."""
    return torch.arange(BATCH * SEQUENCE).view(BATCH, SEQUENCE) % VOCABULARY


@contextmanager
def world(size: int = 64) -> Iterator[None]:
    """Rank 0 of a fake process group."""
    with fake_process_group(0, size):
        yield


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
