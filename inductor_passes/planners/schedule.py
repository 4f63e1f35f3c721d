"""From a plan's events to a schedule, its costs, and its bytes in flight.

Owns the translation of a plan into the simulator's nodes and the accounting that ``plan`` describes. Every
planner's result goes through here, so all are judged by the same machine. Must not know how plans are found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from inductor_passes.plan import (
    ISSUE,
    WAIT,
    AloneReason,
    Bucket,
    Event,
    Exposed,
    LowerBound,
    Plan,
    PlanningProblem,
    Role,
)
from inductor_passes.timeline import Compute, ExposureReason, Node, Start, Wait, simulate


@dataclasses.dataclass(frozen=True)
class InFlight:
    """Bytes in flight: while each region runs, and the most at any moment (staging copies included)."""

    per_region: tuple[int, ...]
    peak_bytes: int


def make_plan(
    problem: PlanningProblem,
    planner: str,
    members: Sequence[Sequence[int]],
    events: Sequence[tuple[int, int, bool]],
    lower_bound: LowerBound,
    alone: Sequence[tuple[int, AloneReason]] = (),
) -> Plan:
    """Build the plan for a decision, with its modelled costs.

    Args:
        problem: What was planned.
        planner: Name for the plan.
        members: Numbers of the collectives of each bucket.
        events: (slot, bucket, is_wait), in emission order.
        lower_bound: Of the problem.
        alone: Why single collectives are alone.
    """
    issue_slot = {bucket: slot for slot, bucket, is_wait in events if not is_wait}
    wait_slot = {bucket: slot for slot, bucket, is_wait in events if is_wait}
    renumbered = {bucket: at for at, bucket in enumerate(issue_slot)}
    buckets = tuple(
        Bucket(tuple(sorted(members[bucket])), issue_slot[bucket], wait_slot[bucket]) for bucket in renumbered
    )
    final = tuple(
        Event(slot, WAIT if is_wait else ISSUE, renumbered[bucket]) for slot, bucket, is_wait in events
    )
    timeline = simulate(expand(problem, buckets, final))
    exposed = tuple(
        Exposed(item.collective, item.exposed_ns, item.reason.value, item.blocker)
        for item in timeline.collectives
        if item.reason is not ExposureReason.HIDDEN
    )
    return Plan(
        planner=planner,
        buckets=buckets,
        events=final,
        step_ns=timeline.step_ns,
        compute_ns=timeline.compute_ns,
        lower_bound=lower_bound,
        peak_in_flight_bytes=in_flight(problem, buckets, final).peak_bytes,
        alone=tuple(alone),
        exposed=exposed,
    )


def expand(problem: PlanningProblem, buckets: Sequence[Bucket], events: Sequence[Event]) -> list[Node]:
    """The schedule of a plan as nodes for :func:`inductor_passes.timeline.simulate`.

    Collective numbers in the nodes are bucket positions.
    """
    nodes: list[Node] = []
    slot = 0
    for event in events:
        nodes += [Compute(duration) for duration in problem.region_ns[slot : event.slot]]
        slot = event.slot
        items = [problem.collectives[number] for number in buckets[event.bucket].members]
        several = len(items) > 1
        if event.action == ISSUE:
            copy = sum(item.copy_in_ns for item in items) if several else 0
            if copy:
                nodes.append(Compute(copy + problem.kernel_ns))
            duration = problem.alpha_ns[items[0].key] + sum(item.transfer_ns for item in items)
            nodes.append(Start(event.bucket, items[0].key.group, duration, problem.issue_ns))
        else:
            nodes.append(Wait(event.bucket))
            copy = sum(item.copy_out_ns for item in items) if several else 0
            if copy:
                nodes.append(Compute(copy + problem.kernel_ns))
    nodes += [Compute(duration) for duration in problem.region_ns[slot:]]
    return nodes


def in_flight(problem: PlanningProblem, buckets: Sequence[Bucket], events: Sequence[Event]) -> InFlight:
    """Bytes in flight of a plan, counted as ``inductor_passes.plan`` says."""
    regions = len(problem.region_ns)
    change = [0] * (regions + 2)
    for bucket in buckets:
        for number in bucket.members:
            item = problem.collectives[number]
            if item.role is Role.GATHER:
                first, last = bucket.issue_slot, item.latest_issue
            elif item.role is Role.REDUCE:
                first, last = item.earliest_issue, bucket.wait_slot
            else:
                continue
            change[first] += item.size_bytes
            change[max(first, last)] -= item.size_bytes
    per_region = []
    held = 0
    for region in range(regions):
        held += change[region]
        per_region.append(held)
    peak = max(per_region, default=0)
    return InFlight(tuple(per_region), max(peak, _staging_peak(problem, buckets, events)))


def _staging_peak(problem: PlanningProblem, buckets: Sequence[Bucket], events: Sequence[Event]) -> int:
    """Most bytes in flight at a copy into or out of a bucket, following the events one by one."""
    items = problem.collectives
    ready: dict[int, int] = {}
    for item in items:
        if item.role is Role.REDUCE:
            ready[item.earliest_issue] = ready.get(item.earliest_issue, 0) + item.size_bytes
    held = peak = 0
    released: dict[int, int] = {}
    slot = -1
    for event in events:
        while slot < event.slot:
            slot += 1
            held += ready.get(slot, 0) - released.get(slot, 0)
        bucket = buckets[event.bucket]
        chosen = [items[number] for number in bucket.members]
        staging = sum(item.staging_bytes for item in chosen) if len(chosen) > 1 else 0
        role = chosen[0].role
        if role is Role.GATHER and event.action == ISSUE:
            for item in chosen:
                if item.latest_issue > slot:
                    held += item.size_bytes
                    released[item.latest_issue] = released.get(item.latest_issue, 0) + item.size_bytes
        if staging and ((role is Role.GATHER) == (event.action == WAIT)):
            peak = max(peak, held + staging)
        if role is Role.REDUCE and event.action == WAIT:
            held -= sum(item.size_bytes for item in chosen)
    return peak
