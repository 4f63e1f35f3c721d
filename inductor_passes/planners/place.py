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

A gather fits when, with it, the budget holds in every region up to its use: gathers in flight, reductions on
their way, the gradients that buckets still being filled will hold by then, and the copies of gather buckets
in flight when they are taken apart.

A gather bucket is waited for, in step 2 as in step 3, only when the values copied out of it fit the budget, too.

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
    return _Sweep(instance, bucketing, order, not_before or bucketing.earliest).run(cutoff_ns)


class _Queue:
    """The order of one process group: its gathers, its reductions, and who is next.

    ``gather_due`` and ``reduction_due`` are, for each position, the slot by which that one must have started
    so that it and all behind it are in time.
    """

    def __init__(self) -> None:
        self.gathers: list[int] = []
        self.reductions: list[int] = []
        self.gather = self.reduction = 0
        self.state = _STARTED

    def close(self, latest: Sequence[int]) -> None:
        """To be called once all buckets are in."""
        self.gather_due = _suffix_min([latest[bucket] for bucket in self.gathers])
        self.reduction_due = _suffix_min([latest[bucket] for bucket in self.reductions])
        self.gathers.append(NOTHING)
        self.reductions.append(NOTHING)

    def next_slot(self, rank: Sequence[int], not_before: Sequence[int]) -> int:
        """First slot at which the next in order, or one that can wait no longer, may start."""
        gather, reduction = self.gathers[self.gather], self.reductions[self.reduction]
        bucket = gather if rank[gather] < rank[reduction] else reduction
        due = min(self.gather_due[self.gather], self.reduction_due[self.reduction])
        return due if bucket == NOTHING else min(not_before[bucket], due)

    def is_overdue(self, slot: int) -> bool:
        """Whether something that must have started by ``slot`` has not."""
        return self.gather_due[self.gather] <= slot or self.reduction_due[self.reduction] <= slot


