"""Plan the collectives of a graph, and move compute under those that are not ours.

Owns the order of these: read, plan, move, plan again. Of the graph it changes nothing but the order of nodes.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from inductor_passes.bucket import put_in_order
from inductor_passes.costs.model import ProfileCostModel
from inductor_passes.motion import MotionReport, read_motion
from inductor_passes.plan import Plan, Role
from inductor_passes.planners import plan_collectives
from inductor_passes.planners.motion import plan_motion
from inductor_passes.planners.tasks import check_motion
from inductor_passes.program import Program, read_program

if TYPE_CHECKING:
    from torch import fx

    from inductor_passes.setups import Setup


@dataclasses.dataclass(frozen=True)
class GraphPlan:
    """A graph read for planning, and its plan.

    Args:
        program: the graph, in the order the plan is for.
        plan: what is to become of its collectives.
        motion: what was moved; None where nothing may be.
    """

    program: Program
    plan: Plan
    motion: MotionReport | None = None


def plan_graph(graph: fx.Graph, setup: Setup) -> GraphPlan:
    """Read a graph, move compute where that shortens the step, plan its collectives.

    Args:
        graph: forward, backward or inference graph without twins of waits (`bucket.merge_waits`); its nodes are put in
            the order the plan is for.
        setup: options and hardware profile.
    """
    found = _plan(graph, setup, setup.config.memory_budget_bytes)
    if setup.config.move_compute and any(
        item.role is Role.FIXED for item in found.program.problem.collectives
    ):
        return _plan_moved(graph, setup, found)
    return found


def _plan(graph: fx.Graph, setup: Setup, memory_budget_bytes: int | None) -> GraphPlan:
    program = read_program(
        graph,
        ProfileCostModel(setup.profile),
        ranks_per_node=setup.profile.value("ranks_per_node"),
        blocks=setup.config.blocks,
        memory_budget_bytes=memory_budget_bytes,
    )
    config = setup.config
    return GraphPlan(program, plan_collectives(program.problem, config.planner, bucketing=config.bucketing))


def _plan_moved(graph: fx.Graph, setup: Setup, unmoved: GraphPlan) -> GraphPlan:
    """Move compute under collectives that are not ours, if the best plan for the new order is shorter.

    Half of the memory budget may go into holding compute back; prefetch gets what is left of the whole.

    Args:
        graph: the graph, whose order changes if that is better.
        setup: options and hardware profile.
        unmoved: the graph as found, and the plan for it.
    """
    found = list(graph.nodes)
    reading = read_motion(graph, ProfileCostModel(setup.profile), setup.profile.value("ranks_per_node"))
    budget = setup.config.memory_budget_bytes
    motion = plan_motion(reading.problem, None if budget is None else budget // 2)
    if motion.is_found_order:
        return dataclasses.replace(unmoved, motion=reading.report(motion))
    check_motion(reading.problem, motion.order)
    front = [node for node in found if node.op in ("placeholder", "get_attr")]
    put_in_order(graph, [*front, *reading.order(motion), graph.output_node()])
    held = max(0, motion.after.peak_bytes - motion.before.peak_bytes)
    moved = _plan(graph, setup, None if budget is None else budget - held)
    if moved.plan.step_ns >= unmoved.plan.step_ns:
        put_in_order(graph, found)
        return dataclasses.replace(
            unmoved, motion=reading.report(motion, "with all collectives the step is not shorter")
        )
    return dataclasses.replace(moved, motion=reading.report(motion))
