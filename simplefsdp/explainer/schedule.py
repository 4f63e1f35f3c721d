"""From a graph's facts and a plan to a timeline: what runs when, on which row, and what memory holds meanwhile.

Owns the placing of the plan's events in modelled time and the account of memory. Judges nothing and draws nothing.

Times come from `inductor_passes.timeline.simulate`, which also judged the plan; memory follows the same order:

* a tensor of compute is held from the region that makes it to the last that reads it;
* a gather holds its result from its start to the last use. A bucket of several holds its buffer from start to wait,
  and the parameters copied out of it from then on;
* a reduction holds its input from its start (a bucket or a cast is a copy; the gradient it copies is free then) to
  its wait, and the reduced gradient, in the dtype of its parameter, from then to the end.
"""

from __future__ import annotations

import dataclasses
import enum

from inductor_passes.plan import ISSUE, Plan, Role
from inductor_passes.timeline import Compute, ExposureReason, Node, Start, Wait, simulate
from simplefsdp.explainer.facts import BEFORE, GraphFacts, Memory

COMPUTE_ROW = "compute"
EXPOSURE_REASONS = tuple(reason for reason in ExposureReason if reason is not ExposureReason.HIDDEN)


class Activity(str, enum.Enum):
    """What a span of a timeline shows."""

    COMPUTE = "compute"
    COPY = "copy into or out of a bucket"
    EXPOSED = "waiting for communication"
    GATHER = "gather"
    REDUCE = "reduction"
    OTHER = "other communication"


_ACTIVITY = {Role.GATHER: Activity.GATHER, Role.REDUCE: Activity.REDUCE, Role.FIXED: Activity.OTHER}


@dataclasses.dataclass(frozen=True)
class Span:
    """Something that takes time on one row of a timeline.

    Args:
        row: `COMPUTE_ROW`, or the label of a process group.
        activity: what it is.
        name: the region, or the members of the bucket.
        begin_ns: from the start of the graph.
        end_ns: from the start of the graph.
        bucket: the bucket it belongs to, if any.
    """

    row: str
    activity: Activity
    name: str
    begin_ns: int
    end_ns: int
    bucket: int | None = None

    @property
    def duration_ns(self) -> int:
        """Its length."""
        return self.end_ns - self.begin_ns


@dataclasses.dataclass(frozen=True)
class MemoryPoint:
    """Bytes held from `time_ns` to the next point, by use, in the order of `Memory`."""

    time_ns: int
    by_use: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all uses together."""
        return sum(self.by_use)


@dataclasses.dataclass(frozen=True)
class CollectiveTime:
    """When one bucket was issued, ran and was waited for, and how long it blocked compute; ns from the start."""

    issued_ns: int
    begin_ns: int
    end_ns: int
    waited_ns: int
    exposed_ns: int
    reason: ExposureReason
    blocker: int | None


class Stream(str, enum.Enum):
    """Where memory is allocated; the caching allocator keeps what each stream has allocated apart."""

    COMPUTE = "compute"
    GATHER = "gathers"
    REDUCE = "reductions"


@dataclasses.dataclass(frozen=True)
class Holding:
    """Memory held from the start of one node of the schedule to the end of another, both numbered from 0.

    Args:
        use: what for.
        size_bytes: bytes.
        begin: node that allocates it.
        end: node after which it is free; the number of nodes if it outlives the graph.
        before: it was there when the graph began.
        stream: of the collective that allocates it where collectives have streams of their own, as in FSDP2.
    """

    use: Memory
    size_bytes: int
    begin: int
    end: int
    before: bool = False
    stream: Stream = Stream.COMPUTE


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The modelled schedule of one graph.

    Args:
        kind: "forward", "backward" or "inference".
        spans: what runs, by row and time.
        memory: the memory curve; the resident parameters, buffers and optimizer states are not in it.
        buckets: when each bucket of the plan travelled.
        step_ns: modelled time of the graph.
        compute_ns: modelled time in which the compute row is busy.
        holdings: what the memory curve is the sum of.
        nodes: length of the schedule, which holdings count in.
    """

    kind: str
    spans: tuple[Span, ...]
    memory: tuple[MemoryPoint, ...]
    buckets: tuple[CollectiveTime, ...]
    step_ns: int
    compute_ns: int
    holdings: tuple[Holding, ...] = ()
    nodes: int = 0

    @property
    def exposed_ns(self) -> int:
        """Modelled time in which the compute row waits."""
        return self.step_ns - self.compute_ns

    @property
    def rows(self) -> tuple[str, ...]:
        """Compute first, then the process groups in the order in which they first communicate."""
        return tuple(dict.fromkeys([COMPUTE_ROW, *(span.row for span in self.spans)]))

    @property
    def peak(self) -> MemoryPoint:
        """The point of the memory curve where most is held."""
        return max(self.memory, key=lambda point: point.total_bytes)