class _Sweep:
    """State of one placing: the clock, the links, the bytes in flight."""

    def __init__(
        self, instance: Instance, bucketing: Bucketing, order: Sequence[int], not_before: Sequence[int]
    ) -> None:
        self.instance = instance
        self.buckets = bucketing
        self.not_before = not_before
        self.needs = instance.needs
        self.sizes = instance.sizes
        self.budget = instance.budget
        self.bounded = instance.budget < UNBOUNDED
        count = len(bucketing.members)
        self.rank = [count] * (count + 1)
        self.queues = [_Queue() for _ in instance.groups]
        for at, bucket in enumerate(order):
            queue = self.queues[bucketing.group[bucket]]
            (queue.gathers if bucketing.is_gather[bucket] else queue.reductions).append(bucket)
            self.rank[bucket] = at
        for queue in self.queues:
            queue.close(bucketing.latest)
        self.slot = 0
        self.wakes = 0
        self.now = 0
        self.free_at = [0] * len(self.queues)
        self.last_of = [-1] * len(self.queues)
        self.begin_ns = [0] * count
        self.end_ns = [-1] * count
        self.exposed_ns = [0] * count
        self.queued_behind = [-1] * count
        self.waited = [False] * count
        self.events: list[tuple[int, int, bool]] = []
        self.prefetched = 0
        self.released = [0] * instance.slots
        self.unsent = 0
        self.pending_bytes = 0
        self.pending: deque[int] = deque()
        self.issued = 0
        # Gather buckets to be copied apart: (bytes in flight then, less those issued since, bucket), falling.
        self.copies: deque[tuple[int, int]] = deque()
        self.peak = 0

    def run(self, cutoff_ns: int | None) -> Placement | None:
        instance, buckets = self.instance, self.buckets
        fixed_here: dict[int, list[int]] = {}
        for bucket in range(buckets.movable, len(buckets.members)):
            fixed_here.setdefault(buckets.earliest[bucket], []).append(bucket)
        due_here: dict[int, list[int]] = {}
        for bucket, slot in enumerate(buckets.wait_slot):
            due_here.setdefault(slot, []).append(bucket)
        for slot in range(instance.slots):
            self.slot = slot
            self.unsent += instance.ready_bytes[slot]
            self.prefetched -= self.released[slot]
            for bucket in fixed_here.get(slot, ()):
                if not self._inputs_are_there(bucket, True):
                    return None
                self._start(bucket)
            if self.wakes <= slot and not self._start_all_that_may():
                return None
            if slot in due_here and not self._wait_for(due_here[slot]):
                return None
            in_flight = self.prefetched + self.pending_bytes + self.unsent
            if in_flight > self.budget and not self._make_room(self.unsent, True):
                return None
            self.peak = max(self.peak, self.prefetched + self.pending_bytes + self.unsent)
            if slot < instance.slots - 1:
                self.now += instance.region_ns[slot]
                if cutoff_ns is not None and self.now + instance.compute_after[slot + 1] > cutoff_ns:
                    return None
        return Placement(
            self.now, self.events, self.begin_ns, self.end_ns, self.exposed_ns, self.queued_behind, self.peak
        )

    def _start_all_that_may(self) -> bool:
        """Step 2 of the rule; ``False`` when a bucket that can wait no longer did not start."""
        for queue in self.queues:
            queue.state = _STARTED
        while True:
            best, forced = NOTHING, False
            for queue in self.queues:
                bucket, late = self._next_of(queue)
                if self.rank[bucket] < self.rank[best]:
                    best, forced = bucket, late
            if best == NOTHING:
                break
            queue = self.queues[self.buckets.group[best]]
            gather = self.buckets.is_gather[best]
            outcome = self._try_gather(best, forced) if gather else self._try_reduction(best, forced)
            if outcome == _STARTED:
                self._start(best)
                if gather:
                    queue.gather += 1
                else:
                    queue.reduction += 1
                for other in self.queues:
                    other.state = _STARTED
            else:
                queue.state = outcome if queue.state == _STARTED else _MUST_WAIT
        self.wakes = UNBOUNDED
        for queue in self.queues:
            if queue.is_overdue(self.slot):
                return False
            blocked = queue.state != _STARTED
            self.wakes = min(
                self.wakes, self.slot + 1 if blocked else queue.next_slot(self.rank, self.not_before)
            )
        return True

    def _next_of(self, queue: _Queue) -> tuple[int, bool]:
        """The bucket of a queue to try now, ``NOTHING`` for none, and whether it can wait no longer."""
        if queue.state == _MUST_WAIT:
            return NOTHING, False
        bucket = queue.reductions[queue.reduction]
        late = queue.reduction_due[queue.reduction] <= self.slot
        if queue.state == _STARTED:
            late = late or queue.gather_due[queue.gather] <= self.slot
            gather = queue.gathers[queue.gather]
            if self.rank[gather] < self.rank[bucket]:
                bucket = gather
        if bucket == NOTHING or (self.not_before[bucket] > self.slot and not late):
            return NOTHING, False
        return bucket, late

    def _try_gather(self, bucket: int, forced: bool) -> int:
        buckets, slot = self.buckets, self.slot
        if buckets.earliest[bucket] > slot or not self._inputs_are_there(bucket, forced):
            return _MUST_WAIT
        numbers = buckets.members[bucket]
        ahead = buckets.size_bytes[bucket]
        if buckets.latest[bucket] <= slot:
            ahead = self._bytes_needed_after(numbers, slot)
        if ahead and self.bounded:
            last = max([self.needs[number] for number in numbers]) - 1
            reserve = max(self.unsent, buckets.reserved.most(slot, last)) + self._copies_beyond_prefetched()
            if not self._make_room(ahead + reserve, False) and not (
                forced and self._make_room(ahead + self.unsent, True)
            ):
                return _NO_ROOM
        self.prefetched += ahead
        self.issued += ahead
        for number in numbers:
            if self.needs[number] > slot:
                self.released[self.needs[number]] += self.sizes[number]
        if self.bounded and buckets.staging_bytes[bucket]:
            later = self._bytes_needed_after(numbers, buckets.wait_slot[bucket])
            at_copy = later + buckets.staging_bytes[bucket] - self.issued
            while self.copies and self.copies[-1][0] <= at_copy:
                self.copies.pop()
            self.copies.append((at_copy, bucket))
        return _STARTED

    def _try_reduction(self, bucket: int, forced: bool) -> int:
        buckets = self.buckets
        if buckets.earliest[bucket] > self.slot or not self._inputs_are_there(bucket, forced):
            return _MUST_WAIT
        if not self._copy_fits(buckets.staging_bytes[bucket], True):
            return _MUST_WAIT
        size = buckets.size_bytes[bucket]
        self.unsent -= size
        self.pending_bytes += size
        self.pending.append(bucket)
        return _STARTED

    def _wait_for(self, due: list[int]) -> bool:
        """Step 3 of the rule, first what is done first; ``False`` when copies do not fit the budget."""
        if len(due) > 1:
            due.sort(key=lambda bucket: (self.end_ns[bucket], bucket))
        return all(self.waited[bucket] or self._take(bucket, True) for bucket in due)

    def _start(self, bucket: int) -> None:
        buckets = self.buckets
        self.events.append((self.slot, bucket, False))
        self.now += buckets.copy_in_ns[bucket] + self.instance.problem.issue_ns
        group = buckets.group[bucket]
        begin = max(self.now, self.free_at[group])
        self.begin_ns[bucket] = begin
        self.end_ns[bucket] = self.free_at[group] = begin + buckets.duration_ns[bucket]
        self.queued_behind[bucket] = self.last_of[group]
        self.last_of[group] = bucket

    def _take(self, bucket: int, at_any_cost: bool) -> bool:
        """Wait for a bucket when what is copied out of it fits the budget; say whether it does."""
        buckets = self.buckets
        if buckets.is_gather[bucket] and not self._copy_fits(buckets.staging_bytes[bucket], at_any_cost):
            return False
        self._wait(bucket)
        return True

    def _wait(self, bucket: int) -> None:
        self.events.append((self.slot, bucket, True))
        self.waited[bucket] = True
        if self.end_ns[bucket] > self.now:
            self.exposed_ns[bucket] = self.end_ns[bucket] - self.now
            self.now = self.end_ns[bucket]
        self.now += self.buckets.copy_out_ns[bucket]
        if not self.buckets.is_gather[bucket]:
            self.pending_bytes -= self.buckets.size_bytes[bucket]

    def _inputs_are_there(self, bucket: int, forced: bool) -> bool:
        """Whether all results a bucket depends on are awaited; awaits those that are done, or all if
        forced, as far as their copies fit."""
        for other in self.buckets.depends_on[bucket]:
            if self.end_ns[other] < 0:
                return False
            if not self.waited[other]:
                if self.end_ns[other] > self.now and not forced:
                    return False
                if not self._take(other, forced):
                    return False
        return True

    def _make_room(self, extra: int, at_any_cost: bool) -> bool:
        """Wait for pending reductions, oldest first, until ``extra`` more bytes fit; say whether they do.

        Unless at any cost, only for those that are done.
        """
        while self.prefetched + self.pending_bytes + extra > self.budget:
            while self.pending and self.waited[self.pending[0]]:
                self.pending.popleft()
            if not self.pending or (self.end_ns[self.pending[0]] > self.now and not at_any_cost):
                return False
            self._wait(self.pending.popleft())
        return True

    def _copy_fits(self, staging: int, at_any_cost: bool) -> bool:
        """Make room for the copies of a bucket, as :meth:`_make_room` does; say whether there is."""
        if staging == 0 or not self.bounded:
            return True
        if not self._make_room(self.unsent + staging, at_any_cost):
            return False
        self.peak = max(self.peak, self.prefetched + self.pending_bytes + self.unsent + staging)
        return True

    def _copies_beyond_prefetched(self) -> int:
        """How far the most bytes at a later copy of a gather bucket in flight exceed those in flight now."""
        while self.copies and self.waited[self.copies[0][1]]:
            self.copies.popleft()
        return max(0, self.copies[0][0] + self.issued - self.prefetched) if self.copies else 0

    def _bytes_needed_after(self, numbers: Sequence[int], slot: int) -> int:
        return sum([self.sizes[number] for number in numbers if self.needs[number] > slot])


def _suffix_min(values: list[int]) -> list[int]:
    """Least of each value and all after it; one more entry, larger than any slot, for the end."""
    out = [*values, UNBOUNDED]
    for at in range(len(values) - 1, -1, -1):
        if out[at + 1] < out[at]:
            out[at] = out[at + 1]
    return out
