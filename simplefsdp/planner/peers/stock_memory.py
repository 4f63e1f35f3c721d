"""What bounds Inductor's overlap scheduling: the collectives it places, its limits, and the memory it expects.

Owns the limits and the account of memory (`OverlapScheduler` in `overlap_scheduling.py`, torch 2.13). Must not know FX
or models, nor how anything is placed.

A gather may start ahead of its use if, now and at every matrix product until then, what the traced order holds there,
what is gathered ahead and the gather itself stay below the peak of the traced order plus an allowance, and what is
gathered ahead below the bytes that may be in flight. Parameters are held throughout and count on neither side.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from inductor_passes.plan import GroupKey
from simplefsdp.explainer.facts import GraphFacts

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Limits:
    """Defaults of the passes.

    Args:
        in_flight_bytes: sent and received by collectives in flight.
        growth_bytes: memory above the peak of the traced order, or `growth_share` of that peak if it is more.
        growth_share: see there.
        distance: matrix products that a gather may start before the one it is for.
        batch_bytes: reductions of one kind that may stand in the queue.
    """

    in_flight_bytes: int = 5 * _GIB
    growth_bytes: int = _GIB
    growth_share: float = 0.05
    distance: int = 200
    batch_bytes: int = _GIB // 2


LIMITS = Limits()


@dataclasses.dataclass(frozen=True)
class Item:
    """Collectives that travel as one before scheduling: one, or a bucket.

    Args:
        members: numbers of the collectives, ascending.
        key: what they have in common.
        time_ns: together.
        alpha_ns: the part of it that does not depend on the size.
        size_bytes: sent and received, of all-reduces once.
        ready: slot where all inputs exist.
        need: of gathers the first use, None for reductions.
        last_uses: of gathers, last region that reads each.
        received_bytes: result of each member.
        after: items whose results it sends on.
    """

    members: tuple[int, ...]
    key: GroupKey
    time_ns: int
    alpha_ns: int
    size_bytes: int
    ready: int
    need: int | None
    last_uses: tuple[int, ...]
    received_bytes: tuple[int, ...]
    after: tuple[int, ...] = ()


class Memory:
    """Bytes held in the traced order, and what prefetching adds to it."""

    def __init__(
        self, facts: GraphFacts, items: Sequence[Item], heavy: Sequence[bool], limits: Limits
    ) -> None:
        self._items, self._limits = items, limits
        self._held = _held_in_order(facts, items)
        peak = max(self._held, default=0)
        self._allowed = peak + max(limits.growth_bytes, int(peak * limits.growth_share))
        # Before each matrix product, the most that was held since the one before.
        self._room: list[int] = []
        most = 0
        for at, is_product in enumerate(heavy):
            most = max(most, self._held[at])
            if is_product:
                self._room.append(min(self._allowed - most, limits.in_flight_bytes))
                most = self._held[at]
        self._ahead: dict[int, int] = {}  # bytes gathered ahead, by the slot of their use
        self._ahead_bytes = 0

    def is_over(self, at: int) -> bool:
        """Whether more is held than allowed."""
        return self._held[min(at, len(self._held) - 1)] + self._ahead_bytes > self._allowed

    def has_room(self, number: int, at: int, product: int, use: int) -> bool:
        """Whether a gather fits now, and at every matrix product until its use."""
        size = self._items[number].size_bytes
        if self._held[at] + self._ahead_bytes + size > self._allowed:
            return False
        return min(self._room[product:use], default=size) >= size

    def prefetched(self, number: int, product: int, use: int) -> None:
        """Note a gather that starts ahead of its use."""
        item = self._items[number]
        assert item.need is not None
        received = sum(item.received_bytes)
        self._ahead[item.need] = self._ahead.get(item.need, 0) + received
        self._ahead_bytes += received
        self._room[product:use] = [room - item.size_bytes for room in self._room[product:use]]

    def reached(self, at: int) -> None:
        """Note that a region comes next: what was gathered ahead of it is in use."""
        self._ahead_bytes -= self._ahead.pop(at, 0)


def _held_in_order(facts: GraphFacts, items: Sequence[Item]) -> list[int]:
    """Bytes held while each region runs in the traced order, parameters left out."""
    end = len(facts.regions)
    change = [0] * (end + 1)

    def hold(first: int, last: int, size: int) -> None:
        change[min(first, end)] += size
        change[min(last + 1, end)] -= size

    for value in facts.values:
        hold(max(value.born, 0), value.dies, value.size_bytes)
    for item in items:
        first = item.ready if item.need is None else item.need
        for last, size in zip(item.last_uses, item.received_bytes, strict=True):
            hold(first, max(first, last), size)
    return list(itertools.accumulate(change[:end]))
