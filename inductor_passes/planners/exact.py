"""``auto`` for small problems: every bucketing in every order.

Owns the enumeration. The choice space is the one of ``instance`` (runs of neighbours in each key list) times
every order of the resulting buckets, each placed by the rule of ``place``. With n collectives of one key that
is sum over k of C(n-1, k-1) * k! placements: 12 thousand for n = 7.
"""

from __future__ import annotations

import itertools

from inductor_passes.planners.instance import Bucketing, Instance
from inductor_passes.planners.place import Placement, place
from inductor_passes.planners.segment import all_runs

EXACT_LIMIT = 7
"""Largest number of movable collectives that is enumerated: below a second of Python on one core."""


def enumerate_best(
    instance: Instance, stop_at_ns: int, cutoff_ns: int | None = None
) -> tuple[Bucketing, tuple[int, ...], Placement] | None:
    """The fastest placement over the whole choice space.

    Bucketings with fewer merged collectives come first and only a shorter step replaces a find, so nothing is
    merged or reordered for nothing.

    Args:
        instance: A problem with at most :data:`EXACT_LIMIT` movable collectives.
        stop_at_ns: A lower bound; the search ends when it is met.
        cutoff_ns: Only steps shorter than this are of interest; ``None`` for any.

    Returns:
        Bucketing, order and placement; ``None`` when nothing is feasible or short enough.
    """
    bucketings = [
        Bucketing(instance, runs)
        for runs in itertools.product(*(all_runs(items) for items in instance.lists))
    ]
    bucketings.sort(key=Bucketing.merged_count)
    best: tuple[Bucketing, tuple[int, ...], Placement] | None = None
    best_ns = cutoff_ns
    for bucketing in bucketings:
        for order in itertools.permutations(range(bucketing.movable)):
            limit = None if best_ns is None else best_ns - 1
            placed = place(instance, bucketing, order, cutoff_ns=limit)
            if placed is not None and (best_ns is None or placed.step_ns < best_ns):
                best, best_ns = (bucketing, order, placed), placed.step_ns
                if best_ns <= stop_at_ns:
                    return best
    return best
