"""Predictions beside published measurements.

Owns the published rows, what is known of how they were run, and the table. The one constant fitted to them says so in
the profile `h100_96gb.json`.

The rows are from torchtitan's performance report of December 2024 (commit 9dec370): Llama 3.1 8B, FSDP2, local batch 2,
sequence 8192, selective activation checkpointing, bf16, on H100-96GB HBM2e with 500 W, 8 devices per host with NVLink
and 400 Gb/s per device between hosts. What its code of that time says, and the model follows:

* "+ compile" compiles each block by itself; embedding, last norm, head and loss run in eager mode. The loss casts the
  logits to float32, and its gradient holds three such tensors at once: that is when most memory is held.
* Selective checkpointing keeps attention and the first, third, ... product of a block: q, v, gate, down. Eager mode
  keeps the last one although backward does not read it.
* The last block stays gathered after forward.
* Memory is what the caching allocator has reserved, with expandable segments.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, cast

from torch import Tensor

from simplefsdp.explainer.hardware import GIB, find_hardware
from simplefsdp.explainer.target import find_target
from simplefsdp.llama.checkpointing import Contexts, checkpointed, every_second_product_kept
from simplefsdp.llama.model import Block, Llama, RotaryEmbedding
from simplefsdp.planner.build import trace
from simplefsdp.planner.peers import FSDP2_COMPILED, FSDP2_EAGER, compile_blocks, plan_fsdp2
from simplefsdp.planner.predict import Prediction, predict
from simplefsdp.planner.text import table

if TYPE_CHECKING:
    from collections.abc import Iterator

HARDWARE = "h100-96gb"


@dataclasses.dataclass(frozen=True)
class PublishedRow:
    """One published measurement of FSDP2.

    Args:
        gpus: devices.
        compiled: with torch.compile.
        tokens_per_s: per device.
        memory_gib: peak reserved memory of a device.
        calibrated: whether a constant of the profile was fitted to this row.
    """

    gpus: int
    compiled: bool
    tokens_per_s: int
    memory_gib: float
    calibrated: bool = False


ROWS: tuple[PublishedRow, ...] = (
    PublishedRow(8, True, 6667, 77.0, calibrated=True),
    PublishedRow(128, True, 6514, 62.0),
    PublishedRow(8, False, 5762, 82.4),
    PublishedRow(128, False, 5605, 67.0),
)


def validation_text() -> str:
    """The table: published, modelled, and by how much they differ."""
    rows = []
    for row, item in predict_rows():
        assert item.tokens_per_s is not None
        memory = item.memory.total_bytes / GIB
        rows.append(
            (
                f"8B, {row.gpus} devices, {'compiled' if row.compiled else 'eager'}",
                f"{row.tokens_per_s:,}",
                f"{item.tokens_per_s:,.0f}",
                f"{item.tokens_per_s / row.tokens_per_s - 1:+.1%}",
                f"{row.memory_gib:.1f}",
                f"{memory:.1f}",
                f"{memory / row.memory_gib - 1:+.1%}",
                "fitted" if row.calibrated else "",
            )
        )
    head = ("run", "published tokens/s", "modelled", "off by", "published GiB", "modelled", "off by", "")
    profile = find_hardware(HARDWARE).load().name
    return (
        "Llama 3.1 8B, sequence 8192, local batch 2, selective activation checkpointing; published: torchtitan, "
        'December 2024, FSDP2, "compiled" block by block, loss in eager mode, memory as the allocator reserves it; '
        f"modelled: the same, hardware profile {profile}; tokens/s of the first row are fitted, nothing else is"
        f"\n\n{table(head, rows)}"
    )


def predict_rows() -> Iterator[tuple[PublishedRow, Prediction]]:
    """What the model says of each row; rows of as many devices share a trace."""
    hardware = find_hardware(HARDWARE)
    profile = hardware.load()
    traces = {}
    for row in ROWS:
        if row.gpus not in traces:
            target = find_target("8b", seq_len=8192, local_batch=2)
            keep_odd_products(cast(Llama, target.model))
            traces[row.gpus] = trace(target, hardware, gpus=row.gpus, planner="none", eager=True)
        traced = traces[row.gpus]
        forward, backward = traced.eager
        if row.compiled:
            forward, backward = map(compile_blocks, traced.eager, traced.graphs)
        name = FSDP2_COMPILED if row.compiled else FSDP2_EAGER
        graphs = plan_fsdp2(forward, backward, name, keep_last=True)
        prediction = predict(
            graphs,
            profile,
            traced.stored_bytes(row.gpus),
            tokens=target.tokens,
            flops_per_token=target.flops_per_token,
            own_streams=True,
        )
        yield row, prediction


def keep_odd_products(model: Llama) -> None:
    """Checkpoint the blocks of a Llama, in place, as the published runs did."""
    for layer in model.layers:
        layer.__class__ = _PublishedBlock


class _PublishedBlock(Block):
    def forward(self, x: Tensor, rope: RotaryEmbedding) -> Tensor:
        return checkpointed(super().forward, x, rope, _odd_products_kept)


def _odd_products_kept() -> Contexts:
    return every_second_product_kept(1)
