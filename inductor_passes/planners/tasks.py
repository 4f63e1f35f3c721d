"""Tasks in the order found, the memory they use, and what an order of them costs: the problem of moving compute.

Owns the data, the judge and the rules an order must keep. Must not know graphs, torch, or how orders are found.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from inductor_passes.timeline import Compute, Node, Start, Wait, simulate


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
        inputs: Earlier tasks that must have run before.
        mobility: Where it may go.
        group: Of a start, the process group it queues in.
        start: Of a wait, the start it belongs to, which is one of its inputs.
    """

    kind: Kind
    duration_ns: int = 0
    inputs: tuple[int, ...] = ()
    mobility: Mobility = Mobility.ORDERED
    group: str = ""
    start: int | None = None


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
        ValueError: A task needs one that does not stand before it, or a wait has no start among its inputs.
    """

    tasks: tuple[Task, ...]
    buffers: tuple[Buffer, ...] = ()

    def __post_init__(self) -> None:
        for number, task in enumerate(self.tasks):
            if any(not 0 <= source < number for source in task.inputs):
                raise ValueError(f"task {number} needs one of {task.inputs}, which does not stand before it")
            if task.kind is Kind.WAIT and (task.start is None or task.start not in task.inputs):
                raise ValueError(f"wait {number} must need the start it belongs to, {task.start}")

    def start_of(self, wait: int) -> int:
        """The start that a wait belongs to."""
        start = self.tasks[wait].start
        assert start is not None
        return start


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What an order costs, all modelled: time of the step, idle time of the compute stream, most live bytes."""

    step_ns: int
    exposed_ns: int
    peak_bytes: int


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
            nodes.append(Wait(problem.start_of(number), alloc[at], free[at]))
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
