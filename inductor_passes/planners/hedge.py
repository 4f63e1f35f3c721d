"""Second thoughts of ``auto``: among plans about as fast as the fastest, the one that forgives a wrong model.

Owns the choice between near-equal plans. Where communication sets the pace the model is indifferent: one gather of
everything and then all compute keeps the link as busy as many small gathers just in time. On a machine where compute
takes longer than modelled (communication takes cores, SMs or memory bandwidth from it) the first plan is far behind:
compute began late, and what it produces last is sent last. So the plans are judged once more in a world whose compute
takes ``SLOWDOWN`` times as long, and at least as long as communication, where each must hide behind the other all the
time. Those compete that as modelled are within ``GOOD_ENOUGH_PER_MILLE`` of the lower bound, or within
``GIVEN_UP_PER_MILLE`` of the fastest: no hardware profile is more accurate than that.
"""

from __future__ import annotations

import dataclasses

from inductor_passes.planners.bound import lower_bound
from inductor_passes.planners.instance import UNBOUNDED, Instance
from inductor_passes.planners.place import Placement, place
from inductor_passes.planners.search import Found, Search

SLOWDOWN = 2
"""How many times longer compute takes in the other world, at least."""

GOOD_ENOUGH_PER_MILLE = 20
"""How far above the lower bound any plan may compete."""

GIVEN_UP_PER_MILLE = 5
"""How much slower than the fastest any plan may be."""


def hedge(
    instance: Instance, found: Found | None, bound_ns: int, cutoff_ns: int
) -> tuple[Found, Instance, int] | None:
    """The most forgiving of the plans about as fast as the one found.

    Args:
        instance: The compiled problem.
        found: The fastest placement known, if any takes less than the cutoff.
        bound_ns: The lower bound of the problem.
        cutoff_ns: What a plan must take less than to be returned, as modelled, unless it is close to the bound.

    Returns:
        ``found`` or another one, placed in the world as modelled; the other world, and a step to keep there. ``None``
        when no plan is good enough.
    """
    limit_ns = bound_ns * (1000 + GOOD_ENOUGH_PER_MILLE) // 1000
    if found is not None:
        near_fastest = found.placement.step_ns * (1000 + GIVEN_UP_PER_MILLE) // 1000
        limit_ns = max(limit_ns, min(near_fastest, cutoff_ns - 1))
    slow = _slowed(instance, bound_ns)

    def as_modelled(other: Found) -> Placement | None:
        placed = place(instance, other.bucketing, other.order, other.slots, limit_ns)
        return placed if placed is not None and placed.step_ns <= limit_ns else None

    search = Search(
        slow, lower_bound(slow).time_ns, accept=lambda other: as_modelled(other) is not None, start=found
    )
    best = search.run()
    placed = None if best is None else as_modelled(best)
    if best is None or placed is None:
        return None if found is None else (found, slow, UNBOUNDED)
    return dataclasses.replace(best, placement=placed), slow, best.placement.step_ns


def _slowed(instance: Instance, bound_ns: int) -> Instance:
    compute = max(1, instance.compute_before[-1])
    longest = max(SLOWDOWN * compute, bound_ns)
    region_ns = tuple(duration * longest // compute for duration in instance.region_ns)
    return Instance(dataclasses.replace(instance.problem, region_ns=region_ns), bucketing=instance.bucketing)
