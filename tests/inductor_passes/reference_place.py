"""The placing rule and the search over it, word by word and slowly: the oracle for ``inductor_passes.planners``.

Nothing is kept up to date here: bytes in flight, times and what may start are worked out afresh from the events so
far, each time they are asked for. It shares only the problem's data with the code it checks.
"""

import itertools

from inductor_passes.plan import Role
from inductor_passes.timeline import Compute, Start, Wait, simulate


def bucketings(problem):
    """Every way to cut the collectives of each key, in order of need or readiness, into legal runs."""
    items = problem.collectives
    by_key = {}
    for number, item in enumerate(items):
        if item.role is not Role.FIXED:
            by_key.setdefault((item.key, item.role), []).append(number)
    choices = []
    for (_, role), numbers in by_key.items():
        numbers.sort(
            key=lambda n, role=role: (
                items[n].latest_issue if role is Role.GATHER else items[n].earliest_issue,
                n,
            )
        )
        its = []
        for cuts in itertools.product((False, True), repeat=len(numbers) - 1):
            runs, run = [], [numbers[0]]
            for cut, number in zip(cuts, numbers[1:], strict=True):
                if cut:
                    runs.append(tuple(run))
                    run = []
                run.append(number)
            runs.append(tuple(run))
            if all(legal(problem, run) for run in runs):
                its.append(runs)
        choices.append(its)
    for chosen in itertools.product(*choices):
        yield [run for runs in chosen for run in runs]


def legal(problem, run):
    items = [problem.collectives[number] for number in run]
    if len(run) == 1:
        return True
    if max(item.earliest_issue for item in items) > min(item.latest_issue for item in items):
        return False
    if any(number in feeders(problem, other) for number in run for other in run):
        return False
    budget = problem.memory_budget_bytes
    held = sum(item.size_bytes + item.staging_bytes for item in items)
    if items[0].role is Role.GATHER:
        held -= items[0].size_bytes
    return budget is None or held <= budget


def feeders(problem, number):
    out = set()
    for other in problem.collectives[number].depends_on:
        out |= {other} | feeders(problem, other)
    return out


