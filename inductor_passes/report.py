"""What the passes did and why: records, and a text form of a schedule that does not change with node names.

It owns the record types' common shape and their text. It must not know how a pass works.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inductor_passes import graph as fxg

if TYPE_CHECKING:
    from torch import fx

    from inductor_passes.plan import Plan, PlanningProblem

BUCKET_KEY = "simplefsdp_bucket"


@dataclass(frozen=True)
class PassRecord:
    """What one pass did to one graph.

    Args:
        name: "reshard", "bucket" or "reorder".
        graph: "joint", "forward", "backward" or "inference".
        items: what was decided, one value per parameter, bucket or move, with its reason.
        before: schedule lines of the graph the pass received.
        after: schedule lines of the graph it left.
        failure: why the pass kept its input graph; "" when it did not fail.
    """

    name: str
    graph: str
    items: tuple[Any, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    failure: str = ""

    def __str__(self) -> str:
        head = f"{self.name} pass, {self.graph} graph" + (f": FAILED, {self.failure}" if self.failure else "")
        lines = [head, *(f"  {item}" for item in self.items)]
        if self.before == self.after:
            return "\n".join([*lines, "  schedule:", *(f"    {line}" for line in self.after)])
        before = (f"    {line}" for line in self.before)
        after = (f"    {line}" for line in self.after)
        return "\n".join([*lines, "  before:", *before, "  after:", *after])


@dataclass(frozen=True)
class PlanReport:
    """A plan with the problem it solves, for reading. All times are modelled."""

    problem: PlanningProblem
    plan: Plan

    def __str__(self) -> str:
        plan, items = self.plan, self.problem.collectives
        alone = dict(plan.alone)
        exposed = {item.bucket: item for item in plan.exposed}
        head = (
            f"planner {plan.planner}: {len(items)} collectives in {len(plan.buckets)} buckets; modelled "
            f"{plan.step_ns / 1e6:.3f} ms, {plan.exposed_ns / 1e6:.3f} ms of it exposed; "
            f"lower bound {plan.lower_bound.time_ns / 1e6:.3f} ms ({plan.lower_bound.limit}); "
            f"{plan.peak_in_flight_bytes / 2**20:.1f} MiB in flight"
        )
        lines = [head]
        for number, bucket in enumerate(plan.buckets):
            members = [items[member] for member in bucket.members]
            size = sum(member.size_bytes for member in members)
            text = (
                f"{members[0].key} {size / 2**20:.2f} MiB, start in slot {bucket.issue_slot}, wait in slot "
            )
            text += f"{bucket.wait_slot}: {'+'.join(member.name for member in members)}"
            if bucket.members[0] in alone:
                text += f"; alone: {alone[bucket.members[0]].value}"
            if number in exposed:
                text += f"; exposed {exposed[number].exposed_ns / 1e3:.1f} us: {exposed[number].reason}"
            lines.append(text)
        return "\n  ".join(lines)


def schedule_lines(graph: fx.Graph) -> list[str]:
    """One line per collective, in the order they are issued.

    A line gives kind, members, bytes of the unsharded side, element type, and where the collective is
    started and awaited, counted in heavy operators (matrix products, convolutions, attention) that stand
    before. As in::

        all_gather layers.0.wq.weight+layers.0.wk.weight 8192 B bfloat16: start 0, wait 2

    "wait -" means that nothing awaits it. Equal programs give equal lines in every process.
    """
    heavy_before: dict[fx.Node, int] = {}
    heavy = 0
    for node in graph.nodes:
        heavy_before[node] = heavy
        heavy += fxg.is_heavy(node)
    lines = []
    for start in fxg.starts(graph):
        key = fxg.group_key(start)
        wait = fxg.find_wait(start)
        operation = f"{key.kind}.{key.reduce_op}" if key.reduce_op else key.kind
        awaited = "-" if wait is None else heavy_before[wait]
        lines.append(
            f"{operation} {'+'.join(members_of(start))} {fxg.full_bytes(start)} B {key.dtype}: "
            f"start {heavy_before[start]}, wait {awaited}"
        )
    return lines


def members_of(start: fx.Node) -> tuple[str, ...]:
    """Names of the parameters that a collective carries; "?" for a collective without a tag."""
    bucket = start.meta.get(BUCKET_KEY)
    return tuple(bucket) if bucket else (fxg.param_fqn(start) or "?",)
