"""Does a plan obey its problem? An independent reading of the rules, for tests and for verifying before
applying.

Owns the rules a plan must keep. Must not share code with the placing rule it checks.
"""

from __future__ import annotations

from inductor_passes.plan import ISSUE, Plan, PlanningProblem, Role
from inductor_passes.planners.schedule import in_flight


def check_plan(problem: PlanningProblem, plan: Plan) -> None:
    """Raise ``ValueError`` naming the first rule that ``plan`` breaks.

    Rules: every collective in exactly one bucket; one key and one role per bucket, members ascending, fixed
    ones alone; starts and waits inside every member's window, each exactly once and in slot order; results a
    bucket depends on waited for before its start; bytes in flight within the budget.
    """
    items = problem.collectives
    seen = sorted(number for bucket in plan.buckets for number in bucket.members)
    if seen != list(range(len(items))):
        raise ValueError(f"every collective must be in exactly one bucket, got {seen}")
    for at, bucket in enumerate(plan.buckets):
        members = [items[number] for number in bucket.members]
        if list(bucket.members) != sorted(bucket.members):
            raise ValueError(f"bucket {at}: members must ascend, got {bucket.members}")
        if any((item.key, item.role) != (members[0].key, members[0].role) for item in members):
            raise ValueError(f"bucket {at}: members have different keys or roles")
        if members[0].role is Role.FIXED and len(members) > 1:
            raise ValueError(f"bucket {at}: fixed collectives must stay alone")
        for number, item in zip(bucket.members, members, strict=True):
            if not item.earliest_issue <= bucket.issue_slot <= item.latest_issue:
                raise ValueError(
                    f"bucket {at} starts in slot {bucket.issue_slot}, outside the window of {number}"
                )
            if not bucket.issue_slot <= bucket.wait_slot <= item.latest_wait:
                raise ValueError(
                    f"bucket {at} is waited for in slot {bucket.wait_slot}, too late for {number}"
                )
    _check_events(problem, plan)
    budget = problem.memory_budget_bytes
    peak = in_flight(problem, plan.buckets, plan.events).peak_bytes
    if budget is not None and peak > budget:
        raise ValueError(f"{peak} bytes in flight exceed the budget of {budget}")


def _check_events(problem: PlanningProblem, plan: Plan) -> None:
    home = plan.bucket_of()
    started: list[int] = []
    waited: dict[int, bool] = {}
    slot = 0
    for event in plan.events:
        if event.slot < slot:
            raise ValueError(f"events go back from slot {slot} to {event.slot}")
        slot = event.slot
        bucket = plan.buckets[event.bucket]
        if event.action == ISSUE:
            if event.bucket != len(started) or event.slot != bucket.issue_slot:
                raise ValueError(
                    f"bucket {event.bucket} starts out of turn, twice, or in another slot than it says"
                )
            for number in bucket.members:
                for other in problem.collectives[number].depends_on:
                    if not waited.get(home[other], False):
                        raise ValueError(
                            f"bucket {event.bucket} starts before {other}, which feeds it, is there"
                        )
            started.append(event.bucket)
        else:
            if event.bucket >= len(started) or event.bucket in waited or event.slot != bucket.wait_slot:
                raise ValueError(
                    f"bucket {event.bucket} is waited for twice, before its start, or in another slot"
                )
            waited[event.bucket] = True
    if len(started) != len(plan.buckets) or len(waited) != len(plan.buckets):
        raise ValueError("every bucket must be started and waited for")
