"""Which compute to move under collectives that stay exposed: a pure function from tasks to a new order of them.

Owns the problem, its judge and its planner. Must not know graphs, torch, buckets or gathered parameters: collectives
that can be prefetched are none of its business and come as floating tasks without a time.

The case it is made for, backward of a tensor-parallel layer, found and moved (dX feeds the reduction ``~~``, dW
feeds nothing but a gradient)::

    compute   |dW2|dX2|......|dW1|dX1|......|         compute   |dX2|dW2|.|dX1|dW1|.|
    group             |~~~~~~|       |~~~~~~|         group         |~~~~~~|  |~~~~~~|

The rule, in one sweep over the found order that keeps a clock, the process groups and the live bytes:

* what the next collective needs runs in the order found; a heavy task that it does not need is *held back*;
* collectives are awaited when their result is needed, or once they have ended;
* before a wait that would block, held-back tasks run (and, if the policy says so, later tasks whose inputs exist);
* the oldest held-back task runs when too many are held, or when live bytes would pass the limit.

How many may be held, which of them fills a gap, and whether later tasks may fill it make a policy. Several are tried;
the shortest order within the limit wins, the order found being one of them.
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
import itertools
from collections.abc import Sequence

from inductor_passes.timeline import Compute, Node, Start, Wait, simulate

_CAPS = (1, 2, 4, 8, 16, 32, 1 << 30)
"""How many tasks a policy may hold back, tried one by one; the last is no limit."""
_LOOKED_AT = 32
"""How many tasks are looked at to fill one gap: more than a few layers hold ready, few enough to be quick."""
_FULL_SEARCH_TASKS = 400
"""Problems up to this size are tried with every combination of choices, larger ones with one choice at a time."""


class Kind(enum.Enum):
    """What a task does on the machine of ``timeline``."""

    COMPUTE = "compute"
    START = "start"
    WAIT = "wait"


class Mobility(enum.Enum):
    """Where a compute task may go. Starts keep their order; waits go where they are needed."""

    MOVES = "moves"
    """Anywhere its inputs and readers allow: matrix products and the like."""
    ORDERED = "ordered"
    """Keeps its order among the ordered ones, unless what it reads was held back."""
    PINNED = "pinned"
    """Keeps its order among the pinned ones and the starts: it draws random numbers, or has side effects."""
    FLOATS = "floats"
    """Goes with whoever reads it."""


@dataclasses.dataclass(frozen=True)
class Task:
    """One task of the order found; its number is its position.

    Args:
        kind: What it does.
        duration_ns: Time on the compute stream; of a start, the time of the collective; of a wait 0.
        inputs: Earlier tasks that must have run before. Those of a wait hold one start.
        mobility: Where it may go.
        group: Of a start, the process group it queues in.
    """

    kind: Kind
    duration_ns: int = 0
    inputs: tuple[int, ...] = ()
    mobility: Mobility = Mobility.ORDERED
    group: str = ""


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Memory that lives from its writer to its last reader.

    Args:
        size_bytes: Its size.
        writer: The task that allocates it, ``None`` for memory that is there from the beginning.
        readers: Tasks that read it.
        kept: Whether it outlives all tasks.
    """

    size_bytes: int
    writer: int | None
    readers: tuple[int, ...]
    kept: bool = False


