"""When to start and await collectives whose order is given: the planning that is left after the graph is lowered.

It owns that decision. It must not know graphs or torch. Once TorchInductor has lowered a graph the order of all
collectives is frozen, whatever process group they belong to, and nothing can be merged: only the slots are free.

Two sweeps over the modelled time of the compute stream:

* backward, the latest time at which each gather may begin so that it, and all that follow it in its process group, end
  before they are needed. Each gather asks for a slot twice that far ahead: communication may take twice as long as
  modelled before it shows;
* forward, each collective starts in its slot, or later when its bytes do not fit the budget yet. A gather is awaited at
  its first use. A reduction is awaited at the end, or as soon as memory is short, finished ones first.
"""

from __future__ import annotations

import bisect
import itertools
from collections import deque

from inductor_passes.plan import LowerBound, Plan, PlanningProblem, Role
from inductor_passes.planners.schedule import make_plan

PLANNER = "in order"
_LEAD_FACTOR = 2  # see the module docstring


def plan_in_order(problem: PlanningProblem) -> Plan | None:
    """Place every collective alone, started in the order of their numbers.

    Args:
        problem: what is to be placed; collectives start in this order, in all process groups together.

    Returns:
        The plan, None when the order cannot be kept: a collective must start before one ahead of it can.
    """
    earliest = list(itertools.accumulate((item.earliest_issue for item in problem.collectives), max))
    latest = list(itertools.accumulate((item.latest_issue for item in reversed(problem.collectives)), min))[
        ::-1
    ]
    if any(first > last for first, last in zip(earliest, latest, strict=True)):
        return None
    sweep = _Sweep(problem, _targets(problem, earliest, latest), latest)
    return plan_of(problem, sweep.run())


def plan_of(problem: PlanningProblem, events: list[tuple[int, int, bool]]) -> Plan:
    """The plan that starts and awaits single collectives as given, as (slot, number, is wait), with its costs.

    Its lower bound is that of compute alone.
    """
    members = [(number,) for number in range(len(problem.collectives))]
    bound = LowerBound(sum(problem.region_ns), "compute")
    return make_plan(problem, PLANNER, members, events, bound)


def _duration_ns(problem: PlanningProblem, number: int) -> int:
    item = problem.collectives[number]
    return problem.alpha_ns[item.key] + item.transfer_ns


def _targets(problem: PlanningProblem, earliest: list[int], latest: list[int]) -> list[int]:
    """The slot in which each collective should start, never falling with its number."""
    begin_of_slot = [0, *itertools.accumulate(problem.region_ns)]
    next_begin: dict[str, int] = {}
    targets = [0] * len(problem.collectives)
    following = problem.last_slot
    for number in reversed(range(len(targets))):
        item = problem.collectives[number]
        needed = begin_of_slot[item.latest_issue if item.role is Role.FIXED else item.latest_wait]
        begin = min(needed, next_begin.get(item.key.group, needed)) - _duration_ns(problem, number)
        next_begin[item.key.group] = begin
        target = item.earliest_issue
        if item.role is Role.GATHER:
            asked = needed - _LEAD_FACTOR * (needed - begin)
            target = max(target, bisect.bisect_right(begin_of_slot, max(0, asked)) - 1)
        following = max(earliest[number], min(target, following, latest[number]))
        targets[number] = following
    return list(itertools.accumulate(targets, max))


class _Sweep:
    """The forward sweep: the clock, the process groups, the bytes in flight."""

    def __init__(self, problem: PlanningProblem, targets: list[int], latest: list[int]) -> None:
        self._problem = problem
        self._items = problem.collectives
        self._targets = targets
        self._latest = latest
        self._events: list[tuple[int, int, bool]] = []
        self._slot = 0
        self._now_ns = 0
        self._free_at_ns: dict[str, int] = {}
        self._end_ns: dict[int, int] = {}
        self._waited: set[int] = set()
        self._in_flight = 0
        self._pending: deque[int] = deque()  # reductions started and not awaited, oldest first
        self._next = 0

    def run(self) -> list[tuple[int, int, bool]]:
        """All starts and waits, in order."""
        last = self._problem.last_slot
        due: list[list[int]] = [[] for _ in range(last + 1)]
        arriving = [0] * (last + 1)  # gradients that come to exist
        leaving = [0] * (last + 1)  # gathered values that come into use
        for number, item in enumerate(self._items):
            due[item.latest_wait].append(number)
            if item.role is Role.REDUCE:
                arriving[item.earliest_issue] += item.size_bytes
        for slot in range(last + 1):
            self._slot = slot
            self._in_flight += arriving[slot] - leaving[slot]
            while self._next < len(self._items) and self._targets[self._next] <= slot:
                if not self._try_start(self._next, leaving):
                    break
                self._next += 1
            for number in due[slot]:
                self._wait(number)
            self._make_room(0, at_any_cost=True)
            if slot < last:
                self._now_ns += self._problem.region_ns[slot]
        return self._events

    def _try_start(self, number: int, leaving: list[int]) -> bool:
        item = self._items[number]
        forced = self._latest[number] <= self._slot
        if item.role is Role.GATHER and item.latest_wait > self._slot:
            if not self._make_room(item.size_bytes, at_any_cost=forced) and not forced:
                return False
            self._in_flight += item.size_bytes
            leaving[item.latest_wait] += item.size_bytes
        for other in item.depends_on:
            self._wait(other)
        self._events.append((self._slot, number, False))
        self._now_ns += self._problem.issue_ns
        begin = max(self._now_ns, self._free_at_ns.get(item.key.group, 0))
        self._end_ns[number] = begin + _duration_ns(self._problem, number)
        self._free_at_ns[item.key.group] = self._end_ns[number]
        if item.role is Role.REDUCE:
            self._pending.append(number)
        return True

    def _wait(self, number: int) -> None:
        if number in self._waited:
            return
        self._waited.add(number)
        self._events.append((self._slot, number, True))
        self._now_ns = max(self._now_ns, self._end_ns[number])
        if self._items[number].role is Role.REDUCE:
            self._pending.remove(number)
            self._in_flight -= self._items[number].size_bytes

    def _make_room(self, extra_bytes: int, *, at_any_cost: bool) -> bool:
        """Await reductions, oldest first, until `extra_bytes` more fit the budget; False when they do not.

        Unless at any cost, only those that are done.
        """
        budget = self._problem.memory_budget_bytes
        if budget is None:
            return True
        for number in list(self._pending):
            if self._in_flight + extra_bytes <= budget:
                break
            if at_any_cost or self._end_ns[number] <= self._now_ns:
                self._wait(number)
        return self._in_flight + extra_bytes <= budget
