"""Inductor's overlap scheduling with bucketing of a compiled graph: what the two stock passes decide together.

Owns the options of the passes, the buckets made before they run, and the way to a plan. `stock_order` has the rules by
which starts and waits find their places, `stock_merge` those by which what was placed is merged. All are written from
the code of torch 2.13 (`overlap_scheduling.py`, `overlap_preserving_bucketer.py`, `fsdp.py`, `comm_analysis.py`), with
`enable_overlap_scheduling` and `collective_bucketing` on and everything else as it comes. Must not know FX or models:
facts in, facts with a plan out.

1. Gathers and reduce-scatters that follow one another join buckets of a size at which the network is nearly busy.
2. Compute keeps its order. Whatever it hides starts as soon as a region has time left that no collective in flight
   needs, gathers far ahead, within limits on memory and on bytes in flight; a wait comes where the result is needed,
   for reductions where it costs nothing or at the end.
3. What has so found its place is merged where every collective stays hidden behind the compute that hides it, as far
   as the pass remembers the order of things.

Taken from the simulator, where the passes have models of their own: the times. What the passes see and the facts do not
have: single operators. Here a region is what hides, all of it or nothing; regions depend on those before; light
operators are not moved between regions, nor are copies into buckets; and the distance of two starts in the graph is an
estimate (`stock_merge`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from inductor_passes.plan import Role
from simplefsdp.explainer.facts import GraphFacts
from simplefsdp.planner.peers.stock_memory import LIMITS, Item, Limits
from simplefsdp.planner.peers.stock_merge import merge
from simplefsdp.planner.peers.stock_order import place
from simplefsdp.planner.peers.units import is_all_reduce, plan_of

if TYPE_CHECKING:
    from inductor_passes.costs.profiles import HardwareProfile

STOCK_OVERLAP = "Inductor, overlap scheduling"

_MIB = 2**20
_EFFICIENCY_ODDS = 9
"""Transfer time over latency of a bucket that uses 90 % of the bandwidth."""
_SMALLEST_CAP, _LARGEST_CAP = 10 * _MIB, 500 * _MIB


@dataclasses.dataclass(frozen=True)
class Link:
    """What the passes assume of a connection.

    Args:
        bytes_per_us: bandwidth.
        hop_us: latency of one step of a ring.
        base_us: latency of any collective.
        floor_bytes: the least that a bucket should hold.
    """

    bytes_per_us: int
    hop_us: int
    base_us: int
    floor_bytes: int = 0


NVLINK = {
    "a100": Link(22_000, 45, 10),
    "h100": Link(36_000, 40, 10),
    "h200": Link(36_000, 40, 10),
    "b200": Link(60_000, 30, 10),
}
NETWORK = {
    "a100": Link(11_000, 14, 30, 75 * _MIB),
    "h100": Link(22_000, 12, 30, 100 * _MIB),
    "h200": Link(22_000, 12, 30, 100 * _MIB),
    "b200": Link(22_000, 12, 30, 100 * _MIB),
}
UNKNOWN_DEVICE = "a100"
"""What the passes take a device for that they do not know."""


def bucket_cap(profile: HardwareProfile, ranks: int) -> int:
    """Bytes up to which gathers and reduce-scatters are bucketed before scheduling.

    Args:
        profile: hardware; its name says which generation the passes find.
        ranks: of the group that shards.
    """
    device = next((name for name in NVLINK if profile.name.startswith(name)), UNKNOWN_DEVICE)
    link = (NVLINK if ranks <= profile.value("ranks_per_node") else NETWORK)[device]
    latency_us = link.base_us + (ranks - 1) * link.hop_us
    saturating = _EFFICIENCY_ODDS * latency_us * link.bytes_per_us
    return max(_SMALLEST_CAP, min(_LARGEST_CAP, max(saturating, link.floor_bytes)))


def ranks_of_shards(*graphs: GraphFacts) -> int | None:
    """Size of the group that shards, None if no parameter is gathered."""
    for facts in graphs:
        for item, held in zip(facts.problem.collectives, facts.traffic, strict=True):
            if item.role is Role.GATHER:
                return held.received_bytes // held.sent_bytes
    return None


def plan_stock_overlap(facts: GraphFacts, cap_bytes: int | None, limits: Limits = LIMITS) -> GraphFacts:
    """The schedule of the module docstring.

    Args:
        facts: a compiled graph.
        cap_bytes: `bucket_cap`; None makes no buckets before scheduling, as where no parameter is gathered.
        limits: of the passes.
    """
    items = _items(facts, _buckets_before(facts, cap_bytes))
    merged = merge(facts, items, place(facts, items, limits))
    members = [[number for at in bucket for number in items[at].members] for bucket in merged.buckets]
    events = [(event.slot, event.bucket, event.is_wait) for event in merged.events]
    return dataclasses.replace(facts, plan=plan_of(facts, STOCK_OVERLAP, members, events))


def _buckets_before(facts: GraphFacts, cap_bytes: int | None) -> list[list[int]]:
    """Gathers, and reduce-scatters, that follow one another and have equal keys, until a bucket is full."""
    buckets: list[list[int]] = []
    open_of: dict[str, tuple[list[int], int]] = {}  # by kind, the open bucket and its bytes
    problem = facts.problem
    for number in sorted(
        range(len(problem.collectives)), key=lambda at: (problem.collectives[at].traced_slot, at)
    ):
        item = problem.collectives[number]
        bucket, size = open_of.get(item.key.kind, ([], 0))
        fits = (
            bucket
            and problem.collectives[bucket[0]].key == item.key
            and size + item.size_bytes <= (cap_bytes or 0)
        )
        if cap_bytes is None or is_all_reduce(item) or not fits:
            bucket, size = [], 0
            buckets.append(bucket)
        bucket.append(number)
        open_of[item.key.kind] = bucket, size + item.size_bytes
    return buckets


def _items(facts: GraphFacts, buckets: Sequence[Sequence[int]]) -> list[Item]:
    """The buckets as items, in the order of the code: each where its last member was."""
    collectives, alpha_ns = facts.problem.collectives, facts.problem.alpha_ns

    home = {number: bucket for bucket in buckets for number in bucket}

    def place_of(bucket: Sequence[int]) -> tuple[int, int, int]:
        """Where the last member was, or what its input comes from if that is later."""
        last = max(bucket, key=lambda number: (collectives[number].traced_slot, number))
        place = (collectives[last].traced_slot, last, 0)
        before = [home[other] for number in bucket for other in collectives[number].depends_on]
        return max([place, *((*place_of(other)[:2], last) for other in before)])

    ordered = sorted(buckets, key=place_of)
    number_of = {number: at for at, bucket in enumerate(ordered) for number in bucket}
    items = []
    for bucket in ordered:
        members = [collectives[number] for number in bucket]
        held = [facts.traffic[number] for number in bucket]
        first = members[0]
        moved = sum(item.sent_bytes + item.received_bytes for item in held)
        items.append(
            Item(
                members=tuple(sorted(bucket)),
                key=first.key,
                time_ns=alpha_ns[first.key] + sum(item.transfer_ns for item in members),
                alpha_ns=alpha_ns[first.key],
                size_bytes=moved // 2 if is_all_reduce(first) else moved,
                ready=max(item.earliest_issue for item in members),
                need=min(item.latest_wait for item in members) if first.role is Role.GATHER else None,
                last_uses=tuple(item.last_use for item in held),
                received_bytes=tuple(item.received_bytes for item in held),
                after=tuple(sorted({number_of[other] for item in members for other in item.depends_on})),
            )
        )
    return items
