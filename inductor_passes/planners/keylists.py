"""What may share a bucket: the movable collectives of each key, in order, and the legal runs among them.

Owns the choice space of bucketings. Must not know when anything starts or why a bucketing is good.

The choice space of bucketings: the movable collectives of one key form a list, gathers in order of their
first use, reductions in order of readiness (ties by number). A bucket is a run of neighbours in such a list.
A run is legal when

* some slot is a legal start for all of its members (latest readiness <= earliest need),
* no member depends, through any chain, on another, and
* it fits the memory budget on its own, its staging copies included.

Every part of a legal run is legal, so one number per position, the first position a run ending there may
begin at, describes all legal runs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Sequence

from inductor_passes.plan import Collective, GroupKey, PlanningProblem, Role


@dataclasses.dataclass(frozen=True)
class KeyList:
    """The movable collectives of one key, in bucketing order.

    ``first_legal[j]`` is the first position a legal run that ends at position ``j`` may begin at,
    ``depends_near[j]`` the last position that ``j`` depends on, -1 for none. Slots are by position. The
    ``*_sum`` are prefix sums, with one entry more than ``members``; ``copy_sum`` is over copies in and out,
    ``held_sum`` over sizes and staging.
    """

    key: GroupKey
    is_gather: bool
    alpha_ns: int
    members: tuple[int, ...]
    first_legal: tuple[int, ...]
    depends_near: tuple[int, ...]
    earliest: tuple[int, ...]
    latest: tuple[int, ...]
    wait_slot: tuple[int, ...]
    transfer_sum: tuple[int, ...]
    copy_in_sum: tuple[int, ...]
    copy_sum: tuple[int, ...]
    size_sum: tuple[int, ...]
    held_sum: tuple[int, ...]

    def sizes(self) -> list[int]:
        """Bytes of each member."""
        return [after - before for before, after in itertools.pairwise(self.size_sum)]


def key_lists(problem: PlanningProblem, budget_bytes: int, *, bucketing: bool = True) -> tuple[KeyList, ...]:
    """Key lists of a problem, by the first appearance of each key.

    Args:
        problem: What is to be planned.
        budget_bytes: Memory budget a run must fit.
        bucketing: ``False`` makes every run of several illegal.
    """
    by_key: dict[tuple[GroupKey, Role], list[int]] = {}
    for number, item in enumerate(problem.collectives):
        if item.role is not Role.FIXED:
            by_key.setdefault((item.key, item.role), []).append(number)
    ordered = [
        (key, role is Role.GATHER, _in_bucketing_order(problem, numbers, role is Role.GATHER))
        for (key, role), numbers in by_key.items()
    ]
    position = {
        number: (at, place) for at, entry in enumerate(ordered) for place, number in enumerate(entry[2])
    }
    nearest = _nearest_dependency(problem, position)
    out = []
    for key, gather, numbers in ordered:
        items = [problem.collectives[number] for number in numbers]
        near = [nearest[number] for number in numbers]
        legal = _first_legal(items, near, gather, budget_bytes) if bucketing else range(len(items))
        out.append(
            KeyList(
                key=key,
                is_gather=gather,
                alpha_ns=problem.alpha_ns[key],
                members=tuple(numbers),
                first_legal=tuple(legal),
                depends_near=tuple(near),
                earliest=tuple(item.earliest_issue for item in items),
                latest=tuple(item.latest_issue for item in items),
                wait_slot=tuple(item.latest_wait for item in items),
                transfer_sum=tuple(prefix_sums([item.transfer_ns for item in items])),
                copy_in_sum=tuple(prefix_sums([item.copy_in_ns for item in items])),
                copy_sum=tuple(prefix_sums([item.copy_in_ns + item.copy_out_ns for item in items])),
                size_sum=tuple(prefix_sums([item.size_bytes for item in items])),
                held_sum=tuple(prefix_sums([item.size_bytes + item.staging_bytes for item in items])),
            )
        )
    return tuple(out)


def prefix_sums(values: Sequence[int]) -> list[int]:
    """``[0, v0, v0+v1, ...]``: one entry more than ``values``."""
    out = [0]
    total = 0
    for value in values:
        total += value
        out.append(total)
    return out


def _in_bucketing_order(problem: PlanningProblem, numbers: list[int], gather: bool) -> list[int]:
    items = problem.collectives
    if gather:
        return sorted(numbers, key=lambda number: (items[number].latest_issue, number))
    return sorted(numbers, key=lambda number: (items[number].earliest_issue, number))


def _nearest_dependency(problem: PlanningProblem, position: dict[int, tuple[int, int]]) -> list[int]:
    """For each collective the last position in its own list that it depends on through any chain; -1 for
    none."""
    reach: list[dict[int, int]] = []
    nearest = []
    for number, item in enumerate(problem.collectives):
        mine: dict[int, int] = {}
        for other in item.depends_on:
            found = dict(reach[other])
            if other in position:
                at, place = position[other]
                found[at] = max(place, found.get(at, -1))
            for at, place in found.items():
                mine[at] = max(place, mine.get(at, -1))
        reach.append(mine)
        nearest.append(mine.get(position[number][0], -1) if number in position else -1)
    return nearest


def _first_legal(items: list[Collective], nearest: list[int], gather: bool, budget: int) -> list[int]:
    held = prefix_sums([item.size_bytes + item.staging_bytes for item in items])
    ready: deque[int] = deque()
    due: deque[int] = deque()
    out = []
    first = 0
    for last, item in enumerate(items):
        first = max(first, nearest[last] + 1)
        while ready and items[ready[-1]].earliest_issue <= item.earliest_issue:
            ready.pop()
        ready.append(last)
        while due and items[due[-1]].latest_issue >= item.latest_issue:
            due.pop()
        due.append(last)
        while first < last:
            while ready[0] < first:
                ready.popleft()
            while due[0] < first:
                due.popleft()
            fits = held[last + 1] - held[first] - (items[first].size_bytes if gather else 0) <= budget
            if fits and items[ready[0]].earliest_issue <= items[due[0]].latest_issue:
                break
            first += 1
        out.append(first)
    return out
