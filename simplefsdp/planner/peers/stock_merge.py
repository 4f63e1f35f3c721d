"""What Inductor's overlap scheduling merges of the collectives it has placed.

Owns the rules of the bucketer (`OverlapPreservingBucketer` in `overlap_preserving_bucketer.py`, torch 2.13). Must not
know FX or models, nor how collectives were placed.

Each process group has a line of events: its starts and waits, matrix products, and whatever hides something. Two
collectives of one kind become one where the later start may move to the earlier or the earlier to the later, and the
waits alike, so that

* what hides either still lies between start and wait;
* nothing leads from one start to the other, or from one wait to the other: neither data nor the line;
* no other collective of the group is forced to end before what hides it: whoever waits for one that started later
  waits for all before it.

The pass forgets some of the order. What it takes out of a line for a trial and puts back is no longer bound to come
before its successor there; so a later trial may merge a reduction with one whose gradient is made after it, if part of
either stays exposed. What is merged then starts when all its inputs are there, and hides behind nothing (`_in_order`).

In the group that shards, those with the least of their time hidden come first, and only starts that are near one
another in the graph are tried. Distances in the graph are not in the facts; `_nodes_of` says what is assumed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from inductor_passes.plan import GroupKey, Role
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


class _Order:
    """What must come before what: by data, by what hides what, and by the lines of the groups.

    Every step of a bucket stands for all of them: whoever asks for one has the inputs of all.
    """

    def __init__(self, facts: GraphFacts, items: Sequence[Item], placed: Placed) -> None:
        self.at = {step: at for at, step in enumerate(placed.steps)}
        self.data = _data(facts, items)
        self.extra: dict[Step, dict[Step, None]] = {step: {} for step in placed.steps}
        self._equals: dict[Step, list[Step]] = {}
        for number, hiders in enumerate(placed.hidden_by):
            if not placed.exposed_ns[number]:
                for hider in hiders:
                    self.extra[hider][Step(START, number)] = None
                    self.extra[Step(WAIT, number)][hider] = None
        # Of each step a bit for each step that it needs, before there are lines.
        self.needs: dict[Step, int] = {}
        for step in placed.steps:
            bits = 0
            for other in (*self.data[step], *self.extra[step]):
                bits |= self.needs[other] | 1 << self.at[other]
            self.needs[step] = bits

    def are_bound(self, one: Step, other: Step) -> bool:
        """Whether either needs the other, lines left out."""
        return bool((self.needs[one] >> self.at[other] | self.needs[other] >> self.at[one]) & 1)

    def equals(self, step: Step) -> Sequence[Step]:
        """All steps that it is one with."""
        return self._equals.get(step, (step,))

    def join(self, one: Step, other: Step) -> None:
        """Make two steps one."""
        both = self._equals.setdefault(one, [one])
        both.append(other)
        self._equals[other] = both

    def part(self, other: Step) -> None:
        """Undo `join` for the step that joined."""
        self._equals.pop(other).remove(other)

    def leads(self, source: Step, target: Step) -> bool:
        """Whether the target, or what it needs, needs the source."""
        goal = self.equals(source)
        floor = min(self.at[step] for step in goal)
        known = 0  # a bit for what the source needs itself
        for step in goal:
            known |= self.needs[step]
        seen = bytearray(len(self.at))
        queue = [target]
        for found in queue:
            for step in self._equals.get(found, (found,)):
                for needs in (self.data[step], self.extra[step]):
                    for need in needs:
                        at = self.at[need]
                        if seen[at]:
                            continue
                        if need in goal:
                            return True
                        seen[at] = True
                        # What the source needs does not need it, nor does what was placed before it.
                        if known >> at & 1 or (at < floor and need not in self._equals):
                            continue
                        queue.append(need)
        return False


class _Merging:
    def __init__(self, facts: GraphFacts, items: Sequence[Item], placed: Placed) -> None:
        self._items, self._placed = items, placed
        self._order = _Order(facts, items, placed)
        self._at = self._order.at
        self._heavy = [region.flops > 0 for region in facts.regions]
        self._distance: list[int] = []  # nodes before each step
        nodes = 0
        for step in placed.steps:
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
        # What leads to whatever hides an item, as bits.
        self._hiders_need: list[int] = []
        for steps in placed.hidden_by:
            needs = 0
            for step in steps:
                needs |= self._order.needs[step]
            self._hiders_need.append(needs)
        self._start_of: dict[int, _Event] = {}
        self._wait_of: dict[int, _Event] = {}
        for group in dict.fromkeys(item.key.group for item in items):
            self._lay_out(group)

    def _is_hidden(self, number: int) -> bool:
        return not self._placed.exposed_ns[number]

    def _lay_out(self, group: str) -> None:
        """The line of a group."""
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
                self._order.extra[step][last.step] = None
            last = event
            if step.what == START and self._items[step.number].key.group == group:
                self._start_of[step.number] = event
            elif step.what == WAIT and self._items[step.number].key.group == group:
                self._wait_of[step.number] = event

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
        if self._conflict(bucket, other):
            return False
        first = bucket[0]
        for start in (first, other):
            for wait in (other, first):
                if self._keep_hidden(bucket, other, start, wait) and self._meet(first, other, start, wait):
                    return True
        return False

    def _conflict(self, bucket: Sequence[int], other: int) -> bool:
        """Whether a member needs the other one, or the other way round, before any line is looked at."""
        its_wait = self._at[Step(WAIT, other)]
        return any(
            self._order.are_bound(Step(START, number), Step(START, other))
            or self._order.are_bound(Step(WAIT, number), Step(WAIT, other))
            or self._hiders_need[number] >> its_wait & 1
            or self._hiders_need[other] >> self._at[Step(WAIT, number)] & 1
            for number in bucket
        )

    def _keep_hidden(self, bucket: list[int], other: int, start: int, wait: int) -> bool:
        """Whether all stay hidden if the starts meet at that of `start`, and the waits at that of `wait`."""
        first = bucket[0]
        begin, end = self._start_of[start].at, self._wait_of[wait].at
        if min(self._first_hider[first], self._first_hider[other]) <= begin:
            return False
        if max(self._last_hider[first], self._last_hider[other]) >= end:
            return False
        return self._keeps_others_hidden(bucket, other, start, wait)

    def _keeps_others_hidden(self, bucket: list[int], other: int, start: int, wait: int) -> bool:
        first, group = bucket[0], self._items[other].key.group
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
            if event.step.what == REGION or number in ours or self._items[number].key.group != group:
                continue
            its_begin = self._start_of[number].at
            busy.append((its_begin, self._wait_of[number].at))
            hidden.append((its_begin, self._own_first_hider[number]))
        return not _is_any_inside(hidden, busy)

    def _meet(self, first: int, other: int, start: int, wait: int) -> bool:
        """Let the starts meet at that of `start`, and the waits at that of `wait`, if no order forbids it."""
        moves = (
            (START, self._start_of, other if start == first else first, start),
            (WAIT, self._wait_of, other if wait == first else first, wait),
        )
        moved: list[tuple[Step, _Event]] = []
        for what, events, moving, _ in moves:
            one, two = Step(what, first), Step(what, other)
            moved.append((Step(what, moving), events[moving]))
            self._take_out(*moved[-1])
            if self._order.leads(one, two) or self._order.leads(two, one):
                self._put_back(*moved.pop())
                for step, event in moved:
                    self._order.part(Step(step.what, other))
                    self._put_back(step, event)
                return False
            self._order.join(one, two)
        for _, events, _, kept in moves:
            events[first] = events[other] = events[kept]
        self._first_hider[first] = min(self._first_hider[first], self._first_hider[other])
        self._last_hider[first] = max(self._last_hider[first], self._last_hider[other])
        return True

    def _take_out(self, step: Step, event: _Event) -> None:
        """Take an event out of its line, at which a step is."""
        before, after, extra = event.before, event.after, self._order.extra
        if before is not None:
            before.after = after
            extra[step].pop(before.step, None)
        if after is not None:
            after.before = before
            extra[after.step].pop(step, None)
        if before is not None and after is not None:
            extra[after.step][before.step] = None

    def _put_back(self, step: Step, event: _Event) -> None:
        """Put an event back that was just taken out. Its successor is no longer bound to it: so the pass does."""
        before, after, extra = event.before, event.after, self._order.extra
        if before is not None:
            before.after = event
            extra[step][before.step] = None
        if after is not None:
            after.before = event
            if before is None:
                extra[after.step][step] = None
            else:
                extra[after.step].pop(before.step, None)

    def result(self) -> Merged:
        """The buckets, and their starts and waits in order."""
        buckets = list({id(bucket): bucket for bucket in self._bucket_of}.values())
        number_of = {bucket[0]: number for number, bucket in enumerate(buckets)}
        events, slot = [], 0
        for step in _in_order(self._placed.steps, self._bucket_of, self._order):
            if step.what == REGION:
                slot += 1
            else:
                events.append(Event(slot, number_of[step.number], step.what == WAIT))
        return Merged(tuple(map(tuple, buckets)), tuple(events))


def _is_any_inside(inner: Iterable[tuple[int, int]], outer: Iterable[tuple[int, int]]) -> bool:
    """Whether any of the inner intervals begins after and ends before one of the outer ones."""
    waiting = sorted(outer, reverse=True)
    furthest = -1
    for begin, end in sorted(inner):
        while waiting and waiting[-1][0] < begin:
            furthest = max(furthest, waiting.pop()[1])
        if end < furthest:
            return True
    return False


def _in_order(steps: Sequence[Step], bucket_of: Sequence[Sequence[int]], order: _Order) -> list[Step]:
    """All steps, those of a bucket at its first member, where nothing comes before what it needs.

    Buckets stand where their first member started, their waits behind them; what has to wait comes right after what it
    waits for. What the lines demand and cannot have is left out.
    """

    def one(step: Step) -> Step:
        return step if step.what == REGION else Step(step.what, bucket_of[step.number][0])

    wanted: list[Step] = []
    for step in steps:
        if step.what == REGION or len(bucket_of[step.number]) == 1:
            wanted.append(step)
        elif step.what == START and one(step) == step:
            wanted += [step, Step(WAIT, step.number)]
    data, extra = (
        {
            step: dict.fromkeys(one(need) for equal in order.equals(step) for need in needs[equal])
            for step in wanted
        }
        for needs in (order.data, order.extra)
    )
    for step in wanted:
        extra[step].pop(step, None)
    done: dict[Step, None] = {}
    waiting: dict[Step, list[Step]] = {}
    pending = wanted[::-1]
    while len(done) < len(wanted):
        if not pending:
            pending.append(
                next(step for step in wanted if step not in done and data[step].keys() <= done.keys())
            )
            extra[pending[-1]] = {}
        step = pending.pop()
        if step in done:
            continue
        missing = [need for need in (*data[step], *extra[step]) if need not in done]
        if missing:
            waiting.setdefault(missing[-1], []).append(step)
            continue
        done[step] = None
        pending += reversed(waiting.pop(step, ()))
    return list(done)


def _data(facts: GraphFacts, items: Sequence[Item]) -> dict[Step, tuple[Step, ...]]:
    """Of each step those whose results it reads. Products that make a gradient lead to nothing else; all other regions
    depend on those before."""
    collectives = facts.problem.collectives
    makers = {
        item.earliest_issue - 1
        for item in collectives
        if item.role is Role.REDUCE and not item.depends_on and item.earliest_issue
    }
    read: dict[int, list[Step]] = {}
    data: dict[Step, tuple[Step, ...]] = {}
    for number, item in enumerate(items):
        made = {collectives[member].earliest_issue - 1 for member in item.members}
        if item.need is not None:
            data[Step(START, number)] = ()
            read.setdefault(item.need, []).append(Step(WAIT, number))
        elif item.after:
            data[Step(START, number)] = tuple(Step(WAIT, other) for other in item.after)
        else:
            data[Step(START, number)] = tuple(Step(REGION, at) for at in sorted(made) if at >= 0)
        data[Step(WAIT, number)] = (Step(START, number),)
    last: tuple[Step, ...] = ()
    for at, region in enumerate(facts.regions):
        data[Step(REGION, at)] = (*last, *read.get(at, ()))
        if not (region.flops and at in makers):
            last = (Step(REGION, at),)
    return data


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