@dataclasses.dataclass(frozen=True)
class MotionProblem:
    """Tasks in the order found, and the memory they use.

    Raises:
        ValueError: A task needs one that does not stand before it, or a wait needs no single start.
    """

    tasks: tuple[Task, ...]
    buffers: tuple[Buffer, ...] = ()

    def __post_init__(self) -> None:
        for number, task in enumerate(self.tasks):
            if any(not 0 <= source < number for source in task.inputs):
                raise ValueError(f"task {number} needs one of {task.inputs}, which does not stand before it")
            if task.kind is Kind.WAIT and len(self.starts_of(number)) != 1:
                raise ValueError(f"wait {number} must need one start, got {self.starts_of(number)}")

    def starts_of(self, wait: int) -> list[int]:
        """The starts that a wait needs directly."""
        return [source for source in self.tasks[wait].inputs if self.tasks[source].kind is Kind.START]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What an order costs, all modelled: time of the step, idle time of the compute stream, most live bytes."""

    step_ns: int
    exposed_ns: int
    peak_bytes: int


@dataclasses.dataclass(frozen=True)
class Motion:
    """The order chosen. ``order`` holds the numbers of all tasks; ``moved`` those that crossed a start or a wait."""

    order: tuple[int, ...]
    moved: tuple[int, ...]
    before: Outcome
    after: Outcome


def plan_motion(problem: MotionProblem, extra_bytes: int | None = 0) -> Motion:
    """Choose an order of the tasks. Never longer than the order found.

    Args:
        problem: What may move.
        extra_bytes: By how much the most live bytes may rise above those of the order found; ``None`` is no limit.

    Returns:
        The order; the one found, with nothing moved, where none that keeps the limit is shorter.
    """
    found = tuple(range(len(problem.tasks)))
    before = judge(problem, found)
    best, best_key = found, (before.step_ns, before.peak_bytes)
    if before.exposed_ns == 0 or not any(task.kind is Kind.START for task in problem.tasks):
        return Motion(found, (), before, before)
    limit = None if extra_bytes is None else before.peak_bytes + extra_bytes
    facts = _Facts(problem)

    def better(policy: _Policy) -> bool:
        nonlocal best, best_key
        order = _Sweep(facts, policy, limit).run()
        outcome = judge(problem, order)
        key = (outcome.step_ns, outcome.peak_bytes)
        if key >= best_key or (limit is not None and outcome.peak_bytes > limit):
            return False
        best, best_key = tuple(order), key
        return True

    choices = list(itertools.product((False, True), repeat=2))
    if len(problem.tasks) <= _FULL_SEARCH_TASKS:
        for cap, (fit, ahead) in itertools.product(_CAPS, choices):
            better(_Policy(cap, fit, ahead))
    else:
        favourite = choices[0]
        for choice in choices:
            if better(_Policy(8, *choice)):
                favourite = choice
        for cap in _CAPS:
            better(_Policy(cap, *favourite))
    return Motion(best, tuple(_moved(problem, best)), before, judge(problem, best))


def judge(problem: MotionProblem, order: Sequence[int]) -> Outcome:
    """What an order costs on the machine of ``timeline``. O(tasks + buffers)."""
    alloc = [0] * len(order)
    free = [0] * len(order)
    position = {task: at for at, task in enumerate(order)}
    initial = 0
    for buffer in problem.buffers:
        if buffer.writer is None:
            initial += buffer.size_bytes
        else:
            alloc[position[buffer.writer]] += buffer.size_bytes
        users = [position[reader] for reader in buffer.readers]
        users += [] if buffer.writer is None else [position[buffer.writer]]
        if users and not buffer.kept:
            free[max(users)] += buffer.size_bytes
    nodes: list[Node] = []
    for at, number in enumerate(order):
        task = problem.tasks[number]
        if task.kind is Kind.COMPUTE:
            nodes.append(Compute(task.duration_ns, alloc[at], free[at]))
        elif task.kind is Kind.START:
            nodes.append(Start(number, task.group, task.duration_ns, 0, alloc[at], free[at]))
        else:
            nodes.append(Wait(problem.starts_of(number)[0], alloc[at], free[at]))
    timeline = simulate(nodes, initial)
    return Outcome(timeline.step_ns, timeline.exposed_ns, max(timeline.peak_bytes, initial))


def check_motion(problem: MotionProblem, order: Sequence[int]) -> None:
    """Check an order without sharing code with the sweep that makes it.

    Raises:
        ValueError: A task is lost or repeated, stands before one it needs, or two starts or pinned tasks
            changed places.
    """
    if sorted(order) != list(range(len(problem.tasks))):
        raise ValueError("the order is no permutation of the tasks")
    position = {task: at for at, task in enumerate(order)}
    for number, task in enumerate(problem.tasks):
        for source in task.inputs:
            if position[source] > position[number]:
                raise ValueError(f"task {number} stands before {source}, which it needs")
    anchors = [position[number] for number, task in enumerate(problem.tasks) if is_anchor(task)]
    if anchors != sorted(anchors):
        raise ValueError("starts or pinned tasks changed places")


def is_anchor(task: Task) -> bool:
    """Whether a task keeps its order among all such tasks: a start, or a pinned task."""
    return task.kind is Kind.START or task.mobility is Mobility.PINNED


def is_light(task: Task) -> bool:
    """Whether a task follows others at once: compute that neither moves by itself nor keeps its place."""
    return task.kind is Kind.COMPUTE and task.mobility in (Mobility.ORDERED, Mobility.FLOATS)


def _moved(problem: MotionProblem, order: Sequence[int]) -> list[int]:
    """Tasks that may move and run under other collectives than before, in the order found."""
    before, after = _under(problem, range(len(order))), _under(problem, order)
    return [
        number
        for number, task in enumerate(problem.tasks)
        if task.mobility is Mobility.MOVES and before[number] != after[number]
    ]


def _under(problem: MotionProblem, order: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Of each task that moves, the collectives that are started and not yet awaited when it runs."""
    flying: list[int] = []
    under = {}
    for number in order:
        task = problem.tasks[number]
        if task.kind is Kind.START:
            flying.append(number)
        elif task.kind is Kind.WAIT:
            flying.remove(problem.starts_of(number)[0])
        elif task.mobility is Mobility.MOVES:
            under[number] = tuple(flying)
    return under


