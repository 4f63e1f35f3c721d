"""Whose turn it is, and why somebody is not among those who take turns.

Owns the order of contestants in a round, and the words for those who dropped out. Must not know what they do.
"""

from __future__ import annotations

from collections.abc import Sequence


def in_turn(names: Sequence[str], turn: int) -> list[str]:
    """Contestants in the order of a round: each round begins with the one after the one that began the last."""
    first = turn % len(names)
    return [*names[first:], *names[:first]]


def reason_of(error: Exception) -> str:
    """Why a contestant failed, in a line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def not_reached(limit_s: float) -> str:
    """Why a contestant was not set up when the time for that had passed."""
    return f"not set up: the limit of {limit_s:.0f} s had passed"
