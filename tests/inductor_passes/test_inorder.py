"""Placing collectives whose order is given."""

from __future__ import annotations

import dataclasses
import random

import pytest

from inductor_passes.inorder import plan_in_order, plan_of
from inductor_passes.plan import ISSUE, Collective, GroupKey, PlanningProblem, Role
from inductor_passes.planners.check import check_plan

GATHER = GroupKey("all_gather", "group0", "bfloat16")
REDUCE = GroupKey("reduce_scatter", "group0", "float32", "avg")
OTHER = GroupKey("all_reduce", "group1", "float32", "sum")


def gather(use: int, earliest: int = 0, ns: int = 100, size: int = 10) -> Collective:
    return Collective("w", GATHER, Role.GATHER, size, ns, earliest, use, use)


def reduction(ready: int, last: int, ns: int = 100, size: int = 10) -> Collective:
    return Collective("g", REDUCE, Role.REDUCE, size, ns, ready, last, last)


def problem(items, regions=8, region_ns=100, budget=None) -> PlanningProblem:
    alpha = {GATHER: 0, REDUCE: 0, OTHER: 0}
    return PlanningProblem((region_ns,) * regions, tuple(items), alpha, memory_budget_bytes=budget)


def slots(plan) -> list[tuple[int, int]]:
    return [(bucket.issue_slot, bucket.wait_slot) for bucket in plan.buckets]


def test_a_gather_starts_twice_its_time_ahead_of_its_use():
    assert slots(plan_in_order(problem([gather(6)]))) == [(4, 6)]
    assert slots(plan_in_order(problem([gather(6, ns=150)]))) == [(3, 6)]
    assert slots(plan_in_order(problem([gather(6, earliest=5)]))) == [(5, 6)]


def test_gathers_in_one_queue_make_room_for_those_behind():
    plan = plan_in_order(problem([gather(6), gather(6)]))
    assert slots(plan) == [(2, 6), (4, 6)]
    assert plan.exposed_ns == 0


def test_a_reduction_starts_when_ready_and_is_awaited_at_the_end():
    assert slots(plan_in_order(problem([reduction(3, 8)]))) == [(3, 8)]


def test_the_order_is_kept_across_groups():
    """A gather that stands behind a reduction waits for it to be ready, though it could start sooner."""
    fixed = Collective("t", OTHER, Role.FIXED, 10, 100, 2, 2, 3)
    items = [
        reduction(4, 8),
        gather(7),
        dataclasses.replace(fixed, earliest_issue=6, latest_issue=6, latest_wait=7),
    ]
    assert slots(plan_in_order(problem(items))) == [(4, 8), (5, 7), (6, 7)]


def test_an_order_that_cannot_be_kept_is_refused():
    assert plan_in_order(problem([reduction(5, 8), gather(4)])) is None


def test_the_budget_holds_gathers_back_and_reductions_are_awaited_for_it():
    items = [gather(4, ns=400), gather(6, ns=400), gather(8, ns=400)]
    free = slots(plan_in_order(problem(items)))
    tight = slots(plan_in_order(problem(items, budget=10)))
    assert [start for start, _ in free] == [0, 0, 0]
    assert [start for start, _ in tight] == [0, 4, 6]
    pending = [reduction(ready, 8) for ready in (1, 2, 3)]
    assert [wait for _, wait in slots(plan_in_order(problem(pending, budget=20)))] == [3, 8, 8]
    assert [wait for _, wait in slots(plan_in_order(problem(pending)))] == [8, 8, 8]


def test_no_budget_at_all_starts_everything_where_it_is_needed():
    plan = plan_in_order(problem([gather(4), gather(6), reduction(7, 8)], budget=0))
    assert slots(plan) == [(4, 4), (6, 6), (7, 7)]


def test_results_that_feed_others_are_awaited_before_them():
    second = Collective("g", OTHER, Role.REDUCE, 10, 100, 3, 8, 8, depends_on=(0,))
    plan = plan_in_order(problem([reduction(3, 8), second]))
    assert slots(plan) == [(3, 3), (3, 8)]


@pytest.mark.parametrize("batch", range(4))
def test_random_problems_give_plans_that_keep_the_rules(batch):
    for seed in range(batch * 250, (batch + 1) * 250):
        choose = random.Random(seed)
        regions = choose.randint(0, 12)
        items = []
        for _ in range(choose.randint(1, 8)):
            first, last = sorted(choose.randint(0, regions) for _ in range(2))
            make = choose.choice((gather, reduction))
            ns, size = choose.randint(0, 300), choose.randint(0, 20)
            items.append(make(last, first, ns, size) if make is gather else make(first, last, ns, size))
        case = problem(items, regions)
        plan = plan_in_order(case)
        possible = all(
            a.earliest_issue <= b.latest_issue for at, a in enumerate(items) for b in items[at + 1 :]
        )
        assert (plan is not None) == possible, seed
        if plan is None:
            continue
        check_plan(case, plan)
        assert [bucket.members for bucket in plan.buckets] == [(number,) for number in range(len(items))], (
            seed
        )
        starts = [event.slot for event in plan.events if event.action == ISSUE]
        assert starts == sorted(starts), seed


def test_a_given_order_of_events_has_its_cost():
    case = problem([gather(4)])
    late = plan_of(case, [(4, 0, False), (4, 0, True)])
    assert late.exposed_ns == 100
    assert plan_in_order(case).step_ns == late.step_ns - 100
