"""``auto`` for problems of any size: priced segmentations, mixtures, then local improvement.

Owns the search. Every candidate is a bucketing, an order and earliest slots, and is judged by ``place``. The
number of placements is fixed by the problem's size, so planning time grows linearly, and equal problems give
equal plans.

1. All alone, under each lead.
2. Priced segmentations, the least busy first.
3. Critical parts: collectives in a busy stretch of their process group that ends in an exposed wait are
priced, the
   others stay alone; the set of critical ones grows from round to round.
4. Mixtures of the best segmentation with others.
5. Moves on the best: at kinds of places, at single places near exposed waits, neighbours in the order.

A segmentation that keeps the stream or a link busy for longer than the best step so far is not placed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from inductor_passes.planners.instance import UNBOUNDED, Bucketing, Instance
from inductor_passes.planners.moves import (
    PRICES_PER_MILLE,
    Segmentation,
    alone,
    blended,
    busy_ns,
    caps_bytes,
    frozen,
    kind_moves,
    priced,
    priced_segmentations,
    promising_mixtures,
    single_moves,
)
from inductor_passes.planners.order import Lead, not_before, order_by_slot
from inductor_passes.planners.place import Placement, place

WORK = 350_000
"""Collectives plus slots placed in one search: about two seconds of Python on one core."""

LEAST_PLACEMENTS, MOST_PLACEMENTS = 100, 1500

SHARES_PER_MILLE = (1000, 500, 700, 350, 250)
"""Parts of the memory budget that gathers may fill when there are reductions too."""

CRITICAL_ROUNDS = 2

MIXTURES = 6
"""How many segmentations are mixed with the best."""

MIXTURE_FACTORS_PER_MILLE = (125, 250, 500, 750, 1000, 1250)
"""Shares tried, as parts of the share that balances stream and links."""


@dataclasses.dataclass(frozen=True)
class Found:
    """A placed candidate. ``slots`` is the earliest slot asked of each bucket."""

    bucketing: Bucketing
    order: tuple[int, ...]
    slots: tuple[int, ...]
    lead: Lead
    placement: Placement

    @property
    def rank(self) -> tuple[int, int, int]:
        """What makes a candidate better: a shorter step, then fewer copies, then less memory."""
        return (self.placement.step_ns, self.bucketing.merged_count(), self.placement.peak_bytes)


class Search:
    """One search over one problem.

    Args:
        instance: The compiled problem.
        stop_at_ns: A lower bound; the search ends when it is met.
        cutoff_ns: Only steps shorter than this are of interest.
        accept: What a candidate must pass, besides being better, to become the best.
        start: A candidate to begin with, placed anew.
    """

    def __init__(
        self,
        instance: Instance,
        stop_at_ns: int,
        cutoff_ns: int | None = None,
        *,
        accept: Callable[[Found], bool] = lambda _: True,
        start: Found | None = None,
    ) -> None:
        self.instance = instance
        self.stop_at_ns = stop_at_ns
        self.cutoff_ns = cutoff_ns
        self.best: Found | None = None
        size = len(instance.problem.collectives) + instance.slots
        self.placements_left = max(LEAST_PLACEMENTS, min(MOST_PLACEMENTS, WORK // size))
        self._known: set[tuple[object, Lead]] = set()
        self._accept = accept
        if start is not None:
            self._place(start.bucketing, start.order, start.slots, start.lead)

    def run(self) -> Found | None:
        """The best candidate found; ``None`` when none is feasible and short enough."""
        for lead in self._leads():
            self._try(alone(self.instance), lead)
        segmentations = priced_segmentations(self.instance)
        for runs in segmentations:
            for lead in self._widest_leads():
                self._try(runs, lead)
        self._price_critical_parts()
        self._mix(segmentations)
        self._improve_lead()
        self._improve(lambda best: kind_moves(self.instance, best.bucketing.runs))
        self._improve(
            lambda best: single_moves(self.instance, best.bucketing.runs, frozenset(critical_members(best)))
        )
        self._improve_lead()
        self._improve_order()
        return self.best

    def _done(self) -> bool:
        met = self.best is not None and self.best.placement.step_ns <= self.stop_at_ns
        return met or self.placements_left <= 0

    def _limit_ns(self) -> int | None:
        return self.cutoff_ns if self.best is None else self.best.placement.step_ns

    def _try(self, runs: Segmentation, lead: Lead) -> Found | None:
        """Place a segmentation; keep it if it is the best. ``None`` when known, infeasible or too slow."""
        known = (frozen(runs), lead)
        limit = self._limit_ns()
        if (
            self._done()
            or known in self._known
            or (limit is not None and max(busy_ns(self.instance, runs)) > limit)
        ):
            return None
        self._known.add(known)
        bucketing = Bucketing(self.instance, runs)
        slots = not_before(self.instance, bucketing, lead)
        return self._place(bucketing, order_by_slot(bucketing, slots), slots, lead)

    def _place(
        self, bucketing: Bucketing, order: Sequence[int], slots: Sequence[int], lead: Lead
    ) -> Found | None:
        self.placements_left -= 1
        placed = place(self.instance, bucketing, order, slots, self._limit_ns())
        if placed is None:
            return None
        found = Found(bucketing, tuple(order), tuple(slots), lead, placed)
        if (self.best is None or found.rank < self.best.rank) and self._accept(found):
            self.best = found
        return found

    def _widest_leads(self) -> list[Lead]:
        """As early as memory allows; with reductions about, also leaving them half of it."""
        return [Lead(share_per_mille=share) for share in self._shares()[:2]]

    def _shares(self) -> tuple[int, ...]:
        kinds = {items.is_gather for items in self.instance.lists}
        return (
            SHARES_PER_MILLE if len(kinds) == 2 and self.instance.budget < UNBOUNDED else SHARES_PER_MILLE[:1]
        )

    def _leads(self) -> list[Lead]:
        """Every share of the budget, and a few leads in multiples of the longest collective."""
        problem = self.instance.problem
        longest = max(
            (problem.alpha_ns[item.key] + item.transfer_ns for item in problem.collectives), default=0
        )
        return [
            *(Lead(share_per_mille=share) for share in self._shares()),
            *(Lead(times * longest) for times in (1, 4, 16)),
        ]

    def _price_critical_parts(self) -> None:
        critical: frozenset[int] = frozenset()
        for _ in range(CRITICAL_ROUNDS):
            if self.best is None or self._done():
                return
            critical |= frozenset(critical_members(self.best))
            for price in PRICES_PER_MILLE[2:]:
                for cap in caps_bytes(self.instance)[1:4]:
                    found = self._try(priced(self.instance, price, cap, critical), self.best.lead)
                    if found is not None and found is not self.best:
                        critical |= frozenset(critical_members(found))

    def _mix(self, segmentations: Sequence[Segmentation]) -> None:
        """Mix others into the best, in all lists at once and list by list, while that helps."""
        every = range(len(self.instance.lists))
        choices = [list(every), *([at] for at in every)] if len(every) > 1 else [list(every)]
        improved = True
        while improved and self.best is not None and not self._done():
            start = self.best
            for lists in choices:
                one = self.best.bucketing.runs
                others = [[its[at] if at in lists else one[at] for at in every] for its in segmentations]
                for mixture in promising_mixtures(self.instance, one, others)[:MIXTURES]:
                    for factor in MIXTURE_FACTORS_PER_MILLE:
                        share = min(999, mixture.share_per_mille * factor // 1000)
                        self._try(blended(one, mixture.other, share), self.best.lead)
            improved = self.best is not start

    def _improve_lead(self) -> None:
        if self.best is not None:
            runs = self.best.bucketing.runs
            for lead in self._leads():
                self._try(runs, lead)

    def _improve(self, moves: Callable[[Found], Iterable[Segmentation]]) -> None:
        """First-improvement local search: sweep over the moves until a sweep changes nothing."""
        improved = True
        while improved and self.best is not None and not self._done():
            start = self.best
            for runs in moves(start):
                if self._done():
                    return
                before = self.best
                self._try(runs, before.lead)
                if self.best is not before:
                    break
            improved = self.best is not start

    def _improve_order(self) -> None:
        """Swap an exposed bucket with the one before it in its group's order, while that helps."""
        improved = True
        while improved and self.best is not None and not self._done():
            improved = False
            best = self.best
            for at in range(1, len(best.order)):
                bucket, before = best.order[at], best.order[at - 1]
                if (
                    not best.placement.exposed_ns[bucket]
                    or best.bucketing.group[bucket] != best.bucketing.group[before]
                ):
                    continue
                order = list(best.order)
                order[at - 1], order[at] = bucket, before
                self._place(best.bucketing, order, best.slots, best.lead)
                if self.best is not best or self._done():
                    improved = True
                    break


def critical_members(found: Found) -> Iterable[int]:
    """Collectives of the busy stretches that end in an exposed wait: their time is on the critical path."""
    placed = found.placement
    out: dict[int, None] = {}
    for bucket, exposed in enumerate(placed.exposed_ns):
        while exposed and bucket >= 0 and found.bucketing.members[bucket][0] not in out:
            out.update(dict.fromkeys(found.bucketing.members[bucket]))
            before = placed.queued_behind[bucket]
            if before < 0 or placed.end_ns[before] < placed.begin_ns[bucket]:
                break
            bucket = before
    return out
