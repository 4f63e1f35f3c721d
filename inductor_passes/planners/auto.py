"""``auto``: the best of the simple planners and a search, with no more prefetch than it needs.

Owns the choice between candidates and the trimming. Small problems are enumerated, larger ones searched and
hedged; either way ``none``, ``block`` and ``greedy`` compete, so as modelled ``auto`` is worse than one of them only
where ``hedge`` prefers another plan within 2 % of the lower bound.

Trimming: starting as early as possible fills the whole memory budget for nothing. The shortest lead that
keeps the step is found by bisection, and twice that lead is used: communication may take twice as long as
modelled before it shows.
"""

from __future__ import annotations

from collections.abc import Sequence

from inductor_passes.plan import LowerBound
from inductor_passes.planners.exact import EXACT_LIMIT, enumerate_best
from inductor_passes.planners.hedge import hedge
from inductor_passes.planners.instance import Bucketing, Instance
from inductor_passes.planners.order import Lead, not_before, order_by_slot
from inductor_passes.planners.place import Placement, place
from inductor_passes.planners.search import Search
from inductor_passes.planners.simple import Decision

LEAD_PRECISION = 16
"""The shortest lead is found to one part in this many."""


def decide_auto(instance: Instance, bound: LowerBound, best_simple_ns: int) -> Decision | None:
    """The best placement found, or ``None`` when it is not better than ``best_simple_ns``.

    Args:
        instance: The compiled problem.
        bound: Its lower bound; the search stops there.
        best_simple_ns: Step of the best simple planner.
    """
    if instance.movable_count() <= EXACT_LIMIT:
        exact = enumerate_best(instance, bound.time_ns, best_simple_ns)
        if exact is None:
            return None
        bucketing, order, placed = exact
        return Decision(
            bucketing.members, _trimmed(instance, bucketing, order, bucketing.earliest, placed, ()).events
        )
    fastest = Search(instance, bound.time_ns, best_simple_ns).run()
    if fastest is not None and fastest.placement.step_ns >= best_simple_ns:
        fastest = None
    hedged = hedge(instance, fastest, bound.time_ns, best_simple_ns)
    if hedged is None:
        return None
    found, slow, slow_ns = hedged
    trimmed = _trimmed(
        instance, found.bucketing, found.order, found.slots, found.placement, ((slow, slow_ns),)
    )
    return Decision(found.bucketing.members, trimmed.events)


def _trimmed(
    instance: Instance,
    bucketing: Bucketing,
    order: Sequence[int],
    slots: Sequence[int],
    placed: Placement,
    other_worlds: Sequence[tuple[Instance, int]],
) -> Placement:
    """The same buckets, gathers no earlier than twice the lead that keeps the step.

    Args:
        instance: The compiled problem.
        bucketing: What travels together.
        order: The order found.
        slots: The earliest slots found.
        placed: The placement found.
        other_worlds: Other durations of the same problem, and the step to keep in each.
    """

    def keeps(order: Sequence[int], slots: Sequence[int]) -> Placement | None:
        again = place(instance, bucketing, order, slots, placed.step_ns)
        if again is None or again.step_ns > placed.step_ns:
            return None
        for world, step_ns in other_worlds:
            there = place(world, bucketing, order, slots, step_ns)
            if there is None or there.step_ns > step_ns:
                return None
        return again

    def with_lead(lead_ns: int) -> Placement | None:
        later = not_before(instance, bucketing, Lead(lead_ns))
        later = [max(slot, other) for slot, other in zip(slots, later, strict=True)]
        return keeps(order_by_slot(bucketing, later), later) or keeps(order, later)

    shortest, longest = 0, instance.compute_before[-1]
    while longest - shortest > longest // LEAD_PRECISION:
        middle = longest // 2 if shortest == 0 else (shortest + longest) // 2
        if with_lead(middle) is not None:
            longest = middle
        else:
            shortest = middle + 1
    shortest = longest
    for lead_ns in (2 * shortest, shortest):
        trimmed = with_lead(lead_ns)
        if trimmed is not None and trimmed.peak_bytes <= placed.peak_bytes:
            return trimmed
    return placed
