"""A prediction as text.

Owns the words and columns of `simplefsdp plan`. Must not know how predictions are made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from simplefsdp.explainer.hardware import GIB, Hardware
from simplefsdp.planner.predict import MemorySplit, Prediction

TIGHT_SHARE = 0.9
"""Above this share of the device's memory, what is not modelled may not fit: the CUDA context, NCCL's buffers."""


SPEED_HEAD = ("tokens/s/device", "MFU")
"""Above the columns of `speed_cells`."""


def speed_cells(tokens_per_s: float | None, mfu: float | None) -> tuple[str, str]:
    """Speed in a table; a dash where the model has no such notion."""
    return (
        "-" if tokens_per_s is None else f"{tokens_per_s:,.0f}",
        "-" if mfu is None else f"{mfu:.1%}",
    )


def planners_text(predictions: Sequence[Prediction]) -> str:
    """One line per planner.

    Args:
        predictions: of one step, one for each planner.
    """
    head = ("planner", "step ms", "exposed ms", "exposed", "over bound", *SPEED_HEAD, "peak GiB")
    rows = [
        (
            item.planner,
            f"{item.step_ns / 1e6:.1f}",
            f"{item.exposed_ns / 1e6:.1f}",
            f"{item.exposed_ns / item.step_ns:.1%}",
            f"{item.step_ns / item.bound_ns - 1:.1%}",
            *speed_cells(item.tokens_per_s, item.mfu),
            f"{item.memory.total_bytes / GIB:.1f}",
        )
        for item in predictions
    ]
    return table(head, rows)


def best_text(best: Prediction) -> str:
    """Who plans best, and what the step is made of.

    Args:
        best: of the predictions that were shown.
    """
    spent: dict[str, list[int]] = {}
    for run in best.runs:
        timeline = best.timelines[run.graph]
        spent.setdefault(timeline.kind, []).append(timeline.step_ns)
    parts = [
        f"{kind} {sum(times) / 1e6:.1f}" + (f" in {len(times)} pieces" if len(times) > 1 else "")
        for kind, times in spent.items()
    ]
    return f"best: {best.planner}, ms: {' + '.join(parts)} + optimizer {best.optimizer_ns / 1e6:.1f}"


def memory_text(memory: MemorySplit, hardware: Hardware, *, is_own: bool = False) -> str:
    """Where the memory goes, and whether it fits.

    Args:
        memory, hardware: to compare.
        is_own: whether the model is the user's, whose batch and checkpointing are not ours to choose.
    """
    uses = dataclasses.asdict(memory)
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in uses.items())
    lines = [
        f"memory at the peak, GiB: {parts}; together {memory.total_bytes / GIB:.2f}",
        fit_text(memory, hardware, is_own=is_own),
    ]
    return "\n".join(lines)


def fit_word(total_bytes: int, memory_bytes: int | None) -> Literal["yes", "tight", "no", "?"]:
    """Whether so much fits a device, in a word; "?" where its memory is not known."""
    if memory_bytes is None:
        return "?"
    if total_bytes > memory_bytes:
        return "no"
    return "tight" if total_bytes / memory_bytes > TIGHT_SHARE else "yes"


def fit_text(memory: MemorySplit, hardware: Hardware, *, is_own: bool = False) -> str:
    """One line on whether a step fits the device."""
    if hardware.memory_bytes is None:
        return f"does it fit: the memory of {hardware.name} is not known"
    word = fit_word(memory.total_bytes, hardware.memory_bytes)
    share = memory.total_bytes / hardware.memory_bytes
    size = f"{share:.0%} of {hardware.memory_bytes / GIB:.0f} GiB ({hardware.source})"
    if word == "no":
        less = (
            "activation checkpointing or a smaller batch in the model"
            if is_own
            else "--ac full or a smaller --local-batch"
        )
        return f"it does not fit: {size}; more devices, a larger sharding factor, {less}"
    if word == "tight":
        return f"it may not fit: {size}; the CUDA context and NCCL's buffers are not modelled"
    return f"it fits: {size}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = []
    for row in (head, *rows):
        cells = [
            value.ljust(width) if at == 0 else value.rjust(width)
            for at, (value, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
