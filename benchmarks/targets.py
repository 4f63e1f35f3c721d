"""What the compiled path has set out to reach, and whether a run reached it.

Owns the bounds. Must not know how times were measured.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from benchmarks.names import AUTO, COMMUNICATION, COMPUTE, FSDP2, NONE, STOCK

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_BALANCED = (0.75, 1.33)
"""Communication / compute that counts as about 1: within a third of it, either way."""


@dataclasses.dataclass(frozen=True)
class Target:
    """One bound on the time of `auto`.

    Args:
        text: the bound in words.
        bound: largest permitted ratio.
        measured: the ratio, None where it cannot be told.
        reason: why it cannot be told.
    """

    text: str
    bound: float
    measured: float | None
    reason: str = ""

    @property
    def verdict(self) -> str:
        """Met, missed, or why neither."""
        if self.measured is None:
            return self.reason
        return "met" if self.measured <= self.bound else "missed"

    def row(self) -> Sequence[str]:
        """Text, bound, measured and verdict, for a table."""
        measured = "" if self.measured is None else f"{self.measured:.2f}"
        return self.text, f"{self.bound:.2f}", measured, self.verdict


def targets(medians: Mapping[str, float]) -> list[Target]:
    """Judge the medians of one run, in seconds per step by contestant."""
    floor = max(medians[COMPUTE], medians[COMMUNICATION])
    ratio = medians[COMMUNICATION] / medians[COMPUTE]
    stock = {name: medians[name] for name in STOCK if name in medians}
    best = min(stock, key=lambda name: stock[name], default="")
    balanced = _BALANCED[0] <= ratio <= _BALANCED[1]
    return [
        _target(medians, f"{AUTO} / max({COMPUTE}, {COMMUNICATION})", 1.10, floor),
        _target(
            medians,
            f"{AUTO} / {FSDP2}, where communication / compute is about 1",
            0.60,
            medians.get(FSDP2) if balanced else None,
            f"{FSDP2} was not measured"
            if balanced
            else f"does not apply: communication / compute is {ratio:.2f}",
        ),
        _target(
            medians,
            f"{AUTO} / best of the stock passes" + (f" ({best})" if best else ""),
            0.95,
            stock.get(best),
            "no stock pass was measured",
        ),
        _target(medians, f"{AUTO} / {NONE}", 1.00, medians.get(NONE), f"{NONE} was not measured"),
    ]


def _target(
    medians: Mapping[str, float], text: str, bound: float, base: float | None, reason: str = ""
) -> Target:
    if AUTO not in medians:
        return Target(text, bound, None, f"{AUTO} was not measured")
    if base is None:
        return Target(text, bound, None, reason)
    return Target(text, bound, medians[AUTO] / base)
