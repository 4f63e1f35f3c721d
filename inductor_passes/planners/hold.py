"""One sweep that holds compute back and spends it where the compute stream would stand still.

Owns the rule. Must not know which policy is best, graphs or torch.

The sweep follows the order found and keeps a clock, the process groups and the live bytes:

* what the next collective needs runs in the order found; a task that moves and that it does not need is *held back*;
* collectives are awaited when their result is needed, or once they have ended;
* before a wait that would block, held-back tasks run (and, if the policy says so, later tasks whose inputs exist);
* the oldest held-back task runs when too many are held, or when live bytes would pass the limit.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools

from inductor_passes.planners.tasks import Kind, Mobility, MotionProblem, is_anchor, is_light

_LOOKED_AT = 32
"""How many tasks are looked at to fill one gap: more than a few layers hold ready, few enough to be quick."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """Choices of one sweep.

    Args:
        cap: How many tasks may be held back.
        fit: Fill a gap with the longest task that fits, not with the oldest.
        ahead: Fill gaps with tasks that were found later, too.
    """

    cap: int
    fit: bool
    ahead: bool


class Facts:
    """What all sweeps over a problem share."""

    def __init__(self, problem: MotionProblem) -> None:
        self.tasks = tasks = problem.tasks
        count = len(tasks)
        self.users: list[list[int]] = [[] for _ in tasks]
        for number, task in enumerate(tasks):
            for source in dict.fromkeys(task.inputs):
                self.users[source].append(number)
        self.start_of = {
            number: problem.start_of(number) for number, task in enumerate(tasks) if task.kind is Kind.WAIT
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


class Sweep:
    """One sweep by the rule of the module docstring."""

    def __init__(self, facts: Facts, policy: Policy, limit: int | None) -> None:
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
