"""What benchmarks train: one Llama, one batch, one optimizer.

Owns sizes and set-up that every contestant shares. Must not know contestants or time.
"""

from __future__ import annotations

import argparse
import dataclasses

import torch

from simplefsdp.llama.config import LlamaConfig
from simplefsdp.llama.model import Llama

_HEAD_DIM = 64


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is trained, and how long it is timed.

    Args:
        dim, layers, ffn_dim, vocab_size: the Llama.
        batch, sequence: sequences per rank and step, and tokens of each.
        rounds: windows of every contestant.
        steps: optimizer steps per window.
        reshard: free gathered parameters after forward.
        heads: of queries; None makes them 64 wide.
        kv_heads: of keys and values; None is as many as of queries.
    """

    dim: int = 512
    layers: int = 6
    ffn_dim: int = 1536
    vocab_size: int = 2048
    batch: int = 2
    sequence: int = 128
    rounds: int = 7
    steps: int = 2
    reshard: bool = True
    heads: int | None = None
    kv_heads: int | None = None

    def config(self) -> LlamaConfig:
        """The model's shape."""
        heads = self.heads or self.dim // _HEAD_DIM
        return LlamaConfig(
            dim=self.dim,
            n_layers=self.layers,
            n_heads=heads,
            n_kv_heads=self.kv_heads or heads,
            ffn_dim=self.ffn_dim,
            vocab_size=self.vocab_size,
            max_seq_len=self.sequence,
        )

    def model(self) -> Llama:
        """The model, with the same weights every time and on every rank."""
        torch.manual_seed(0)
        return Llama(self.config())

    def tokens(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A rank's batch: token ids and the ids that follow them, each (batch, sequence)."""
        generator = torch.Generator().manual_seed(rank)
        tokens = torch.randint(self.vocab_size, (self.batch, self.sequence + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    @property
    def block_bytes(self) -> int:
        """Bytes of one layer's parameters in fp32."""
        config = self.config()
        more = dataclasses.replace(config, n_layers=config.n_layers + 1)
        return 4 * (more.n_parameters - config.n_parameters)

    def describe(self, precision: str = "fp32") -> list[str]:
        """The model and the step in words, for the record of a result.

        Args:
            precision: of storage and compute.
        """
        mode = "resharded after forward" if self.reshard else "not resharded after forward"
        return [
            f"Llama of {self.config().n_parameters:,} parameters ({self.layers} layers, width {self.dim}), {precision}",
            f"{self.batch} x {self.sequence} tokens per rank and step, fused AdamW, {mode}",
        ]


def add_arguments(
    parser: argparse.ArgumentParser, defaults: Workload | None = None, *, timed: bool = True
) -> None:
    """Give a parser one option for each field of a workload; those about timing where a script times steps."""
    defaults = defaults or Workload()
    for field in dataclasses.fields(Workload):
        if field.name in ("rounds", "steps") and not timed:
            parser.set_defaults(**{field.name: getattr(defaults, field.name)})
            continue
        name, default = f"--{field.name.replace('_', '-')}", getattr(defaults, field.name)
        if isinstance(default, bool):
            parser.add_argument(name, action=argparse.BooleanOptionalAction, default=default)
        else:
            known = "follows from --dim" if default is None else default
            parser.add_argument(name, type=int, default=default, help=f"default {known}")


def from_options(options: argparse.Namespace) -> Workload:
    """The workload that parsed options describe."""
    return Workload(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Workload)})


def optimizer_of(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that every contestant uses."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)
