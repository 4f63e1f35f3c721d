"""How plans are found: pure functions from a planning problem to a plan.

Owns the entry point, :func:`plan_collectives`. Moving compute is a problem of its own (``tasks``, ``hold``,
``motion``), with an entry point of its own, ``plan_motion``. A stack of small files, each importing only those
before it:
``keylists`` and ``instance`` (what may share a bucket), ``order`` (policies for the order), ``place`` (when),
``segment``, ``moves`` (bucketings worth trying), ``bound``, ``exact``, ``search``, ``hedge``, ``simple``, ``auto`` (the
planners), ``schedule``, ``explain``, ``check`` (what it costs, and why). None of them knows graphs or torch.
Nothing iterates over a set, ties break by number, times are integers: equal problems give byte-equal plans on
every rank.
"""

from __future__ import annotations

import dataclasses

from inductor_passes.plan import Plan, PlanningProblem
from inductor_passes.planners.auto import decide_auto
from inductor_passes.planners.bound import lower_bound
from inductor_passes.planners.explain import alone_reasons
from inductor_passes.planners.instance import Instance
from inductor_passes.planners.schedule import make_plan
from inductor_passes.planners.simple import Decision, decide_block, decide_greedy, decide_none

PLANNER_NAMES = ("auto", "greedy", "block", "none")


def plan_collectives(problem: PlanningProblem, planner: str = "auto", *, bucketing: bool = True) -> Plan:
    """Decide buckets and the place of every start and wait.

    Args:
        problem: What is to be planned.
        planner: ``"none"``, ``"block"`` (the collectives' ``block`` fields), ``"greedy"`` or ``"auto"``.
        bucketing: ``False`` leaves every collective in a bucket of its own.

    Returns:
        The plan. Rules that cannot keep the memory budget make smaller buckets, in the end none at all.

    Raises:
        ValueError: Unknown planner.
    """
    if planner not in PLANNER_NAMES:
        raise ValueError(f"planner must be one of {', '.join(map(repr, PLANNER_NAMES))}, got {planner!r}")
    instance = Instance(problem, bucketing=bucketing)
    bound = lower_bound(instance)

    def finish(decision: Decision) -> Plan:
        plan = make_plan(problem, planner, decision.members, decision.events, bound)
        blocking = [number for item in plan.exposed for number in plan.buckets[item.bucket].members]
        alone = alone_reasons(instance, planner, bucketing, decision.members, blocking)
        return dataclasses.replace(plan, alone=tuple(alone))

    if planner == "none":
        return finish(decide_none(instance))
    if planner == "block":
        return finish(decide_block(instance))
    if planner == "greedy":
        return finish(decide_greedy(instance))
    candidates = [finish(decide(instance)) for decide in (decide_none, decide_block, decide_greedy)]
    best = min(candidates, key=lambda plan: plan.step_ns)
    searched = decide_auto(instance, bound, best.step_ns)
    return best if searched is None else finish(searched)
