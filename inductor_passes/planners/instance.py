"""A problem compiled for planning, and a bucketing of it: flat lists instead of objects.

Owns the form in which planners see a problem. Must not know what a good bucketing is.
"""

from __future__ import annotations

from collections.abc import Sequence

from inductor_passes.plan import PlanningProblem, Role
from inductor_passes.planners.keylists import KeyList, key_lists, prefix_sums

UNBOUNDED = 1 << 62
"""Stands for no memory budget, in bytes: more than any machine holds."""


class Instance:
    """Flat view of a :class:`PlanningProblem`. Built once per problem, shared by all planners.

    Args:
        problem: What is to be planned.
        bucketing: ``False`` makes every run of several illegal.
    """

    def __init__(self, problem: PlanningProblem, *, bucketing: bool = True) -> None:
        self.problem = problem
        self.bucketing = bucketing
        self.budget = UNBOUNDED if problem.memory_budget_bytes is None else problem.memory_budget_bytes
        self.region_ns = list(problem.region_ns)
        self.slots = len(self.region_ns) + 1
        self.compute_before = prefix_sums(self.region_ns)
        total = self.compute_before[-1]
        self.compute_after = [total - before for before in self.compute_before]
        items = problem.collectives
        self.needs = [item.latest_issue for item in items]
        self.sizes = [item.size_bytes for item in items]
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
        self.lists = key_lists(problem, self.budget, bucketing=bucketing)

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
        for key_list, its_runs in zip(instance.lists, runs, strict=True):
            group = instance.group_of[key_list.members[0]]
            for first, last in its_runs:
                self._add_run(key_list, group, first, last, problem.kernel_ns)
        self.movable = len(self.members)
        for number in instance.fixed:
            item = problem.collectives[number]
            self.members.append((number,))
            self.is_gather.append(False)
            self.group.append(instance.group_of[number])
            self.duration_ns.append(problem.alpha_ns[item.key] + item.transfer_ns)
            self.size_bytes.append(0)
            self._add_window(item.earliest_issue, item.latest_issue, item.latest_wait)
            self._add_copies(0, 0, 0)
        self.depends_on = _bucket_dependencies(problem, self.members)
        self.reserved = _Reserve(instance, self)

    def _add_run(self, items: KeyList, group: int, first: int, last: int, kernel_ns: int) -> None:
        end = last + 1
        self.members.append(items.members[first:end])
        self.is_gather.append(items.is_gather)
        self.group.append(group)
        self.duration_ns.append(items.alpha_ns + items.transfer_sum[end] - items.transfer_sum[first])
        size = items.size_sum[end] - items.size_sum[first]
        self.size_bytes.append(size)
        if first == last:
            self._add_window(items.earliest[first], items.latest[first], items.wait_slot[first])
            self._add_copies(0, 0, 0)
            return
        self._add_window(
            max(items.earliest[first:end]), min(items.latest[first:end]), min(items.wait_slot[first:end])
        )
        copy_in = items.copy_in_sum[end] - items.copy_in_sum[first]
        copy_out = items.copy_sum[end] - items.copy_sum[first] - copy_in
        self._add_copies(
            copy_in + kernel_ns if copy_in else 0,
            copy_out + kernel_ns if copy_out else 0,
            items.held_sum[end] - items.held_sum[first] - size,
        )

    def _add_window(self, earliest: int, latest: int, wait_slot: int) -> None:
        self.earliest.append(earliest)
        self.latest.append(latest)
        self.wait_slot.append(wait_slot)

    def _add_copies(self, copy_in_ns: int, copy_out_ns: int, staging_bytes: int) -> None:
        self.copy_in_ns.append(copy_in_ns)
        self.copy_out_ns.append(copy_out_ns)
        self.staging_bytes.append(staging_bytes)

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
