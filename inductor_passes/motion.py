"""Read a graph as a motion problem, and put its nodes in the order that came out.

It owns what each FX node is to the motion planner, and the report. It must not know how an order is chosen, and it
changes nothing but the order of nodes.

What a node becomes::

    matrix product, attention, convolution      a task that moves
    collective that is not ours to prefetch     a start and a wait with a time
    unshard, gradient reduction, packing        floating tasks without a time: planning them comes afterwards
    random operator                             pinned
    barrier                                     pinned; nothing crosses it
    everything else                             ordered; neighbours share the time of the kernel they fuse into

Memory counts only what is equal on every rank: shards of parameters may be uneven, so unshards and what they read are
left out. So are the inputs of a forward graph, which belong to the caller.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from inductor_passes import _compat, work
from inductor_passes import graph as fxg
from inductor_passes.plan import Role
from inductor_passes.planners.motion import Motion
from inductor_passes.planners.tasks import Buffer, Kind, Mobility, MotionProblem, Outcome, Task
from inductor_passes.program import find_floating, make_problem, role_of
from inductor_passes.windows import Window

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import fx

    from inductor_passes.costs.model import CostModel


@dataclasses.dataclass(frozen=True)
class MotionReport:
    """What was moved and what it saved. Times and bytes are modelled; collectives that can be prefetched count none.

    Args:
        moved: what moved and under which collectives it runs now, one line each.
        before: costs of the order found.
        after: costs of the order returned.
        kept: why the order found was kept after all; "" when it was not.
    """

    moved: tuple[str, ...]
    before: Outcome
    after: Outcome
    kept: str = ""

    def __str__(self) -> str:
        if self.before == self.after:
            return f"compute motion: nothing to gain; {self.before.exposed_ns / 1e6:.3f} ms exposed"
        saved = f"{self.before.exposed_ns / 1e6:.3f} -> {self.after.exposed_ns / 1e6:.3f} ms exposed"
        peak = f"{self.before.peak_bytes / 2**20:.1f} -> {self.after.peak_bytes / 2**20:.1f} MiB at the peak"
        outcome = f"undone: {self.kept}" if self.kept else "done"
        head = f"compute motion, {outcome}: {len(self.moved)} kernels, {saved}, {peak}"
        return "\n  ".join([head, *self.moved])


@dataclasses.dataclass(frozen=True)
class MotionGraph:
    """A graph, read for motion: ``nodes[i]`` is task ``i`` of ``problem``."""

    nodes: tuple[fx.Node, ...]
    problem: MotionProblem

    def order(self, motion: Motion) -> list[fx.Node]:
        """The nodes in the order chosen."""
        return [self.nodes[number] for number in motion.order]

    def report(self, motion: Motion, kept: str = "") -> MotionReport:
        """What a motion did to this graph."""
        labels = [_label(node) for node in self.nodes]
        return report_motion(self.problem, motion, labels, kept)


def report_motion(
    problem: MotionProblem, motion: Motion, labels: Sequence[str], kept: str = ""
) -> MotionReport:
    """The report of a motion.

    Args:
        problem: what was planned.
        motion: what was decided.
        labels: what to call each task.
        kept: why it was not done; "" when it was.
    """
    flying: list[int] = []
    lines: dict[int, str] = {}
    moved = set(motion.moved)
    numbers = [number for number, task in enumerate(problem.tasks) if task.kind is Kind.START]
    number_of = {start: at for at, start in enumerate(numbers)}
    for task in motion.order:
        kind = problem.tasks[task].kind
        if kind is Kind.START:
            flying.append(task)
        elif kind is Kind.WAIT:
            flying.remove(problem.start_of(task))
        elif task in moved:
            under = ", ".join(f"{labels[start]} {number_of[start]}" for start in flying) or "nothing"
            lines[task] = f"{labels[task]}, {problem.tasks[task].duration_ns / 1e3:.1f} us, under {under}"
    return MotionReport(tuple(lines[task] for task in motion.moved), motion.before, motion.after, kept)


def read_motion(graph: fx.Graph, cost: CostModel, ranks_per_node: int) -> MotionGraph:
    """Read a graph as a motion problem.

    Args:
        graph: a forward, backward or inference graph with fake tensors.
        cost: prices of compute and communication.
        ranks_per_node: ranks that share a node, in the whole job.
    """
    starts = [node for node in fxg.starts(graph) if fxg.find_wait(node) is not None]
    roles = {start: role_of(start) for start in starts}
    fixed = {start for start, role in roles.items() if role is Role.FIXED}
    floating = find_floating(graph, roles) | {start for start in starts if start not in fixed}
    floating |= {wait for start in starts if start not in fixed and (wait := fxg.find_wait(start))}
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    times = _times(nodes, fixed, floating, cost, work.nominal_size(graph))
    lengths = collective_times([start for start in starts if start in fixed], cost, ranks_per_node)
    number_of = {node: number for number, node in enumerate(nodes)}
    tasks: list[Task] = []
    barrier: int | None = None
    for number, node in enumerate(nodes):
        inputs = [number_of[source] for source in node.all_input_nodes if source in number_of]
        is_barrier = fxg.is_barrier(node) or (node not in roles and (fxg.is_start(node) or _is_loose(node)))
        if is_barrier:
            inputs = list(range(0 if barrier is None else barrier, number))
        elif barrier is not None:
            inputs.append(barrier)
        needed = tuple(sorted(set(inputs)))
        if node in fixed:
            group, length = lengths[node]
            tasks.append(Task(Kind.START, length, needed, group=group))
        elif fxg.is_wait(node) and node.all_input_nodes[0] in fixed:
            tasks.append(Task(Kind.WAIT, 0, needed, start=number_of[node.all_input_nodes[0]]))
        elif is_barrier or fxg.is_random(node):
            tasks.append(Task(Kind.COMPUTE, times[number], needed, Mobility.PINNED))
        elif node in floating:
            tasks.append(Task(Kind.COMPUTE, 0, needed, Mobility.FLOATS))
        else:
            mobility = Mobility.MOVES if fxg.is_heavy(node) else Mobility.ORDERED
            tasks.append(Task(Kind.COMPUTE, times[number], needed, mobility))
        if is_barrier:
            barrier = number
    return MotionGraph(tuple(nodes), MotionProblem(tuple(tasks), _buffers(graph, number_of, floating)))


def collective_times(
    starts: Iterable[fx.Node], cost: CostModel, ranks_per_node: int
) -> dict[fx.Node, tuple[str, int]]:
    """Process group, by label, and modelled time of each collective."""
    starts = list(starts)
    problem = make_problem(
        region_ns=(),
        starts=starts,
        windows=[Window(0, 0, 0, ())] * len(starts),
        cost=cost,
        ranks_per_node=ranks_per_node,
    )
    return {
        start: (item.key.group, problem.alpha_ns[item.key] + item.transfer_ns)
        for start, item in zip(starts, problem.collectives, strict=True)
    }


def _is_loose(node: fx.Node) -> bool:
    """Whether a wait belongs to no collective that the passes understand."""
    return fxg.is_wait(node) and not (
        node.all_input_nodes
        and fxg.is_start(node.all_input_nodes[0])
        and fxg.find_wait(node.all_input_nodes[0]) is node
    )


def _times(
    nodes: Sequence[fx.Node], fixed: set[fx.Node], floating: set[fx.Node], cost: CostModel, nominal: int
) -> list[int]:
    """Modelled time of each node; the last of several that fuse stands for the kernel they become."""
    times = [0] * len(nodes)
    light: list[int] = []

    def close() -> None:
        if light:
            times[light[-1]] = work.time_ns([nodes[number] for number in light], nominal, cost)
            light.clear()

    for number, node in enumerate(nodes):
        if fxg.is_heavy(node):
            close()
            times[number] = work.time_ns([node], nominal, cost)
        elif node in fixed or fxg.is_wait(node) or fxg.is_barrier(node):
            close()
        elif node not in floating and fxg.is_tensor(node) and not fxg.is_comm(node) and not fxg.is_view(node):
            light.append(number)
    close()
    return times


def _buffers(graph: fx.Graph, number_of: dict[fx.Node, int], floating: set[fx.Node]) -> tuple[Buffer, ...]:
    """The storages of a graph: a view, and the wait of a collective, keep the storage of what they read."""
    nominal = work.nominal_size(graph)
    backward = any(map(_compat.is_tangent, graph.find_nodes(op="placeholder")))
    owner: dict[fx.Node, fx.Node] = {}
    readers: dict[fx.Node, list[int]] = {}
    kept: set[fx.Node] = set()
    for node in graph.nodes:
        sources = node.all_input_nodes
        if node.op == "output":
            kept.update(owner[source] for source in sources)
            continue
        shares = bool(sources) and (fxg.is_view(node) or fxg.is_wait(node))
        owner[node] = owner[sources[0]] if shares else node
        readers.setdefault(owner[node], [])
        if not shares:
            for source in dict.fromkeys(owner[source] for source in sources):
                readers[source].append(number_of[node])
    buffers = []
    for node, users in readers.items():
        if node.op == "placeholder":
            ours = all(fxg.find_tag(user) is not None or user in floating for user in node.users)
            if not backward or ours or not users:
                continue
        elif node not in number_of or node in floating:
            continue
        size = work.moved_bytes([node], nominal)
        if size:
            buffers.append(Buffer(size, number_of.get(node), tuple(users), node in kept))
    return tuple(buffers)


def _label(node: fx.Node) -> str:
    return fxg.find_kind(node) or fxg.describe(node)
