"""A problem compiled for planning, and a bucketing of it: flat lists instead of objects.

Owns what may share a bucket. Must not know when anything starts (``place``) or why a bucketing is good.

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

from inductor_passes.plan import GroupKey, PlanningProblem, Role

UNBOUNDED = 1 << 62
"""Stands for no memory budget, in bytes: more than any machine holds."""


@dataclasses.dataclass(frozen=True)
class KeyList:
    """The movable collectives of one key, in bucketing order, with prefix sums over them.

    ``first_legal[j]`` is the first position a legal run that ends at position ``j`` may begin at. Prefix sums
    have one entry more than ``members``.
    """

    key: GroupKey
    is_gather: bool
    alpha_ns: int
    members: tuple[int, ...]
    first_legal: tuple[int, ...]
    depends_near: tuple[int, ...]
    transfer_sum: tuple[int, ...]
    copy_sum: tuple[int, ...]
    size_sum: tuple[int, ...]
    held_sum: tuple[int, ...]

    def sizes(self) -> list[int]:
        """Bytes of each member."""
        return [after - before for before, after in itertools.pairwise(self.size_sum)]


class Instance:
    """Flat view of a :class:`PlanningProblem`. Built once per problem, shared by all planners.

    Args:
        problem: What is to be planned.
        bucketing: ``False`` makes every run of several illegal.
    """

    def __init__(self, problem: PlanningProblem, *, bucketing: bool = True) -> None:
        self.problem = problem
        self.budget = UNBOUNDED if problem.memory_budget_bytes is None else problem.memory_budget_bytes
        self.region_ns = list(problem.region_ns)
        self.slots = len(self.region_ns) + 1
        self.compute_before = prefix_sums(self.region_ns)
        total = self.compute_before[-1]
        self.compute_after = [total - before for before in self.compute_before]
        items = problem.collectives
        self.fixed = tuple(number for number, item in enumerate(items) if item.role is Role.FIXED)
        self.groups = tuple(dict.fromkeys(item.key.group for item in items))
        group_number = {group: number for number, group in enumerate(self.groups)}
        self.group_of = [group_number[item.key.group] for item in items]
        self.fixed_link_ns = [0] * len(self.groups)
        for number in self.fixed:
            item = items[number]
            self.fixed_link_ns[self.group_of[number]] += problem.alpha_ns[item.key] + item.transfer_ns
        self.ready_bytes = [0] * self.slots
        for item in items:
            if item.role is Role.REDUCE:
                self.ready_bytes[item.earliest_issue] += item.size_bytes
        self.lists = _key_lists(problem, self.budget, bucketing)

    def singles(self) -> Bucketing:
        """Every collective on its own."""
        return Bucketing(self, [[(at, at) for at in range(len(items.members))] for items in self.lists])

    def movable_count(self) -> int:
        """Number of collectives a planner may place."""
        return sum(len(items.members) for items in self.lists)


class Bucketing:
    """Runs chosen in every key list, and per bucket what placing it needs.

    Bucket numbers: the runs list by list, then the fixed collectives. All attributes are lists by bucket
    number.

    Args:
        instance: The compiled problem.
        runs: For each key list its runs as (first, last) positions, in order, covering the list.
    """

    def __init__(self, instance: Instance, runs: Sequence[Sequence[tuple[int, int]]]) -> None:
        problem = instance.problem
        items = problem.collectives
        self.runs = [list(its_runs) for its_runs in runs]
        self.members: list[tuple[int, ...]] = []
        self.is_gather: list[bool] = []
        self.earliest: list[int] = []
        self.latest: list[int] = []
        self.wait_slot: list[int] = []
        self.duration_ns: list[int] = []
        self.copy_in_ns: list[int] = []
        self.copy_out_ns: list[int] = []
        self.size_bytes: list[int] = []
        self.staging_bytes: list[int] = []
        self.group: list[int] = []
        kernel = problem.kernel_ns
        for key_list, its_runs in zip(instance.lists, runs, strict=True):
            for first, last in its_runs:
                numbers = key_list.members[first : last + 1]
                chosen = [items[number] for number in numbers]
                self.members.append(numbers)
                self.is_gather.append(key_list.is_gather)
                self.group.append(instance.group_of[numbers[0]])
                transfer = key_list.transfer_sum[last + 1] - key_list.transfer_sum[first]
                self.duration_ns.append(key_list.alpha_ns + transfer)
                self.size_bytes.append(key_list.size_sum[last + 1] - key_list.size_sum[first])
                if first == last:
                    only = chosen[0]
                    self.earliest.append(only.earliest_issue)
                    self.latest.append(only.latest_issue)
                    self.wait_slot.append(only.latest_wait)
                    self.copy_in_ns.append(0)
                    self.copy_out_ns.append(0)
                    self.staging_bytes.append(0)
                    continue
                self.earliest.append(max([item.earliest_issue for item in chosen]))
                self.latest.append(min([item.latest_issue for item in chosen]))
                self.wait_slot.append(min([item.latest_wait for item in chosen]))
                copy_in = sum([item.copy_in_ns for item in chosen])
                copy_out = sum([item.copy_out_ns for item in chosen])
                self.copy_in_ns.append(copy_in + kernel if copy_in else 0)
                self.copy_out_ns.append(copy_out + kernel if copy_out else 0)
                self.staging_bytes.append(sum([item.staging_bytes for item in chosen]))
        self.movable = len(self.members)
        for number in instance.fixed:
            item = items[number]
            self.members.append((number,))
            self.is_gather.append(False)
            self.group.append(instance.group_of[number])
            self.duration_ns.append(problem.alpha_ns[item.key] + item.transfer_ns)
            self.size_bytes.append(0)
            self.earliest.append(item.earliest_issue)
            self.latest.append(item.latest_issue)
            self.wait_slot.append(item.latest_wait)
            self.copy_in_ns.append(0)
            self.copy_out_ns.append(0)
            self.staging_bytes.append(0)
        self.depends_on = _bucket_dependencies(problem, self.members)
        self.reserved = _Reserve(instance, self)

    def merged_count(self) -> int:
        """Collectives that share a bucket."""
        return sum(len(numbers) for numbers in self.members if len(numbers) > 1)


class _Reserve:
    """Bytes that gradients gathered into buckets will hold whatever else happens, as a range-maximum table.

    A gradient of a bucket whose last member is not ready yet can neither be sent nor dropped. Prefetched
    gathers must leave room for it, or the bucketing deadlocks on memory.
    """

    def __init__(self, instance: Instance, bucketing: Bucketing) -> None:
        items = instance.problem.collectives
        change = [0] * (instance.slots + 1)
        moment: dict[int, int] = {}
        for bucket in range(bucketing.movable):
            numbers = bucketing.members[bucket]
            if bucketing.is_gather[bucket] or len(numbers) == 1:
                continue
            full = bucketing.earliest[bucket]
            for number in numbers:
                change[items[number].earliest_issue] += items[number].size_bytes
                change[full] -= items[number].size_bytes
            whole = bucketing.size_bytes[bucket] + bucketing.staging_bytes[bucket]
            moment[full] = moment.get(full, 0) + whole
        self.rows: list[list[int]] = []
        if instance.budget == UNBOUNDED or not moment:
            return
        row = prefix_sums(change)[1:-1]
        for slot, amount in moment.items():
            row[slot] += amount
        step = 1
        while row:
            self.rows.append(row)
            row = list(map(max, row, row[step:]))
            step *= 2

    def most(self, first: int, last: int) -> int:
        """Largest reserved amount in slots ``first`` to ``last``, both included."""
        if not self.rows:
            return 0
        level = (last - first + 1).bit_length() - 1
        row = self.rows[level]
        return max(row[first], row[last - (1 << level) + 1])


def prefix_sums(values: Sequence[int]) -> list[int]:
    """``[0, v0, v0+v1, ...]``: one entry more than ``values``."""
    out = [0]
    total = 0
    for value in values:
        total += value
        out.append(total)
    return out


def _key_lists(problem: PlanningProblem, budget: int, bucketing: bool) -> tuple[KeyList, ...]:
    by_key: dict[tuple[GroupKey, Role], list[int]] = {}
    for number, item in enumerate(problem.collectives):
        if item.role is not Role.FIXED:
            by_key.setdefault((item.key, item.role), []).append(number)
    items = problem.collectives
    position: dict[int, tuple[int, int]] = {}
    ordered: list[tuple[GroupKey, bool, list[int]]] = []
    for at, ((key, role), found) in enumerate(by_key.items()):
        gather = role is Role.GATHER
        numbers = _in_bucketing_order(problem, found, gather)
        position.update({number: (at, place) for place, number in enumerate(numbers)})
        ordered.append((key, gather, numbers))
    nearest = _nearest_dependency(problem, position)
    return tuple(
        KeyList(
            key,
            gather,
            problem.alpha_ns[key],
            tuple(numbers),
            _first_legal(problem, gather, numbers, nearest, budget)
            if bucketing
            else tuple(range(len(numbers))),
            tuple(nearest[number] for number in numbers),
            tuple(prefix_sums([items[n].transfer_ns for n in numbers])),
            tuple(prefix_sums([items[n].copy_in_ns + items[n].copy_out_ns for n in numbers])),
            tuple(prefix_sums([items[n].size_bytes for n in numbers])),
            tuple(prefix_sums([items[n].size_bytes + items[n].staging_bytes for n in numbers])),
        )
        for key, gather, numbers in ordered
    )


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


def _first_legal(
    problem: PlanningProblem, gather: bool, numbers: list[int], nearest: list[int], budget: int
) -> tuple[int, ...]:
    items = [problem.collectives[number] for number in numbers]
    held = prefix_sums([item.size_bytes + item.staging_bytes for item in items])
    ready: deque[int] = deque()
    due: deque[int] = deque()
    out = []
    first = 0
    for last, item in enumerate(items):
        first = max(first, nearest[numbers[last]] + 1)
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
    return tuple(out)


def _bucket_dependencies(problem: PlanningProblem, members: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    if not any(item.depends_on for item in problem.collectives):
        return [()] * len(members)
    home = {number: bucket for bucket, numbers in enumerate(members) for number in numbers}
    return [
        tuple(
            dict.fromkeys(
                home[other] for number in numbers for other in sorted(problem.collectives[number].depends_on)
            )
        )
        for numbers in members
    ]