@dataclasses.dataclass(frozen=True)
class _Policy:
    """Choices of one sweep.

    Args:
        cap: How many tasks may be held back.
        fit: Fill a gap with the longest task that fits, not with the oldest.
        ahead: Fill gaps with tasks that were found later, too.
    """

    cap: int
    fit: bool
    ahead: bool


class _Facts:
    """What all sweeps over a problem share."""

    def __init__(self, problem: MotionProblem) -> None:
        self.tasks = tasks = problem.tasks
        count = len(tasks)
        self.users: list[list[int]] = [[] for _ in tasks]
        for number, task in enumerate(tasks):
            for source in dict.fromkeys(task.inputs):
                self.users[source].append(number)
        self.start_of = {
            number: problem.starts_of(number)[0]
            for number, task in enumerate(tasks)
            if task.kind is Kind.WAIT
        }
        # The first anchor that needs a task, by the anchors' own numbering.
        anchors = [number for number, task in enumerate(tasks) if is_anchor(task)]
        number_of = {number: at for at, number in enumerate(anchors)}
        self.due = [len(anchors)] * count
        # Whether a task is light and leads to nothing but light tasks and results of the program.
        self.tail = [False] * count
        for number in reversed(range(count)):
            users = self.users[number]
            first = min((self.due[user] for user in users), default=len(anchors))
            self.due[number] = number_of.get(number, first)
            self.tail[number] = is_light(tasks[number]) and all(self.tail[user] for user in users)
        self.writes: list[list[int]] = [[] for _ in tasks]
        self.reads: list[list[int]] = [[] for _ in tasks]
        self.buffers = problem.buffers
        self.readers = [len(set(buffer.readers)) for buffer in problem.buffers]
        for at, buffer in enumerate(problem.buffers):
            if buffer.writer is not None:
                self.writes[buffer.writer].append(at)
            for reader in dict.fromkeys(buffer.readers):
                self.reads[reader].append(at)
        self.initial_bytes = sum(buffer.size_bytes for buffer in problem.buffers if buffer.writer is None)


