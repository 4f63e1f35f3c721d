"""A plan as text: what starts and waits where, what it costs, and why things are as they are.

Owns the wording of plans for reports and dumps. Must not decide or compute anything that is not in the plan.
"""

from __future__ import annotations

from inductor_passes.plan import ISSUE, Plan, PlanningProblem

MIB = 1 << 20
NS_PER_MS = 1_000_000


def summary_line(plan: Plan) -> str:
    """One line: modelled step, exposed time, bound and memory."""
    merged = sum(len(bucket.members) > 1 for bucket in plan.buckets)
    return (
        f"planner {plan.planner}: modelled step {plan.step_ns / NS_PER_MS:.3f} ms, "
        f"of it exposed {plan.exposed_ns / NS_PER_MS:.3f} ms; "
        f"{plan.gap_per_mille / 10:.1f} % above the bound of {plan.lower_bound.time_ns / NS_PER_MS:.3f} ms "
        f"({plan.lower_bound.limit}); {len(plan.buckets)} starts, {merged} of them buckets of several; "
        f"{plan.peak_in_flight_bytes / MIB:.1f} MiB in flight at most"
    )


def describe_plan(problem: PlanningProblem, plan: Plan) -> str:
    """The summary, then every start and wait in order, then why single collectives are alone.

    Args:
        problem: What was planned; gives names and sizes.
        plan: The plan.

    Returns:
        Lines of text, without a final newline.
    """
    items = problem.collectives
    exposed = {item.bucket: item for item in plan.exposed}
    lines = [summary_line(plan)]
    for event in plan.events:
        bucket = plan.buckets[event.bucket]
        chosen = [items[number] for number in bucket.members]
        text = f"  slot {event.slot:>5}  {event.action:<5}  #{event.bucket}"
        if event.action == ISSUE:
            size = sum(item.size_bytes for item in chosen) / MIB
            names = ", ".join(item.name for item in chosen)
            text += f"  {chosen[0].key}  {size:.1f} MiB  [{names}]"
        elif event.bucket in exposed:
            why = exposed[event.bucket]
            text += f"  exposed {why.exposed_ns / NS_PER_MS:.3f} ms: {why.reason}"
            if why.blocker is not None:
                text += f" (#{why.blocker})"
        lines.append(text)
    lines += [f"  alone: {items[number].name}: {reason.value}" for number, reason in plan.alone]
    return "\n".join(lines)
