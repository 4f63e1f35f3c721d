"""When gathers may start at the earliest, and the order of buckets that follows from it.

Owns the policies that turn a bucketing into an order; ``place`` does the rest. Must not know how good they
are.

A policy gives every gather bucket a slot before which it does not start, a reduction bucket the slot where it
is ready. Sorting by that slot, gathers before reductions, gives an order that ``place`` can always follow as
far as windows go: whatever stands in front of a bucket could start no later than the bucket itself.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

from inductor_passes.planners.instance import UNBOUNDED, Bucketing, Instance


@dataclasses.dataclass(frozen=True)
class Lead:
    """How far ahead of their use gathers may start.

    Args:
        lead_ns: Most compute time between start and use; ``None`` for any.
        share_per_mille: Part of the memory budget that gathers in flight may fill.
    """

    lead_ns: int | None = None
    share_per_mille: int = 1000


def not_before(instance: Instance, bucketing: Bucketing, lead: Lead) -> list[int]:
    """Earliest slot of each bucket under a lead; list by bucket number."""
    out = list(bucketing.earliest)
    gathers = gathers_by_need(bucketing)
    before = instance.compute_before
    if lead.lead_ns is not None:
        for bucket in gathers:
            since = before[bucketing.wait_slot[bucket]] - lead.lead_ns
            out[bucket] = max(out[bucket], bisect.bisect_left(before, since))
    if instance.budget < UNBOUNDED:
        cap = instance.budget * lead.share_per_mille // 1000
        held = first = 0
        released = 0
        for last, bucket in enumerate(gathers):
            held += bucketing.size_bytes[bucket]
            while held > cap and first <= last:
                released = bucketing.wait_slot[gathers[first]]
                held -= bucketing.size_bytes[gathers[first]]
                first += 1
            out[bucket] = max(out[bucket], released)
    for bucket in gathers:
        out[bucket] = min(out[bucket], bucketing.latest[bucket])
    return out


def one_ahead(bucketing: Bucketing) -> list[int]:
    """Start each gather bucket where the one before it is first used: one bucket of prefetch, as FSDP2
    does."""
    out = list(bucketing.earliest)
    previous: dict[int, int] = {}
    for bucket in gathers_by_need(bucketing):
        group = bucketing.group[bucket]
        slot = max(out[bucket], previous.get(group, 0))
        out[bucket] = min(slot, bucketing.latest[bucket])
        previous[group] = bucketing.wait_slot[bucket]
    return out


def order_by_slot(bucketing: Bucketing, slots: Sequence[int]) -> list[int]:
    """All movable buckets by slot, gathers before reductions, ties by what is needed or ready first."""
    return sorted(
        range(bucketing.movable),
        key=lambda bucket: (
            slots[bucket],
            not bucketing.is_gather[bucket],
            bucketing.wait_slot[bucket] if bucketing.is_gather[bucket] else bucketing.earliest[bucket],
            bucketing.members[bucket][0],
        ),
    )


def gathers_by_need(bucketing: Bucketing) -> list[int]:
    """Movable gather buckets in the order of their first use."""
    gathers = [bucket for bucket in range(bucketing.movable) if bucketing.is_gather[bucket]]
    return sorted(gathers, key=lambda bucket: (bucketing.wait_slot[bucket], bucketing.members[bucket][0]))