class _Sweep:
    """One sweep by the rule of the module docstring."""

    def __init__(self, facts: _Facts, policy: _Policy, limit: int | None) -> None:
        self._facts = facts
        self._tasks = facts.tasks
        self._policy = policy
        self._limit = limit
        self._order: list[int] = []
        count = len(facts.tasks)
        self._emitted = [False] * count
        # Inputs that have neither run nor could run at once.
        self._missing = [len(set(task.inputs)) for task in facts.tasks]
        self._available = [False] * count  # run, or could run at once without a task that moves or a wait
        self._ready: list[int] = []  # tasks that move and could run now, ascending
        self._held: list[int] = []  # tasks passed by and not run yet, ascending
        self._flying: dict[int, int] = {}  # wait of each collective in flight -> when it ends
        self._ends: dict[int, int] = {}
        self._free_at: dict[str, int] = {}
        self._now = 0
        self._live = facts.initial_bytes
        self._unread = list(facts.readers)
        self._anchors_passed = 0

    def run(self) -> list[int]:
        """The order of all tasks."""
        for number in [number for number, missing in enumerate(self._missing) if missing == 0]:
            self._offer(number)
        for number, task in enumerate(self._tasks):
            if self._emitted[number] or task.kind is Kind.WAIT or task.mobility is Mobility.FLOATS:
                continue
            if self._facts.due[number] > self._anchors_passed:
                if task.mobility is Mobility.MOVES:
                    self._hold(number)
                    continue
                if self._missing[number]:
                    continue  # it follows something that was held back, or a wait
            self._make_room(number)
            self._release(number)
        for number in range(len(self._tasks)):
            self._release(number)
        return self._order

    def _hold(self, number: int) -> None:
        self._held.append(number)
        while len(self._held) > self._policy.cap and self._run_oldest():
            pass

    def _run_oldest(self) -> bool:
        """Run the oldest held-back task that can run; ``False`` if none can."""
        oldest = next((number for number in self._held if self._missing[number] == 0), None)
        if oldest is not None:
            self._release(oldest)
        return oldest is not None

    def _make_room(self, number: int) -> None:
        if self._limit is None:
            return
        needed = sum(self._facts.buffers[buffer].size_bytes for buffer in self._facts.writes[number])
        while self._live + needed > self._limit and self._run_oldest():
            pass

    def _release(self, number: int) -> None:
        """Run a task after all that it needs."""
        stack = [number]
        while stack:
            current = stack[-1]
            if self._emitted[current]:
                stack.pop()
                continue
            missing = [source for source in self._tasks[current].inputs if not self._emitted[source]]
            if missing:
                stack += reversed(missing)
                continue
            stack.pop()
            if self._tasks[current].kind is Kind.WAIT:
                self._fill(current)
            self._emit(current)

    def _fill(self, wait: int) -> None:
        """Run other tasks until a collective ends."""
        end = self._ends[self._facts.start_of[wait]]
        while self._now < end:
            chosen = self._choose(end - self._now)
            if chosen is None:
                return
            self._release(chosen)

    def _choose(self, gap_ns: int) -> int | None:
        ready = self._ready if self._policy.ahead else (n for n in self._held if self._missing[n] == 0)
        candidates = list(itertools.islice(ready, _LOOKED_AT))
        if not candidates:
            return None
        if not self._policy.fit:
            return candidates[0]
        fitting = [number for number in candidates if self._tasks[number].duration_ns <= gap_ns]
        if fitting:
            return max(fitting, key=lambda number: (self._tasks[number].duration_ns, -number))
        return min(candidates, key=lambda number: (self._tasks[number].duration_ns, number))

    def _emit(self, number: int) -> None:
        if self._emitted[number]:
            return
        pending = [number]
        while pending:
            current = pending.pop()
            self._emitted[current] = True
            self._order.append(current)
            self._advance_clock(current)
            self._account(current)
            self._offer(current)
            for user in self._facts.users[current]:
                if self._facts.tail[user] and self._can_run(user):
                    pending.append(user)
            pending += [
                wait for wait, end in self._flying.items() if end <= self._now and self._can_run(wait)
            ]
            pending = [item for item in dict.fromkeys(pending) if not self._emitted[item]]

    def _can_run(self, number: int) -> bool:
        return not self._emitted[number] and all(self._emitted[s] for s in self._tasks[number].inputs)

    def _advance_clock(self, number: int) -> None:
        task = self._tasks[number]
        if task.kind is Kind.COMPUTE:
            self._now += task.duration_ns
        elif task.kind is Kind.START:
            end = max(self._now, self._free_at.get(task.group, 0)) + task.duration_ns
            self._free_at[task.group] = self._ends[number] = end
            for user in self._facts.users[number]:
                if self._facts.start_of.get(user) == number:
                    self._flying[user] = end
        else:
            self._now = max(self._now, self._ends[self._facts.start_of[number]])
            self._flying.pop(number, None)
        if is_anchor(task):
            self._anchors_passed += 1

    def _account(self, number: int) -> None:
        for at in self._facts.writes[number]:
            self._live += self._facts.buffers[at].size_bytes
            if self._unread[at] == 0 and not self._facts.buffers[at].kept:
                self._live -= self._facts.buffers[at].size_bytes
        for at in self._facts.reads[number]:
            self._unread[at] -= 1
            if self._unread[at] == 0 and not self._facts.buffers[at].kept:
                self._live -= self._facts.buffers[at].size_bytes

    def _offer(self, number: int) -> None:
        """Note that a task has run, or has all its inputs; whoever could run at once now is offered in turn."""
        stack = [number]
        while stack:
            current = stack.pop()
            task = self._tasks[current]
            moves = task.mobility is Mobility.MOVES
            if self._emitted[current]:
                if moves:
                    self._forget(current)
            elif moves:
                bisect.insort(self._ready, current)
                continue
            elif not is_light(task):
                continue
            if self._available[current]:
                continue
            self._available[current] = True
            for user in self._facts.users[current]:
                self._missing[user] -= 1
                if self._missing[user] == 0:
                    stack.append(user)

    def _forget(self, number: int) -> None:
        for items in (self._ready, self._held):
            at = bisect.bisect_left(items, number)
            if at < len(items) and items[at] == number:
                items.pop(at)