class ReferencePlacement:
    """One placing, following the module docstring of ``planners.place`` literally."""

    def __init__(self, problem, members, order):
        self.problem = problem
        self.items = problem.collectives
        self.members = [*members, *((n,) for n, item in enumerate(self.items) if item.role is Role.FIXED)]
        self.order = list(order)
        self.events = []
        self.slot = 0

    def first(self, bucket):
        return self.items[self.members[bucket][0]]

    def earliest(self, bucket):
        return max(self.items[n].earliest_issue for n in self.members[bucket])

    def latest(self, bucket):
        return min(self.items[n].latest_issue for n in self.members[bucket])

    def wait_slot(self, bucket):
        return min(self.items[n].latest_wait for n in self.members[bucket])

    def staging(self, bucket):
        its = self.members[bucket]
        return sum(self.items[n].staging_bytes for n in its) if len(its) > 1 else 0

    def started(self, bucket):
        return any(b == bucket and not is_wait for _, b, is_wait in self.events)

    def awaited(self, bucket):
        return any(b == bucket and is_wait for _, b, is_wait in self.events)

    def nodes(self):
        nodes, at = [], 0
        for slot, bucket, is_wait in self.events:
            nodes += [Compute(t) for t in self.problem.region_ns[at:slot]]
            at = slot
            its = [self.items[n] for n in self.members[bucket]]
            copy = (
                sum(item.copy_out_ns if is_wait else item.copy_in_ns for item in its) if len(its) > 1 else 0
            )
            copying = [Compute(copy + self.problem.kernel_ns)] if copy else []
            if is_wait:
                nodes += [Wait(bucket), *copying]
            else:
                length = self.problem.alpha_ns[its[0].key] + sum(item.transfer_ns for item in its)
                nodes += [*copying, Start(bucket, its[0].key.group, length, self.problem.issue_ns)]
        return nodes + [Compute(t) for t in self.problem.region_ns[at : self.slot]]

    def now(self):
        timeline = simulate([*self.nodes(), Compute(0)])
        return timeline.begin_ns[-1]

    def is_done(self, bucket):
        timeline = simulate(self.nodes())
        end = next(t.end_ns for t in timeline.collectives if t.collective == bucket)
        return end <= self.now()

    def gathers_in_flight(self, slot):
        return sum(
            self.items[n].size_bytes
            for b, its in enumerate(self.members)
            if self.first(b).role is Role.GATHER and self.started(b)
            for n in its
            if self.items[n].latest_issue > slot
        )

    def on_their_way(self):
        return [
            b
            for _, b, is_wait in self.events
            if not is_wait and self.first(b).role is Role.REDUCE and not self.awaited(b)
        ]

    def bytes_of(self, bucket):
        return sum(self.items[n].size_bytes for n in self.members[bucket])

    def unsent(self):
        return sum(
            self.items[n].size_bytes
            for b, its in enumerate(self.members)
            if self.first(b).role is Role.REDUCE and not self.started(b)
            for n in its
            if self.items[n].earliest_issue <= self.slot
        )

    def in_flight(self):
        pending = sum(self.bytes_of(b) for b in self.on_their_way())
        return self.gathers_in_flight(self.slot) + pending

    def make_room(self, extra, at_any_cost):
        budget = self.problem.memory_budget_bytes
        while budget is not None and self.in_flight() + extra > budget:
            way = self.on_their_way()
            if not way or (not self.is_done(way[0]) and not at_any_cost):
                return False
            self.events.append((self.slot, way[0], True))
        return True

    def filling(self, slot):
        """Bytes that reduction buckets of several hold at a slot before, or while, they are copied together."""
        total = 0
        for b, its in enumerate(self.members):
            if self.first(b).role is not Role.REDUCE or len(its) == 1:
                continue
            full = self.earliest(b)
            total += sum(self.items[n].size_bytes for n in its if self.items[n].earliest_issue <= slot < full)
            if slot == full:
                total += self.bytes_of(b) + self.staging(b)
        return total

    def copies_to_come(self):
        """Most bytes of gathers at the copy of a gather bucket in flight, if nothing is used before that copy."""
        most = self.gathers_in_flight(self.slot)
        issued = [b for _, b, is_wait in self.events if not is_wait and self.first(b).role is Role.GATHER]
        for at, b in enumerate(issued):
            if self.awaited(b) or not self.staging(b):
                continue
            later = sum(self.ahead[other] for other in issued[at + 1 :])
            mine = sum(
                self.items[n].size_bytes
                for n in self.members[b]
                if self.items[n].latest_issue > self.wait_slot(b)
            )
            most = max(most, later + mine + self.staging(b))
        return most

    def apart_fits(self, bucket, at_any_cost):
        """Whether the values copied out of a gather bucket fit now, beside the bucket and all else."""
        staging = self.staging(bucket) if self.first(bucket).role is Role.GATHER else 0
        return not staging or self.make_room(self.unsent() + staging, at_any_cost)

    def inputs_are_there(self, bucket, forced):
        for n in self.members[bucket]:
            for other in sorted(self.items[n].depends_on):
                home = next(b for b, its in enumerate(self.members) if other in its)
                if not self.started(home):
                    return False
                if not self.awaited(home):
                    if not self.is_done(home) and not forced:
                        return False
                    if not self.apart_fits(home, forced):
                        return False
                    self.events.append((self.slot, home, True))
        return True

    def try_start(self, bucket, forced):
        """ "started", "no room" or "must wait"."""
        if self.earliest(bucket) > self.slot or not self.inputs_are_there(bucket, forced):
            return "must wait"
        its = self.members[bucket]
        if self.first(bucket).role is Role.GATHER:
            ahead = sum(self.items[n].size_bytes for n in its if self.items[n].latest_issue > self.slot)
            self.ahead[bucket] = ahead
            if ahead:
                last = max(self.items[n].latest_issue for n in its)
                reserve = max([self.unsent(), *(self.filling(s) for s in range(self.slot, last))])
                reserve += self.copies_to_come() - self.gathers_in_flight(self.slot)
                if not self.make_room(ahead + reserve, False) and not (
                    forced and self.make_room(ahead + self.unsent(), True)
                ):
                    return "no room"
        elif self.staging(bucket) and not self.make_room(self.unsent() + self.staging(bucket), True):
            return "must wait"
        self.events.append((self.slot, bucket, False))
        return "started"

    def run(self):
        """Step time, or None when the order or the budget cannot be kept."""
        problem = self.problem
        self.ahead = {}
        groups = list(dict.fromkeys(item.key.group for item in self.items))
        fixed = range(len(self.order), len(self.members))
        for self.slot in range(len(problem.region_ns) + 1):
            for b in fixed:
                if self.first(b).earliest_issue == self.slot:
                    if not self.inputs_are_there(b, True):
                        return None
                    self.events.append((self.slot, b, False))
            state = dict.fromkeys(groups, "open")
            while True:
                candidates = []
                for group in groups:
                    left = [b for b in self.order if self.first(b).key.group == group and not self.started(b)]
                    if state[group] == "closed":
                        left = []
                    if state[group] == "reductions only":
                        left = [b for b in left if self.first(b).role is Role.REDUCE]
                    if left:
                        forced = any(self.latest(b) <= self.slot for b in left)
                        if forced or self.earliest(left[0]) <= self.slot:
                            candidates.append((self.order.index(left[0]), left[0], forced, group))
                if not candidates:
                    break
                _, bucket, forced, group = min(candidates)
                outcome = self.try_start(bucket, forced)
                if outcome == "started":
                    state = dict.fromkeys(groups, "open")
                elif outcome == "no room" and state[group] == "open":
                    state[group] = "reductions only"
                else:
                    state[group] = "closed"
            if any(not self.started(b) and self.latest(b) <= self.slot for b in self.order):
                return None
            timeline = simulate(self.nodes())
            ends = {t.collective: t.end_ns for t in timeline.collectives}
            due = [b for b in range(len(self.members)) if self.wait_slot(b) == self.slot]
            for b in sorted(due, key=lambda b: (ends[b], b)):
                if not self.awaited(b):
                    if not self.apart_fits(b, True):
                        return None
                    self.events.append((self.slot, b, True))
            if not self.make_room(self.unsent(), True):
                return None
        return simulate(self.nodes()).step_ns


def fastest(problem, place):
    """Shortest step over all bucketings and orders; ``place(members, order)`` gives one, or None."""
    best = None
    for members in bucketings(problem):
        for order in itertools.permutations(range(len(members))):
            step = place(members, order)
            if step is not None and (best is None or step < best):
                best = step
    return best
