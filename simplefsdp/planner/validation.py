"""Predictions of published runs.

Owns what is known of how they were run, and the model's answer. The one constant fitted to them says so in the profile
`h100_96gb.json`. What torchtitan's code of that time says (see `published.py`), and the model follows:

* "+ compile" compiles each block by itself; embedding, last norm, head and loss run in eager mode. The loss casts the
  logits to float32, and its gradient holds three such tensors at once: that is when most memory is held.
* Selective checkpointing keeps attention and the first, third, ... product of a block: q, v, gate, down. Eager mode
  keeps the last one although backward does not read it.
* The last block stays gathered after forward.
* Memory is what the caching allocator has reserved, with expandable segments.

`python -m simplefsdp.planner.validation` renews the record that plans carry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import Tensor

from simplefsdp.explainer.hardware import GIB, find_hardware
from simplefsdp.explainer.target import find_target
from simplefsdp.llama.checkpointing import Contexts, checkpointed, every_second_product_kept
from simplefsdp.llama.model import Block, Llama, RotaryEmbedding
from simplefsdp.planner.build import trace
from simplefsdp.planner.peers import FSDP2_COMPILED, FSDP2_EAGER, compile_blocks, plan_fsdp2
from simplefsdp.planner.predict import predict
from simplefsdp.planner.published import ROWS, RUNS, Modelled, PublishedRow, published_text, record
from simplefsdp.planner.rescale import World, at_world

if TYPE_CHECKING:
    from collections.abc import Iterator

HARDWARE = "h100-96gb"


def validation_text() -> str:
    """Published, modelled, and by how much they differ, predicted now."""
    profile = find_hardware(HARDWARE).load().name
    return (
        f"{RUNS}; modelled: the same, loss in eager mode, hardware profile {profile}; tokens/s of the first row are "
        f"fitted, nothing else is\n\n{published_text(predict_rows())}"
    )


def predict_rows() -> Iterator[tuple[PublishedRow, Modelled]]:
    """What the model says of each row: one trace, on as many devices as each row has."""
    hardware = find_hardware(HARDWARE)
    profile = hardware.load()
    target = find_target("8b", seq_len=8192, local_batch=2)
    keep_odd_products(cast(Llama, target.model))
    traced_on = World(ROWS[0].gpus, ROWS[0].gpus)
    traced = trace(target, hardware, gpus=traced_on.devices, planner="none", eager=True)
    rows = {name: item.rows for name, item in traced.parameters.items()}
    for row in ROWS:
        world = World(row.gpus, row.gpus)
        eager, compiled = (
            [at_world(facts, profile, traced_on, world, rows) for facts in graphs]
            for graphs in (traced.eager, traced.graphs)
        )
        forward, backward = map(compile_blocks, eager, compiled) if row.compiled else eager
        name = FSDP2_COMPILED if row.compiled else FSDP2_EAGER
        prediction = predict(
            plan_fsdp2(forward, backward, name, keep_last=True),
            profile,
            traced.stored(row.gpus),
            tokens=target.tokens,
            flops_per_token=target.flops_per_token,
            own_streams=True,
        )
        assert prediction.tokens_per_s is not None
        yield row, Modelled(prediction.tokens_per_s, prediction.memory.total_bytes / GIB)


def keep_odd_products(model: Llama) -> None:
    """Checkpoint the blocks of a Llama, in place, as the published runs did."""
    for layer in model.layers:
        layer.__class__ = _PublishedBlock


class _PublishedBlock(Block):
    def forward(self, x: Tensor, rope: RotaryEmbedding) -> Tensor:
        return checkpointed(super().forward, x, rope, _odd_products_kept)


def _odd_products_kept() -> Contexts:
    return every_second_product_kept(1)


if __name__ == "__main__":
    record(predict_rows())
