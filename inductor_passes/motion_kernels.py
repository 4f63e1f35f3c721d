"""Read scheduler nodes as a motion problem: the same decision as `motion` makes, with the kernels as they will run.

It owns what each scheduler node is to the motion planner. It must not know how an order is chosen.

TorchInductor reorders kernels for memory after the graph passes, and may undo what they moved. Here the order of all
collectives is frozen; a weight gradient whose reduction stands early is therefore needed early.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from inductor_passes import _compat
from inductor_passes import graph as fxg
from inductor_passes.planners.tasks import Buffer, Kind, Mobility, MotionProblem, Task

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Timed:
    """The start of a collective that is not ours to prefetch.

    Args:
        group: label of its process group.
        time_ns: modelled time of the collective.
        wait: the scheduler node that awaits it.
    """

    group: str
    time_ns: int
    wait: Any


def read_kernels(
    snodes: Sequence[Any],
    inputs: Mapping[Any, Collection[Any]],
    times: Mapping[Any, int],
    timed: Mapping[Any, Timed],
) -> MotionProblem | None:
    """Read scheduler nodes as a motion problem.

    Args:
        snodes: all of them, in the order found.
        inputs: what each needs to have run before.
        times: modelled time of every node that is compute with a place of its own; the rest float.
        timed: the collectives that matter here, by their start.

    Returns:
        The problem, whose tasks are the nodes; None where torch does not tell how long buffers live.
    """
    lifetimes = _compat.buffer_lifetimes(list(snodes))
    if lifetimes is None:
        return None
    number_of = {snode: number for number, snode in enumerate(snodes)}
    start_of = {item.wait: number_of[start] for start, item in timed.items()}
    tasks: list[Task] = []
    barriers = set(filter(is_barrier, times))
    for snode, needed in needed_before(snodes, inputs, barriers).items():
        before = tuple(sorted(number_of[source] for source in needed))
        if snode in timed:
            tasks.append(Task(Kind.START, timed[snode].time_ns, before, group=timed[snode].group))
        elif snode in start_of:
            tasks.append(Task(Kind.WAIT, 0, before, start=start_of[snode]))
        elif snode not in times:
            tasks.append(Task(Kind.COMPUTE, 0, before, Mobility.FLOATS))
        else:
            mobility = Mobility.PINNED if snode in barriers else _mobility(snode)
            tasks.append(Task(Kind.COMPUTE, times[snode], before, mobility))
    buffers = [
        Buffer(
            item.size_bytes,
            None if item.writer is None else number_of[item.writer],
            tuple(sorted(number_of[reader] for reader in item.readers)),
            item.kept,
        )
        for item in lifetimes
    ]
    return MotionProblem(tuple(tasks), tuple(buffers))


def label_kernels(snodes: Sequence[Any]) -> list[str]:
    """What to call each scheduler node in a report: the collective, or the heavy operator and its module."""
    labels = []
    for snode in snodes:
        origins = _compat.origins(snode)
        kinds = [fxg.get_kind(node) for node in origins if fxg.is_lowered_start(node)]
        heavy = [node for node in origins if fxg.is_heavy(node)]
        if _compat.is_collective_kernel(snode) and kinds:
            labels.append(kinds[0])
        elif heavy:
            labels.append(fxg.describe(heavy[0]))
        else:
            labels.append("kernel")
    return labels


def needed_before(
    snodes: Sequence[Any], inputs: Mapping[Any, Collection[Any]], fences: Collection[Any]
) -> dict[Any, set[Any]]:
    """What each scheduler node needs to have run before when nothing may pass a fence.

    Args:
        snodes: all of them, in the order found.
        inputs: what each needs by itself.
        fences: the nodes that nothing passes, in either direction.
    """
    needed: dict[Any, set[Any]] = {}
    behind: list[Any] = []  # the last fence and what stands after it
    fence: tuple[Any, ...] = ()
    for snode in snodes:
        needed[snode] = {*inputs[snode], *(behind if snode in fences else fence)}
        if snode in fences:
            fence, behind = (snode,), []
        behind.append(snode)
    return needed


def is_barrier(snode: Any) -> bool:
    """Whether nothing may pass a scheduler node, in either direction."""
    unknown = _compat.is_collective_kernel(snode) or _compat.is_wait_kernel(snode)
    return unknown or any(map(fxg.is_barrier, _compat.origins(snode)))


def _mobility(snode: Any) -> Mobility:
    """Library calls and templates move; generated code is cheap and stays; who draws random numbers is pinned."""
    origins = _compat.origins(snode)
    if _compat.is_opaque_kernel(snode) and any(map(fxg.is_random, origins)):
        return Mobility.PINNED
    moves = _compat.is_opaque_kernel(snode) and any(map(fxg.is_heavy, origins))
    return Mobility.MOVES if moves else Mobility.ORDERED
