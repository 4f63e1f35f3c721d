"""Published measurements, and what the model says of the same runs: the table that every plan carries.

Owns the published rows, the record of the model's predictions for them (`published.json`), and the table. Must not know
how they are predicted: `validation.py` does it, and `simplefsdp plan --validate` shows the result; the tests compare it
with the record.

The rows are from torchtitan's performance report of December 2024 (commit 9dec370): Llama 3.1 8B, FSDP2, local batch 2,
sequence 8192, selective activation checkpointing, bf16, on H100-96GB HBM2e with 500 W, 8 devices per host with NVLink
and 400 Gb/s per device between hosts.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable
from pathlib import Path

from simplefsdp.planner.text import table

RUNS = (
    "Llama 3.1 8B, sequence 8192, local batch 2, selective activation checkpointing, H100-96GB at 500 W; published: "
    'torchtitan, December 2024, FSDP2, "compiled" block by block, memory as the allocator reserves it'
)
_RECORD = Path(__file__).with_name("published.json")


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

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"{self.gpus} devices, {'compiled' if self.compiled else 'eager'}"


ROWS: tuple[PublishedRow, ...] = (
    PublishedRow(8, True, 6667, 77.0, calibrated=True),
    PublishedRow(128, True, 6514, 62.0),
    PublishedRow(8, False, 5762, 82.4),
    PublishedRow(128, False, 5605, 67.0),
)


@dataclasses.dataclass(frozen=True)
class Modelled:
    """What the model says of a published row: tokens per second and device, peak GiB of a device."""

    tokens_per_s: float
    memory_gib: float


@functools.cache
def recorded() -> dict[PublishedRow, Modelled]:
    """The predictions that came with this release."""
    found = json.loads(_RECORD.read_text(encoding="utf-8"))
    return {row: Modelled(**found[row.name]) for row in ROWS}


def record(items: Iterable[tuple[PublishedRow, Modelled]]) -> None:
    """Write the predictions that come with a release."""
    found = {
        row.name: {"tokens_per_s": round(item.tokens_per_s), "memory_gib": round(item.memory_gib, 2)}
        for row, item in items
    }
    _RECORD.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def published_text(items: Iterable[tuple[PublishedRow, Modelled]]) -> str:
    """Published, modelled, and by how much they differ."""
    head = ("run", "tokens/s published", "modelled", "off by", "GiB published", "modelled", "off by", "")
    rows = [
        (
            row.name,
            f"{row.tokens_per_s:,}",
            f"{item.tokens_per_s:,.0f}",
            f"{item.tokens_per_s / row.tokens_per_s - 1:+.1%}",
            f"{row.memory_gib:.1f}",
            f"{item.memory_gib:.1f}",
            f"{item.memory_gib / row.memory_gib - 1:+.1%}",
            "fitted to its tokens/s" if row.calibrated else "",
        )
        for row, item in items
    ]
    return table(head, rows)


def trust_text() -> str:
    """How far to trust a plan: the predictions that came with this release beside published runs."""
    return (
        f"How far to trust this, by published runs ({RUNS}; simplefsdp plan --validate predicts them again):\n"
        f"{published_text(recorded().items())}"
    )
