"""Why each collective that travels alone does.

Owns the reasons for not bucketing. Why a bucket is exposed comes from the timeline. Must not decide anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from inductor_passes.plan import AloneReason, Collective
from inductor_passes.planners.instance import Instance
from inductor_passes.planners.keylists import KeyList


def alone_reasons(
    instance: Instance,
    planner: str,
    bucketing: bool,
    members: Sequence[Sequence[int]],
    exposed: Sequence[int],
) -> list[tuple[int, AloneReason]]:
    """A reason for every collective in a bucket of its own, by number.

    Args:
        instance: The compiled problem.
        planner: Who made the buckets.
        bucketing: Whether bucketing was allowed.
        members: The buckets.
        exposed: Numbers of collectives in buckets that block compute.
    """
    alone = dict.fromkeys(numbers[0] for numbers in members if len(numbers) == 1)
    blocking = dict.fromkeys(exposed)
    out: dict[int, AloneReason] = dict.fromkeys(instance.fixed, AloneReason.FIXED)
    for key_list in instance.lists:
        for place_, number in enumerate(key_list.members):
            if number not in alone:
                continue
            if not bucketing:
                reason = AloneReason.OFF
            elif len(key_list.members) == 1:
                reason = AloneReason.ONLY_ONE
            elif not _has_legal_neighbour(key_list, place_):
                reason = _why_illegal(instance, key_list, place_)
            elif planner != "auto":
                reason = AloneReason.PLANNER
            else:
                reason = AloneReason.SLOWER if number in blocking else AloneReason.HIDDEN
            out[number] = reason
    return sorted(out.items())


def _has_legal_neighbour(key_list: KeyList, place_: int) -> bool:
    after = place_ + 1
    return key_list.first_legal[place_] < place_ or (
        after < len(key_list.members) and key_list.first_legal[after] <= place_
    )


def _why_illegal(instance: Instance, key_list: KeyList, place_: int) -> AloneReason:
    """Reason for the neighbour that comes closest: memory before windows before dependencies."""
    items = instance.problem.collectives
    mine = items[key_list.members[place_]]
    reasons = []
    for other_place in (place_ - 1, place_ + 1):
        if 0 <= other_place < len(key_list.members):
            other = items[key_list.members[other_place]]
            if not _windows_meet(mine, other):
                reasons.append(AloneReason.WINDOW)
            elif key_list.depends_near[max(place_, other_place)] >= min(place_, other_place):
                reasons.append(AloneReason.DEPENDENCY)
            else:
                reasons.append(AloneReason.MEMORY)
    for reason in (AloneReason.MEMORY, AloneReason.WINDOW):
        if reason in reasons:
            return reason
    return AloneReason.DEPENDENCY


def _windows_meet(one: Collective, other: Collective) -> bool:
    return max(one.earliest_issue, other.earliest_issue) <= min(one.latest_issue, other.latest_issue)
