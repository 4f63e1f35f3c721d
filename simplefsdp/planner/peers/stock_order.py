"""How Inductor's overlap scheduling orders starts, waits and compute.

Owns the rules of the scheduler (`OverlapScheduler` in `overlap_scheduling.py`, torch 2.13), before anything is merged.
Must not know FX or models, nor how collectives are bucketed.

Regions keep their order. Each, while it runs, first hides what is in flight, in the order of the starts; with the time
that is left it starts more. What may start so: a gather, if memory has room for it at every matrix product until its
use; a reduction whose gradient is there; an all-reduce between replicas whose reduce-scatter has arrived, unseen, and
is waited for then. A gather that nothing could hide starts where it is needed. A wait for a gather ends those for
everything of its group that started before. Starts and waits of reductions that nothing asks for stand in a queue, of
which only the head is looked at: a reduction behind its place in the code once half a GiB of its kind has gone by, a
wait once it is hidden. When compute is over the queue empties.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from inductor_passes.plan import GroupKey, Role
from simplefsdp.explainer.facts import GraphFacts
from simplefsdp.planner.peers.stock_memory import Item, Limits, Memory

REGION, START, WAIT = "region", "start", "wait"


class Step(NamedTuple):
    """A region that runs, or a start or wait of an item."""

    what: str
    number: int


@dataclasses.dataclass(frozen=True)
class Placed:
    """The order, and for each item the steps that hide it and what stays exposed."""

    steps: tuple[Step, ...]
    hidden_by: tuple[tuple[Step, ...], ...]
    exposed_ns: tuple[int, ...]


def place(facts: GraphFacts, items: Sequence[Item], limits: Limits) -> Placed:
    """Order starts and waits of items among the regions of a graph.

    Args:
        facts: a compiled graph.
        items: its collectives, in the order of the code.
        limits: what bounds prefetching.
    """
    placing = _Placing(facts, items, limits)
    placing.run()
    return Placed(tuple(placing.steps), tuple(map(tuple, placing.hidden_by)), tuple(placing.exposed))


# Places in the queue: what leads to a reduce-scatter comes before all else.
_FIRST, _SECOND = 0, 1
_CHAIN, _START, _WAIT = 0, 1, 2


class _Placing:
    def __init__(self, facts: GraphFacts, items: Sequence[Item], limits: Limits) -> None:
        self.steps: list[Step] = []
        self.hidden_by: list[list[Step]] = [[] for _ in items]
        self.exposed = [item.time_ns for item in items]
        self._facts, self._items, self._limits = facts, items, limits
        self._times = facts.problem.region_ns
        self._groups = sorted({item.key.group for item in items})
        self._heavy = [region.flops > 0 for region in facts.regions]
        self._products = sum(self._heavy)
        before = 0
        self._product_at: list[int] = []  # of each slot, number of the next matrix product
        for heavy in [*self._heavy, False]:
            self._product_at.append(before)
            before += heavy
        self._memory = Memory(facts, items, self._heavy, limits)
        # Products that nothing but a gradient comes of; all others lead to every later reduction.
        self._makes_gradient = {item.ready - 1 for item in items if item.need is None and item.ready}
        self._gathers_at: dict[int, list[int]] = {}
        self._made_at: dict[int, list[int]] = {}
        self._followers: dict[int, list[int]] = {}
        for number, item in enumerate(items):
            if item.need is not None:
                self._gathers_at.setdefault(item.need, []).append(number)
            elif not item.after:
                self._made_at.setdefault(item.ready, []).append(number)
            for other in item.after:
                self._followers.setdefault(other, []).append(number)
        # Of gathers, the first matrix product that needs them.
        self._product = [0 if item.need is None else self._product_at[item.need] for item in items]
        by_use = sorted(
            (number for number, item in enumerate(items) if item.need is not None),
            key=self._product.__getitem__,
        )
        # In the order in which they are looked at: gathers by their use, reductions as they were traced.
        self._waiting: dict[GroupKey, dict[int, None]] = {}
        for number in (*by_use, *(number for number, item in enumerate(items) if item.need is None)):
            self._waiting.setdefault(items[number].key, {})[number] = None
        self._started: set[int] = set()
        self._waited: set[int] = set()
        self._in_flight: dict[int, None] = {}
        self._in_flight_bytes = 0
        self._largest = max((item.size_bytes for item in items), default=0)
        self._queue: list[tuple[int, int, int]] = []  # rank, item, what
        self._queued: set[tuple[int, int]] = set()
        self._seen_bytes: dict[GroupKey, int] = {}
        self._is_blocked = _has_blocker(
            facts, items, max((at for at, heavy in enumerate(self._heavy) if heavy), default=-1)
        )
        self._at = 0
        self._product_now = 0

    def run(self) -> None:
        for at in range(len(self._times)):
            self._at = at
            self._memory.reached(at)
            self._make_room()
            for number in self._made_at.get(at, ()):
                self._enqueue(number, _CHAIN)
            self._take_from_queue()
            needed = self._gathers_at.get(at, ())
            products = {self._product[number] for number in needed}
            for number in [number for numbers in self._waiting.values() for number in numbers]:
                if self._items[number].need is not None and self._product[number] in products:
                    self._start(number)
            for number in needed:
                self._wait(number)
            self._run_region(at)
        self._at = len(self._times)
        for number in self._made_at.get(self._at, ()):
            self._enqueue(number, _CHAIN)
        self._take_from_queue(drain=True)

    def _run_region(self, at: int) -> None:
        if self._times[at]:
            step = Step(REGION, at)
            left = self._hide(step, dict.fromkeys(self._groups, self._times[at]))
            self._start_more(step, left)
        self.steps.append(Step(REGION, at))
        self._product_now += self._heavy[at]

    def _hide(self, step: Step, left: dict[str, int]) -> dict[str, int]:
        """Let a step hide what is in flight; what time it has left, by group."""
        for number in self._in_flight:
            group, exposed = self._items[number].key.group, self.exposed[number]
            hidden = min(exposed, left.get(group, 0))
            if hidden:
                self.exposed[number] -= hidden
                left[group] -= hidden
                self.hidden_by[number].append(step)
        return left

    def _start_more(self, step: Step, left: dict[str, int]) -> None:
        """Start what a step can still hide."""
        if not any(left.values()):
            return
        for number in self._candidates(left):
            group = self._items[number].key.group
            if number in self._started or not left.get(group) or not self._may_start(number, step):
                continue
            for before in self._items[number].after:
                self._wait(before)
            if self._items[number].need is None:
                self._enqueue(number, _START)
            else:
                self._memory.prefetched(number, self._product_now, self._product[number])
            self._start(number)
            hidden = min(self.exposed[number], left[group])
            self.exposed[number] -= hidden
            left[group] -= hidden
            self.hidden_by[number].append(step)
            if not any(left.values()):
                return

    def _candidates(self, left: Mapping[str, int]) -> Iterator[int]:
        """What might start, one kind after the other: the kind that has the most urgent one first. Of equally urgent
        ones, that of which most would be hidden."""
        for key in sorted((key for key, numbers in self._waiting.items() if numbers), key=self._urgency):
            numbers, limit = list(self._waiting[key]), left.get(key.group, 0)

            def use(number: int, limit: int = limit) -> int:
                return -min(limit, self.exposed[number])

            if self._items[numbers[0]].need is None:
                room = self._limits.in_flight_bytes - self._in_flight_bytes
                if room >= self._largest or self._at not in self._makes_gradient:
                    numbers = list(
                        itertools.takewhile(lambda number: self._items[number].ready <= self._at, numbers)
                    )
                yield from sorted(
                    (number for number in numbers if self._items[number].ready != self._at + 1), key=use
                )
                continue
            following = self._product_now + 1
            yield from sorted((number for number in numbers if self._product[number] == following), key=use)
            others = (number for number in numbers if self._product[number] != following)
            for _, equal in itertools.groupby(
                itertools.takewhile(self._is_near, others), self._product.__getitem__
            ):
                yield from sorted(equal, key=use)

    def _is_near(self, number: int) -> bool:
        return self._product[number] <= self._product_now + self._limits.distance

    def _urgency(self, key: GroupKey) -> tuple[int, int]:
        numbers = self._waiting[key]
        first = next(iter(numbers))
        if self._items[first].need is None:
            return (1 if key.kind == "reduce_scatter" else 3), first
        following = self._product_now + 1
        for number in numbers:
            if self._product[number] >= following:
                return (0 if self._product[number] == following else 2), number
        return 2, first

    def _may_start(self, number: int, step: Step) -> bool:
        item = self._items[number]
        if item.need is not None and not self._memory.has_room(
            number, self._at, self._product_now, self._product[number]
        ):
            return False
        # Whatever asks for room gets it, if only waits that cost nothing stand in the way; even what cannot start yet.
        limit = self._limits.in_flight_bytes
        while self._in_flight and limit - self._in_flight_bytes < item.size_bytes:
            oldest = next(iter(self._in_flight))
            if not self._has_arrived(oldest, step):
                return False
            self._wait(oldest)
        if limit - self._in_flight_bytes < item.size_bytes:
            return False
        if item.need is not None:
            return True
        return item.ready <= self._at and all(self._has_arrived(other, step) for other in item.after)

    def _has_arrived(self, number: int, step: Step) -> bool:
        """Whether a wait for it costs nothing, without the help of this step."""
        if number in self._waited:
            return True
        hidden = number in self._started and not self.exposed[number]
        return hidden and step not in self.hidden_by[number]

    def _start(self, number: int) -> None:
        item = self._items[number]
        self._started.add(number)
        if any(self._items[other].key == item.key for other in self._in_flight):
            # It is expected to share a bucket.
            self.exposed[number] = max(0, self.exposed[number] - item.alpha_ns)
        del self._waiting[item.key][number]
        self._in_flight[number] = None
        self._in_flight_bytes += item.size_bytes
        self.steps.append(Step(START, number))
        if item.need is None:
            self._enqueue(number, _WAIT)

    def _wait(self, number: int) -> None:
        if number not in self._in_flight:
            return
        item = self._items[number]
        earlier = []
        for other in self._in_flight:
            if other == number:
                break
            if self._items[other].key.group == item.key.group:
                earlier.append(other)
        for other in earlier:
            self._wait(other)
        step = Step(WAIT, number)
        if self.exposed[number]:
            others = {group: self.exposed[number] for group in self._groups if group != item.key.group}
            self._start_more(step, self._hide(step, others))
        self._in_flight_bytes -= item.size_bytes
        del self._in_flight[number]
        self._waited.add(number)
        self.steps.append(step)
        for follower in self._followers.get(number, ()):
            if all(other in self._waited for other in self._items[follower].after):
                self._enqueue(follower, _CHAIN if len(item.members) > 1 else _START)

    def _make_room(self) -> None:
        while self._in_flight and self._in_flight_bytes >= self._limits.in_flight_bytes:
            self._wait(next(iter(self._in_flight)))

    def _enqueue(self, number: int, what: int) -> None:
        if (number, what) in self._queued:
            return
        self._queued.add((number, what))
        key = self._items[number].key
        first = key.kind == "reduce_scatter" and what != _WAIT
        heapq.heappush(self._queue, (_FIRST if first else _SECOND, number, what))
        if what == _START:
            self._seen_bytes[key] = self._seen_bytes.get(key, 0) + self._items[number].size_bytes

    def _take_from_queue(self, *, drain: bool = False) -> None:
        """Take from the head what may go; without compute left, everything."""
        while self._queue and (drain or self._may_leave(*self._queue[0])):
            _, number, what = heapq.heappop(self._queue)
            if what == _CHAIN:
                if number not in self._started:
                    self._enqueue(number, _START)
            elif what == _WAIT:
                self._wait(number)
            else:
                self._start_batch(number)

    def _may_leave(self, rank: int, number: int, what: int) -> bool:
        item = self._items[number]
        if rank == _SECOND and self._is_blocked:
            return False
        if what == _WAIT:
            return number in self._waited or not self.exposed[number] or self._memory.is_over(self._at)
        if number in self._started:
            return True
        if what == _START:
            return self._seen_bytes[item.key] >= self._limits.batch_bytes
        return rank == _FIRST and item.ready < self._at

    def _start_batch(self, number: int) -> None:
        """Start what left the queue, and others of its kind that stand there."""
        key, size = self._items[number].key, self._items[number].size_bytes
        batch = [number]
        for entry in sorted(self._queue):
            other = entry[1]
            same = entry[2] == _START and other not in self._started and self._items[other].key == key
            if same and size + self._items[other].size_bytes <= self._limits.batch_bytes:
                size += self._items[other].size_bytes
                batch.append(other)
        for other in batch:
            if other not in self._started:
                self._seen_bytes[key] -= self._items[other].size_bytes
                self._start(other)


def _has_blocker(facts: GraphFacts, items: Sequence[Item], last_product: int) -> bool:
    """Whether an operator that needs nothing and leads to the last reduce-scatter alone stands at the head throughout.

    So it is where light operators make the last gradient: the zeros to which an embedding's gradient is added.
    """
    collectives = facts.problem.collectives
    for collective in (collectives[number] for item in items for number in item.members):
        if collective.role is Role.REDUCE and collective.earliest_issue > last_product:
            maker = facts.regions[collective.earliest_issue - 1]
            if not maker.flops or not collective.name.startswith(f"{maker.module}."):
                return True
    return False