def make_timeline(facts: GraphFacts, plan: Plan | None = None) -> Timeline:
    """Place a graph's schedule in modelled time.

    Args:
        facts: the graph.
        plan: a plan for `facts.problem`; None takes the one the passes made.

    Returns:
        The timeline; its `step_ns` is the plan's.
    """
    layout = _Layout(facts, facts.plan if plan is None else plan)
    result = simulate(layout.nodes)
    ends = [*result.begin_ns[1:], result.step_ns]
    timing = {item.collective: item for item in result.collectives}
    spans: list[Span] = []
    for node, label, begin, end in zip(layout.nodes, layout.labels, result.begin_ns, ends, strict=True):
        if isinstance(node, Compute) and node.duration_ns:
            activity = Activity.COMPUTE if label.bucket is None else Activity.COPY
            spans.append(
                Span(COMPUTE_ROW, activity, label.name, begin, begin + node.duration_ns, label.bucket)
            )
        elif isinstance(node, Start):
            item = timing[node.collective]
            role = facts.problem.collectives[layout.plan.buckets[node.collective].members[0]].role
            spans.append(
                Span(node.group, _ACTIVITY[role], label.name, item.begin_ns, item.end_ns, node.collective)
            )
        elif isinstance(node, Wait) and end > begin:
            spans.append(Span(COMPUTE_ROW, Activity.EXPOSED, label.name, begin, end, node.collective))
    buckets = tuple(
        CollectiveTime(
            item.issued_ns,
            item.begin_ns,
            item.end_ns,
            item.waited_ns,
            item.exposed_ns,
            item.reason,
            item.blocker,
        )
        for _, item in sorted(timing.items())
    )
    holdings = _holdings(facts, layout)
    return Timeline(
        facts.kind,
        tuple(sorted(spans, key=lambda span: (span.row != COMPUTE_ROW, span.begin_ns))),
        _memory_curve(holdings, (*result.begin_ns, result.step_ns)),
        buckets,
        result.step_ns,
        result.compute_ns,
        holdings,
        len(layout.nodes),
    )


def bucket_name(facts: GraphFacts, plan: Plan, bucket: int, most: int = 3) -> str:
    """The members of a bucket, shortened: "all_gather layers.0.wq.weight + 8 more"."""
    members = plan.buckets[bucket].members
    items = [facts.problem.collectives[number] for number in members]
    shown = [item.name for item in items[:most]] if len(items) <= most else [items[0].name]
    rest = f" + {len(items) - 1} more" if len(items) > most else ""
    return f"{items[0].key.kind} {' + '.join(shown)}{rest}"


@dataclasses.dataclass(frozen=True)
class _Label:
    name: str
    bucket: int | None = None


class _Layout:
    """The nodes of a plan for the simulator, and where among them things happen.

    Attributes:
        nodes: as `inductor_passes.planners.schedule.expand` makes them; a copy kernel stands also where it takes no
            time, so that memory has a place to change.
        labels: what each node is.
        region_at: position of each region.
        packed_at: position where each bucket's input is ready; that of its start if nothing is copied.
        started_at, waited_at: positions of each bucket's start and wait.
        unpacked_at: position after which a bucket's buffer is no longer read.
    """

    def __init__(self, facts: GraphFacts, plan: Plan) -> None:
        self.facts, self.plan = facts, plan
        self.nodes: list[Node] = []
        self.labels: list[_Label] = []
        self.region_at: list[int] = []
        count = len(plan.buckets)
        self.packed_at, self.started_at = [0] * count, [0] * count
        self.waited_at, self.unpacked_at = [0] * count, [0] * count
        names = [bucket_name(facts, plan, bucket) for bucket in range(count)]
        problem = facts.problem
        for event in plan.events:
            self._regions_before(event.slot)
            bucket = event.bucket
            items = [problem.collectives[number] for number in plan.buckets[bucket].members]
            several = len(items) > 1
            label = _Label(names[bucket], bucket)
            if event.action == ISSUE:
                copy = sum(item.copy_in_ns for item in items) if several else 0
                if several:
                    self._add(Compute(copy + problem.kernel_ns if copy else 0), label)
                self.packed_at[bucket] = max(len(self.nodes) - 1, 0) if several else len(self.nodes)
                duration = problem.alpha_ns[items[0].key] + sum(item.transfer_ns for item in items)
                self.started_at[bucket] = len(self.nodes)
                self._add(Start(bucket, items[0].key.group, duration, problem.issue_ns), label)
            else:
                self.waited_at[bucket] = len(self.nodes)
                self._add(Wait(bucket), label)
                copy = sum(item.copy_out_ns for item in items) if several else 0
                if several:
                    self._add(Compute(copy + problem.kernel_ns if copy else 0), label)
                self.unpacked_at[bucket] = len(self.nodes) - 1
        self._regions_before(len(facts.regions))

    def _regions_before(self, slot: int) -> None:
        while len(self.region_at) < slot:
            region = len(self.region_at)
            self.region_at.append(len(self.nodes))
            self._add(Compute(self.facts.problem.region_ns[region]), _Label(self.facts.regions[region].name))

    def _add(self, node: Node, label: _Label) -> None:
        self.nodes.append(node)
        self.labels.append(label)


