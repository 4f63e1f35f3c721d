"""What Inductor's overlap scheduling merges of the collectives it has placed.

Owns the rules of the bucketer (`OverlapPreservingBucketer` in `overlap_preserving_bucketer.py`, torch 2.13). Must not
know FX or models, nor how collectives were placed.

Each process group has a line of events: its starts and waits, matrix products, and whatever hides something. Two
collectives of one kind become one where the later start may move to the earlier or the earlier to the later, and the
waits alike, so that

* what hides either still lies between start and wait;
* no input is missing at the start, and nothing reads a result before the wait;
* no other collective of the group is forced to end before what hides it: whoever waits for one that started later
  waits for all before it.

In the group that shards, those with the least of their time hidden come first, and only starts that are near one
another in the graph are tried. Distances in the graph are not in the facts; `_nodes_of` says what is assumed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from inductor_passes.plan import GroupKey
from simplefsdp.explainer.facts import GraphFacts
from simplefsdp.planner.peers.stock_memory import Item
from simplefsdp.planner.peers.stock_order import REGION, START, WAIT, Placed, Step

LARGEST_BYTES = 2 * 2**30
"""Sent and received by one bucket."""
FAILURES = 20
"""After so many in a row no other member is tried; also the largest distance in the graph, in nodes."""
CANDIDATES = 200
"""Collectives of one kind that are tried for one bucket."""
REGION_NODES = 8


@dataclasses.dataclass(frozen=True)
class Event:
    """A start or a wait of a bucket, after so many regions."""

    slot: int
    bucket: int
    is_wait: bool


@dataclasses.dataclass(frozen=True)
class Merged:
    """Items of each bucket, and its start and wait in order."""

    buckets: tuple[tuple[int, ...], ...]
    events: tuple[Event, ...]


def merge(facts: GraphFacts, items: Sequence[Item], placed: Placed) -> Merged:
    """Merge what may be merged.

    Args:
        facts: the graph.
        items: its collectives.
        placed: where they are.
    """
    merging = _Merging(facts, items, placed)
    shards = _shard_groups(items)
    by_key: dict[GroupKey, list[int]] = {}
    for number, item in enumerate(items):
        by_key.setdefault(item.key, []).append(number)
    for group in dict.fromkeys(key.group for key in by_key):
        merging.enter(group)
        for key, numbers in by_key.items():
            if key.group == group:
                merging.find_buckets(numbers, exposed_first=group in shards)
    return merging.result()


@dataclasses.dataclass(eq=False)
class _Event:
    """A step on the line of a group."""

    at: int
    step: Step
    before: _Event | None = None
    after: _Event | None = None


class _Merging:
    def __init__(self, facts: GraphFacts, items: Sequence[Item], placed: Placed) -> None:
        self._items, self._placed = items, placed
        self._at = {step: at for at, step in enumerate(placed.steps)}
        self._heavy = [region.flops > 0 for region in facts.regions]
        self._slots: list[int] = []
        self._distance: list[int] = []  # nodes before each step
        regions = nodes = 0
        for step in placed.steps:
            self._slots.append(regions)
            regions += step.what == REGION
            nodes += _nodes_of(step, items)
            self._distance.append(nodes)
        used = {
            step for number, steps in enumerate(placed.hidden_by) for step in steps if self._is_hidden(number)
        }
        self._serves = {step.number for step in used if step.what == WAIT}
        self._bucket_of = [[number] for number in range(len(items))]
        # Of a bucket, at its first member: what hides it first and last.
        end = len(placed.steps)
        hiders = [[self._at[step] for step in steps] for steps in placed.hidden_by]
        self._own_first_hider = [min(its_hiders, default=end) for its_hiders in hiders]
        self._first_hider = list(self._own_first_hider)
        self._last_hider = [max(its_hiders, default=-1) for its_hiders in hiders]
        self._read_at: dict[int, int] = {}  # where a result is first read
        self._made_at: dict[int, int] = {}  # where the last input comes from
        self._start_of: dict[int, _Event] = {}
        self._wait_of: dict[int, _Event] = {}

    def _is_hidden(self, number: int) -> bool:
        return not self._placed.exposed_ns[number]

    def enter(self, group: str) -> None:
        """Lay out the line of a group."""
        for number, item in enumerate(self._items):
            if item.key.group == group:
                self._read_at[number], self._made_at[number] = (
                    self._first_read(number),
                    self._last_input(number),
                )
        last: _Event | None = None
        hiding: set[Step] = set()
        for at, step in enumerate(self._placed.steps):
            if step.what == REGION:
                takes_part = self._heavy[step.number] or step in hiding
            elif self._items[step.number].key.group == group:
                takes_part = True
                if step.what == START:
                    hiding |= set(self._placed.hidden_by[step.number])
            else:
                takes_part = step in hiding
            if not takes_part:
                continue
            event = _Event(at, step, before=last)
            if last is not None:
                last.after = event
            last = event
            if step.what == START and self._items[step.number].key.group == group:
                self._start_of[step.number] = event
            elif step.what == WAIT and self._items[step.number].key.group == group:
                self._wait_of[step.number] = event

    def _first_read(self, number: int) -> int:
        need = self._items[number].need
        if need is not None:
            return self._at[Step(REGION, need)]
        followers = (other for other, item in enumerate(self._items) if number in item.after)
        return min((self._at[Step(START, other)] for other in followers), default=len(self._at))

    def _last_input(self, number: int) -> int:
        item = self._items[number]
        if item.after:
            return max(self._wait_of[self._bucket_of[other][0]].at for other in item.after)
        if item.need is None and item.ready:
            return self._at[Step(REGION, item.ready - 1)]
        return -1

    def find_buckets(self, numbers: Sequence[int], *, exposed_first: bool) -> None:
        """Merge collectives of one kind."""
        starts = {number: self._at[Step(START, number)] for number in numbers}
        if exposed_first:
            ordered = sorted(numbers, key=lambda number: (self._hidden_share(number), starts[number]))
        else:
            ordered = sorted(numbers, key=starts.__getitem__)
        done: set[int] = set()
        for place, first in enumerate(ordered):
            if first in done or first in self._serves:
                continue
            done.add(first)
            bucket, failures = self._bucket_of[first], 0
            size = self._items[first].size_bytes
            for other in ordered[place + 1 : place + 1 + CANDIDATES]:
                if size + self._items[other].size_bytes > LARGEST_BYTES:
                    break
                if other in done:
                    continue
                distance = abs(self._distance[starts[other]] - self._distance[starts[first]])
                if exposed_first and distance > FAILURES:
                    continue
                if other not in self._serves and self._try(bucket, other):
                    bucket.append(other)
                    self._bucket_of[other] = bucket
                    size += self._items[other].size_bytes
                    done.add(other)
                    failures = 0
                else:
                    failures += 1
                    if failures >= FAILURES:
                        break

    def _hidden_share(self, number: int) -> float:
        time = self._items[number].time_ns
        return (time - self._placed.exposed_ns[number]) / time if time else 0.0

    def _try(self, bucket: list[int], other: int) -> bool:
        first = bucket[0]
        for start in (first, other):
            for wait in (other, first):
                if self._may_meet(bucket, other, start, wait):
                    self._meet(bucket, other, start, wait)
                    return True
        return False

    def _may_meet(self, bucket: list[int], other: int, start: int, wait: int) -> bool:
        """Whether the starts may meet at that of `start`, and the waits at that of `wait`."""
        first = bucket[0]
        begin, end = self._start_of[start].at, self._wait_of[wait].at
        if begin > min(self._wait_of[first].at, end):
            return False
        if max(self._made_at[first], self._made_at[other]) > begin:
            return False
        if min(self._read_at[first], self._read_at[other]) < end:
            return False
        if min(self._first_hider[first], self._first_hider[other]) <= begin:
            return False
        if max(self._last_hider[first], self._last_hider[other]) >= end:
            return False
        return self._keeps_others_hidden(bucket, other, start, wait)

    def _keeps_others_hidden(self, bucket: list[int], other: int, start: int, wait: int) -> bool:
        first = bucket[0]
        begin, end = self._start_of[start], self._wait_of[wait]
        busy = [(begin.at, end.at)]
        # Of what hides a collective the first is the one that another's wait cuts off most easily.
        hidden = [(begin.at, min(self._first_hider[first], self._first_hider[other]))]
        ours = {*bucket, other}
        latest = max(self._start_of[first].at, self._start_of[other].at)
        earliest = min(self._wait_of[first].at, self._wait_of[other].at)
        passed: list[_Event] = []
        event = begin.after
        while event is not None and event.at < latest:
            passed.append(event)
            event = event.after
        event = end.before
        while event is not None and event.at > earliest:
            passed.append(event)
            event = event.before
        for event in passed:
            number = event.step.number
            if event.step.what == REGION or number in ours or number not in self._start_of:
                continue
            its_begin = self._start_of[number].at
            busy.append((its_begin, self._wait_of[number].at))
            hidden.append((its_begin, self._own_first_hider[number]))
        return not any(outer[0] < inner[0] and inner[1] < outer[1] for inner in hidden for outer in busy)

    def _meet(self, bucket: list[int], other: int, start: int, wait: int) -> None:
        first = bucket[0]
        begin, end = self._start_of[start], self._wait_of[wait]
        for events, kept in ((self._start_of, begin), (self._wait_of, end)):
            for number in (first, other):
                if events[number] is not kept:
                    _unlink(events[number])
                events[number] = kept
        self._made_at[first] = max(self._made_at[first], self._made_at[other])
        self._read_at[first] = min(self._read_at[first], self._read_at[other])
        self._first_hider[first] = min(self._first_hider[first], self._first_hider[other])
        self._last_hider[first] = max(self._last_hider[first], self._last_hider[other])

    def result(self) -> Merged:
        """The buckets, and their starts and waits in order."""
        buckets = list({id(bucket): bucket for bucket in self._bucket_of}.values())
        ends = []
        for number, bucket in enumerate(buckets):
            ends.append((self._start_of[bucket[0]].at, number, False))
            ends.append((self._wait_of[bucket[0]].at, number, True))
        events = tuple(Event(self._slots[at], number, is_wait) for at, number, is_wait in sorted(ends))
        return Merged(tuple(map(tuple, buckets)), events)


def _nodes_of(step: Step, items: Sequence[Item]) -> int:
    """Nodes that a step has in the graph."""
    if step.what == REGION:
        return REGION_NODES
    members = len(items[step.number].members)
    if step.what == WAIT:
        return 2 if members == 1 else 3 + 3 * members  # it, and the views or copies out of it
    return 4 if members == 1 else 5 + 3 * members  # parameters, views, casts, the copy into one buffer, it


def _shard_groups(items: Sequence[Item]) -> set[str]:
    """The groups that the bucketer takes for those that shard: the first gather of each is of one parameter."""
    first: dict[str, Item] = {}
    for item in items:
        if item.need is not None:
            first.setdefault(item.key.group, item)
    return {group for group, item in first.items() if len(item.members) == 1}


def _unlink(event: _Event) -> None:
    if event.before is not None:
        event.before.after = event.after
    if event.after is not None:
        event.after.before = event.before
