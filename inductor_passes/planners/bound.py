"""A bound that no plan of the planners can beat, and what it comes from.

Owns the bound only. It holds for every bucketing the planners may make (of neighbours), every order and every budget,
so the distance to it is an upper limit on what planning could still gain. Three arguments, the largest
counts:

* compute: regions run one after another; a gather needed at a slot cannot be there before its input, its own
  length and whatever it depends on allow; the last reduction ends no sooner than its own length after its
  input. With unlimited links this is a longest path. It holds the compute plus the unavoidable first gather
  and last reduction.
* communication: a process group works one collective at a time. A set of them takes at least the time until
  the first can begin, one alpha per key, all transfers, and the compute that still follows the last of them.
  The sets tried are all collectives needed up to some slot, and all that are ready only from some slot on.
* copies against alphas: with B buckets the group is busy for all transfers plus B alphas, and the stream for
  all compute, the stall for the first gather, and the copies it takes to have no more than B. (Copies into
  gather buckets are left out: they may fall into that stall. Waits, and so the copies after them, come at
  first uses.) The step is at least any weighted mean of the two, and for given weights ``segment`` finds the
  least mean over all bucketings.
"""

from __future__ import annotations

import dataclasses

from inductor_passes.plan import LowerBound, Role
from inductor_passes.planners.instance import Instance
from inductor_passes.planners.keylists import KeyList, prefix_sums
from inductor_passes.planners.segment import best_runs


def lower_bound(instance: Instance) -> LowerBound:
    """The bound of the module docstring. O(n log n)."""
    arrival, done, path_ns = _longest_path(instance)
    best = LowerBound(path_ns, "compute")
    for group, label in enumerate(instance.groups):
        numbers = [number for number, its in enumerate(instance.group_of) if its == group]
        communication = LowerBound(_group_bound(instance, numbers, arrival), f"communication on {label}")
        trade = LowerBound(_trade_bound(instance, numbers, arrival, done), f"alphas and copies on {label}")
        best = max(best, communication, trade, key=lambda bound: bound.time_ns)
    return best


def _longest_path(instance: Instance) -> tuple[list[int], list[int], int]:
    """Earliest time each slot can be reached, each collective can be done, and all can end; unlimited
    links."""
    problem = instance.problem
    items = problem.collectives
    by_wait: dict[int, list[int]] = {}
    by_issue: dict[int, list[int]] = {}
    for number, item in enumerate(items):
        by_issue.setdefault(item.earliest_issue, []).append(number)
        by_wait.setdefault(item.latest_wait, []).append(number)
    arrival = [0] * instance.slots
    done = [0] * len(items)
    now = 0
    for slot in range(instance.slots):
        arrival[slot] = now
        for number in by_issue.get(slot, ()):
            item = items[number]
            begin = max([now, *(done[other] for other in item.depends_on)])
            done[number] = begin + problem.alpha_ns[item.key] + item.transfer_ns
        for number in by_wait.get(slot, ()):
            now = max(now, done[number])
        if slot < instance.slots - 1:
            now += instance.region_ns[slot]
    return arrival, done, now


def _group_bound(instance: Instance, numbers: list[int], arrival: list[int]) -> int:
    problem = instance.problem
    items = problem.collectives
    best = 0
    by_need = sorted(numbers, key=lambda number: (items[number].latest_wait, number))
    by_ready = sorted(numbers, key=lambda number: (-items[number].earliest_issue, number))
    for order in (by_need, by_ready):
        keys: set[object] = set()
        work = 0
        head: int | None = None
        tail: int | None = None
        for number in order:
            item = items[number]
            if item.key not in keys:
                keys.add(item.key)
                work += problem.alpha_ns[item.key]
            work += item.transfer_ns
            begins, follows = arrival[item.earliest_issue], instance.compute_after[item.latest_wait]
            head = begins if head is None else min(head, begins)
            tail = follows if tail is None else min(tail, follows)
            best = max(best, head + work + tail)
    return best


WEIGHTS_PER_MILLE = tuple(range(50, 1000, 50))
"""Weights of link time in the mean of link time and compute time."""


def _trade_bound(instance: Instance, numbers: list[int], arrival: list[int], done: list[int]) -> int:
    problem = instance.problem
    items = [problem.collectives[number] for number in numbers]
    group = instance.group_of[numbers[0]]
    lists = [items for items in instance.lists if instance.group_of[items.members[0]] == group]
    if not lists:
        return 0
    links = min(arrival[item.earliest_issue] for item in items) + sum(item.transfer_ns for item in items)
    links += sum(problem.alpha_ns[item.key] for item in items if item.role is Role.FIXED)
    links += min(instance.compute_after[item.latest_wait] for item in items)
    gathers = [number for number in numbers if problem.collectives[number].role is Role.GATHER]
    first_use = min((problem.collectives[number].latest_wait for number in gathers), default=0)
    reach = min((done[n] for n in gathers if problem.collectives[n].latest_wait == first_use), default=0)
    stream = max(arrival[first_use], reach) + instance.compute_after[first_use]
    counted = [_unavoidable_copies(instance, key_list, first_use) for key_list in lists]
    best = 0
    for weight in WEIGHTS_PER_MILLE:
        price = weight * 1000 // (1000 - weight)
        traded = 0
        for key_list in counted:
            runs = best_runs(key_list, [price] * len(key_list.members), None, 0)
            traded += len(runs) * price * key_list.alpha_ns
            traded += 1000 * sum(
                key_list.copy_sum[last + 1] - key_list.copy_sum[first] for first, last in runs if last > first
            )
        mean = (weight * links + (1000 - weight) * stream) // 1000 + (1000 - weight) * traded // 1_000_000
        best = max(best, mean)
    return best


def _unavoidable_copies(instance: Instance, key_list: KeyList, first_use: int) -> KeyList:
    """The list with only those copies that cannot fall into the stall before ``first_use``."""
    items = instance.problem.collectives
    feeding = {other for item in items for other in item.depends_on}
    copies = []
    for number in key_list.members:
        item = items[number]
        after = number not in feeding and (item.role is Role.GATHER or item.earliest_issue > first_use)
        copies.append(item.copy_out_ns + (item.copy_in_ns if item.role is Role.REDUCE else 0) if after else 0)
    return dataclasses.replace(key_list, copy_sum=tuple(prefix_sums(copies)))