def _holdings(facts: GraphFacts, layout: _Layout) -> tuple[Holding, ...]:
    """What the schedule holds, and between which of its nodes."""
    after = len(layout.nodes)
    positions = [*layout.region_at, after]
    out: list[Holding] = []
    source_free: dict[int, int] = {}
    for bucket, item in enumerate(layout.plan.buckets):
        several = len(item.members) > 1
        start, wait, unpacked = (
            layout.started_at[bucket],
            layout.waited_at[bucket],
            layout.unpacked_at[bucket],
        )
        for number in item.members:
            traffic = facts.traffic[number]
            role = facts.problem.collectives[number].role
            packed = several or traffic.copied
            stream = {Role.GATHER: Stream.GATHER, Role.REDUCE: Stream.REDUCE}.get(role, Stream.COMPUTE)
            if packed:
                begin, own = (
                    layout.packed_at[bucket],
                    Stream.GATHER if role is Role.GATHER else Stream.COMPUTE,
                )
                out.append(Holding(Memory.COMMUNICATION, traffic.sent_bytes, begin, wait, stream=own))
            if traffic.source is not None:
                free = layout.packed_at[bucket] if packed else wait
                source_free[traffic.source] = max(source_free.get(traffic.source, 0), free)
            last_use = max(positions[traffic.last_use], unpacked)
            received = traffic.received_bytes
            if role is Role.GATHER and not several:
                out.append(Holding(Memory.GATHERED, received, start, last_use, stream=stream))
            elif role is Role.GATHER:
                out.append(Holding(Memory.GATHERED, received, start, unpacked, stream=stream))
                out.append(Holding(Memory.GATHERED, received, unpacked, last_use))
            else:
                use = Memory.GRADIENTS if role is Role.REDUCE else Memory.ACTIVATIONS
                cast = traffic.kept_share != 1
                out.append(Holding(use, received, start, wait if cast else last_use, stream=stream))
                if cast:
                    out.append(Holding(use, round(received * traffic.kept_share), wait, last_use))
    for number, value in enumerate(facts.values):
        before = value.born == BEFORE
        begin = 0 if before else positions[value.born]
        end = max(begin, positions[value.dies], source_free.get(number, 0))
        out.append(Holding(value.memory, value.size_bytes, begin, end, before))
    return tuple(out)


def _memory_curve(holdings: tuple[Holding, ...], times: tuple[int, ...]) -> tuple[MemoryPoint, ...]:
    """The sum of holdings over time; `times` are those at which the nodes begin, and the end of the last."""
    after = len(times) - 1
    uses = {use: number for number, use in enumerate(Memory)}
    # By moment: what a node allocates comes at twice its number, what it is the last to hold goes one moment later.
    changes: dict[int, list[int]] = {}
    nothing = [0] * len(uses)
    for item in holdings:
        use = uses[item.use]
        changes.setdefault(2 * item.begin, nothing[:])[use] += item.size_bytes
        if item.end < after:
            changes.setdefault(2 * item.end + 1, nothing[:])[use] -= item.size_bytes
    points = [MemoryPoint(times[0], tuple(changes.pop(0, nothing)))]
    for moment in sorted(moment for moment, change in changes.items() if any(change)):
        last = points[-1]
        point = MemoryPoint(
            times[min((moment + 1) // 2, after)],
            tuple(now + delta for now, delta in zip(last.by_use, changes[moment], strict=True)),
        )
        if last.time_ns == point.time_ns and last.total_bytes <= point.total_bytes:
            points.pop()
        points.append(point)
    return tuple(points)
