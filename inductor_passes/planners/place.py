"""The placing rule: from a bucketing and an order of buckets to slots, times and memory, in one sweep.

Owns the decision *when*, given *what together* and *in which order*. Must not know how bucketings and orders
are found.

At each slot, in this order:

1. Fixed collectives traced here start.
2. Buckets start, each as early as it may: its inputs exist, its place in the order of its process group has
come,
   the results it depends on are there, and its bytes fit the budget up to their use. When several groups
   could start one, the order decides. What stands in the way of a start that can wait no longer is waited
   for.
3. What is needed here is waited for.
4. While the next region would exceed the budget, the oldest pending reduction is waited for.

Reductions are waited for as late as possible: when memory is short, those that are done already go first, at
no cost; one that still runs is waited for only when nothing else helps.

An order that cannot be followed (a bucket must start before one that the order puts in front of it can) and a
budget that cannot be kept give ``None``.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

from inductor_passes.planners.instance import UNBOUNDED, Bucketing, Instance

NOTHING = -1
"""Bucket number that stands for the end of a queue."""

_STARTED, _NO_ROOM, _MUST_WAIT = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class Placement:
    """Result of :func:`place`. Lists are by bucket number.

    ``events`` are (slot, bucket, is_wait) in emission order; ``begin_ns`` and ``end_ns`` are when a bucket
    occupies its process group; ``queued_behind`` is the bucket before it in its group, -1 for none.
    """

    step_ns: int
    events: list[tuple[int, int, bool]]
    begin_ns: list[int]
    end_ns: list[int]
    exposed_ns: list[int]
    queued_behind: list[int]
    peak_bytes: int


def place(
    instance: Instance,
    bucketing: Bucketing,
    order: Sequence[int],
    not_before: Sequence[int] | None = None,
    cutoff_ns: int | None = None,
) -> Placement | None:
    """Place every bucket of a bucketing by the rule of the module docstring. O(buckets + slots).

    Args:
        instance: The compiled problem.
        bucketing: What travels together.
        order: All movable buckets; those of one process group start in this order.
        not_before: Earliest slot to start each bucket at, by bucket number, when it need not start sooner to
            keep the order. ``None`` starts as early as possible.
        cutoff_ns: Give up, with ``None``, once the step is sure to take longer.

    Returns:
        The placement, or ``None`` when the order or the budget cannot be kept.
    """
    problem = instance.problem
    budget = instance.budget
    bounded = budget < UNBOUNDED
    count = len(bucketing.members)
    is_gather, size, staging = bucketing.is_gather, bucketing.size_bytes, bucketing.staging_bytes
    earliest, group_of, depends_on = bucketing.earliest, bucketing.group, bucketing.depends_on
    soft = earliest if not_before is None else not_before
    needs = [item.latest_wait for item in problem.collectives]
    sizes = [item.size_bytes for item in problem.collectives]

    groups = range(len(instance.groups))
    gathers: list[list[int]] = [[] for _ in groups]
    reductions: list[list[int]] = [[] for _ in groups]
    rank = [0] * (count + 1)
    rank[NOTHING] = count
    for at, bucket in enumerate(order):
        (gathers if is_gather[bucket] else reductions)[group_of[bucket]].append(bucket)
        rank[bucket] = at
    gather_due = [_suffix_min([bucketing.latest[bucket] for bucket in queue]) for queue in gathers]
    reduction_due = [_suffix_min([bucketing.latest[bucket] for bucket in queue]) for queue in reductions]
    for queue in (*gathers, *reductions):
        queue.append(NOTHING)
    gather_head, reduction_head = [0] * len(groups), [0] * len(groups)
    fixed_here: dict[int, list[int]] = {}
    for bucket in range(bucketing.movable, count):
        fixed_here.setdefault(earliest[bucket], []).append(bucket)
    due_here: dict[int, list[int]] = {}
    for bucket in range(count):
        due_here.setdefault(bucketing.wait_slot[bucket], []).append(bucket)

    now = 0
    prefetched = pending_bytes = unsent = peak = issued = 0
    free_at = [0] * len(groups)
    last_of = [-1] * len(groups)
    begin_ns, end_ns, exposed_ns = [0] * count, [-1] * count, [0] * count
    queued_behind = [-1] * count
    waited = [False] * count
    released = [0] * instance.slots
    pending: deque[int] = deque()
    # Gather buckets that will be copied apart: bytes in flight at that moment beyond those issued later, falling.
    copies: deque[tuple[int, int]] = deque()
    events: list[tuple[int, int, bool]] = []
    slot = 0

    def start(bucket: int) -> None:
        nonlocal now
        events.append((slot, bucket, False))
        now += bucketing.copy_in_ns[bucket] + problem.issue_ns
        group = group_of[bucket]
        begin = max(now, free_at[group])
        begin_ns[bucket] = begin
        end_ns[bucket] = free_at[group] = begin + bucketing.duration_ns[bucket]
        queued_behind[bucket] = last_of[group]
        last_of[group] = bucket

    def wait(bucket: int) -> None:
        nonlocal now, pending_bytes
        events.append((slot, bucket, True))
        waited[bucket] = True
        if end_ns[bucket] > now:
            exposed_ns[bucket] = end_ns[bucket] - now
            now = end_ns[bucket]
        now += bucketing.copy_out_ns[bucket]
        if not is_gather[bucket]:
            pending_bytes -= size[bucket]

    def make_room(extra: int, at_any_cost: bool) -> bool:
        """Wait for pending reductions, oldest first, until ``extra`` more bytes fit; say whether they do."""
        while prefetched + pending_bytes + extra > budget:
            while pending and waited[pending[0]]:
                pending.popleft()
            if not pending or (end_ns[pending[0]] > now and not at_any_cost):
                return False
            wait(pending.popleft())
        return True

    def inputs_are_there(bucket: int, forced: bool) -> bool:
        for other in depends_on[bucket]:
            if end_ns[other] < 0:
                return False
            if not waited[other]:
                if end_ns[other] > now and not forced:
                    return False
                wait(other)
        return True

    def try_start(bucket: int, forced: bool) -> int:
        nonlocal prefetched, pending_bytes, unsent, peak, issued
        if earliest[bucket] > slot or (depends_on[bucket] and not inputs_are_there(bucket, forced)):
            return _MUST_WAIT
        if is_gather[bucket]:
            ahead = size[bucket]
            numbers = bucketing.members[bucket]
            if bucketing.wait_slot[bucket] <= slot:
                ahead = sum(sizes[number] for number in numbers if needs[number] > slot)
            if bounded and ahead:
                while copies and waited[copies[0][1]]:
                    copies.popleft()
                last = max(needs[number] for number in numbers) - 1
                reserve = max(unsent, bucketing.reserved.most(slot, last))
                reserve += max(0, copies[0][0] + issued - prefetched) if copies else 0
                if not make_room(ahead + reserve, False) and not (forced and make_room(ahead + unsent, True)):
                    return _NO_ROOM
            if ahead:
                prefetched += ahead
                issued += ahead
                for number in numbers:
                    if needs[number] > slot:
                        released[needs[number]] += sizes[number]
            if bounded and staging[bucket]:
                at_wait = sum(
                    sizes[number] for number in numbers if needs[number] > bucketing.wait_slot[bucket]
                )
                peak_at_wait = at_wait + staging[bucket] - issued
                while copies and copies[-1][0] <= peak_at_wait:
                    copies.pop()
                copies.append((peak_at_wait, bucket))
        else:
            if bounded and staging[bucket]:
                if not make_room(unsent + staging[bucket], True):
                    return _MUST_WAIT
                peak = max(peak, prefetched + pending_bytes + unsent + staging[bucket])
            unsent -= size[bucket]
            pending_bytes += size[bucket]
            pending.append(bucket)
        start(bucket)
        return _STARTED

    for slot in range(instance.slots):
        unsent += instance.ready_bytes[slot]
        prefetched -= released[slot]
        for bucket in fixed_here.get(slot, ()):
            if not inputs_are_there(bucket, True):
                return None
            start(bucket)
        state = [_STARTED] * len(groups)
        while True:
            best, forced = NOTHING, False
            for group in groups:
                if state[group] == _MUST_WAIT:
                    continue
                gather, reduction = (
                    gathers[group][gather_head[group]],
                    reductions[group][reduction_head[group]],
                )
                late = reduction_due[group][reduction_head[group]] <= slot
                bucket = reduction
                if state[group] == _STARTED:
                    late = late or gather_due[group][gather_head[group]] <= slot
                    if rank[gather] < rank[reduction]:
                        bucket = gather
                if bucket != NOTHING and (late or soft[bucket] <= slot) and rank[bucket] < rank[best]:
                    best, forced = bucket, late
            if best == NOTHING:
                break
            group = group_of[best]
            outcome = try_start(best, forced)
            if outcome == _STARTED:
                (gather_head if is_gather[best] else reduction_head)[group] += 1
                state = [_STARTED] * len(groups)
            else:
                state[group] = outcome if state[group] == _STARTED else _MUST_WAIT
        for group in groups:
            if (
                gather_due[group][gather_head[group]] <= slot
                or reduction_due[group][reduction_head[group]] <= slot
            ):
                return None
        due = due_here.get(slot)
        if due:
            if len(due) > 1:
                due.sort(key=lambda bucket: (end_ns[bucket], bucket))
            for bucket in due:
                if not waited[bucket]:
                    if bounded and staging[bucket] and is_gather[bucket]:
                        if not make_room(unsent + staging[bucket], True):
                            return None
                        peak = max(peak, prefetched + pending_bytes + unsent + staging[bucket])
                    wait(bucket)
        if bounded and prefetched + pending_bytes + unsent > budget and not make_room(unsent, True):
            return None
        if prefetched + pending_bytes + unsent > peak:
            peak = prefetched + pending_bytes + unsent
        if slot < instance.slots - 1:
            now += instance.region_ns[slot]
            if cutoff_ns is not None and now + instance.compute_after[slot + 1] > cutoff_ns:
                return None
    return Placement(now, events, begin_ns, end_ns, exposed_ns, queued_behind, peak)


def _suffix_min(values: list[int]) -> list[int]:
    """Least of each value and all after it; one more entry, larger than any slot, for the end."""
    out = [*values, UNBOUNDED]
    for at in range(len(values) - 1, -1, -1):
        if out[at + 1] < out[at]:
            out[at] = out[at + 1]
    return out
