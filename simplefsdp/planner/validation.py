"""Predictions beside published measurements.

Owns the published rows and the table. The one constant fitted to them says so in the profile `h100_96gb.json`.

The rows are from torchtitan's performance report of December 2024: Llama 3.1 8B, FSDP, local batch 2, sequence 8192,
selective activation checkpointing, bf16, on H100-96GB HBM2e with 500 W, 8 devices per host with NVLink and 400 Gb/s per
device between hosts.
"""

from __future__ import annotations

import dataclasses

from simplefsdp.explainer.hardware import GIB, find_hardware
from simplefsdp.explainer.target import find_target
from simplefsdp.planner.build import trace
from simplefsdp.planner.predict import Prediction, predict
from simplefsdp.planner.text import table

HARDWARE = "h100-96gb"


@dataclasses.dataclass(frozen=True)
class PublishedRow:
    """One published measurement.

    Args:
        gpus: devices.
        compiled: with torch.compile; both of FSDP2.
        planner: whose schedule stands for it: FSDP2 gathers block by block, one ahead.
        tokens_per_s: per device.
        memory_gib: peak reserved memory of a device.
        calibrated: whether a constant of the profile was fitted to this row.
    """

    gpus: int
    compiled: bool
    planner: str
    tokens_per_s: int
    memory_gib: float
    calibrated: bool = False


ROWS: tuple[PublishedRow, ...] = (
    PublishedRow(8, True, "block", 6667, 77.0, calibrated=True),
    PublishedRow(128, True, "block", 6514, 62.0),
    PublishedRow(8, False, "block", 5762, 82.4),
    PublishedRow(128, False, "block", 5605, 67.0),
)


def validation_text() -> str:
    """The table: published, modelled, and by how much they differ."""
    predictions = {gpus: predict_row(gpus) for gpus in dict.fromkeys(row.gpus for row in ROWS)}
    rows = []
    for row in ROWS:
        item = predictions[row.gpus]
        assert item.tokens_per_s is not None
        memory = item.memory.total_bytes / GIB
        note = "fitted" if row.calibrated else ("" if row.compiled else "eager kernels are not modelled")
        rows.append(
            (
                f"8B, {row.gpus} devices, {'compiled' if row.compiled else 'eager'}",
                f"{row.tokens_per_s:,}",
                f"{item.tokens_per_s:,.0f}",
                f"{item.tokens_per_s / row.tokens_per_s - 1:+.1%}",
                f"{row.memory_gib:.1f}",
                f"{memory:.1f}",
                f"{memory / row.memory_gib - 1:+.1%}",
                note,
            )
        )
    head = ("run", "published tokens/s", "modelled", "off by", "published GiB", "modelled", "off by", "")
    profile = find_hardware(HARDWARE).load().name
    return (
        "Llama 3.1 8B, sequence 8192, local batch 2, selective activation checkpointing; published: torchtitan, "
        f"December 2024, FSDP2; modelled: planner block, hardware profile {profile}\n\n{table(head, rows)}"
    )


def predict_row(gpus: int) -> Prediction:
    """What the model says of a row."""
    hardware = find_hardware(HARDWARE)
    target = find_target("8b", seq_len=8192, local_batch=2, checkpointing="selective")
    traced = trace(target, hardware, gpus=gpus, planner="block")
    return predict(
        traced.graphs,
        hardware.load(),
        traced.shard_bytes,
        tokens=target.tokens,
        flops_per_token=target.flops_per_token,
    )
