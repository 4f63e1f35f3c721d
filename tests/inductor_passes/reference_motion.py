"""Moving compute, done slowly: every order there is, priced on a clock of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from inductor_passes.planners.tasks import Kind, MotionProblem, is_anchor


def all_orders(problem: MotionProblem) -> Iterator[tuple[int, ...]]:
    """Every order in which tasks stand after what they need, and starts and pinned tasks keep their order."""
    anchors = [number for number, task in enumerate(problem.tasks) if is_anchor(task)]
    needs = [set(task.inputs) for task in problem.tasks]
    for earlier, later in itertools.pairwise(anchors):
        needs[later].add(earlier)

    def extend(order: tuple[int, ...], done: frozenset[int]) -> Iterator[tuple[int, ...]]:
        if len(order) == len(needs):
            yield order
        for number, needed in enumerate(needs):
            if number not in done and needed <= done:
                yield from extend((*order, number), done | {number})

    return extend((), frozenset())


def price(problem: MotionProblem, order: tuple[int, ...]) -> tuple[int, int, int]:
    """Step time, idle time and most live bytes of an order."""
    now = idle = 0
    ends: dict[int, int] = {}
    free_at: dict[str, int] = {}
    for number in order:
        task = problem.tasks[number]
        if task.kind is Kind.COMPUTE:
            now += task.duration_ns
        elif task.kind is Kind.START:
            ends[number] = free_at[task.group] = max(now, free_at.get(task.group, 0)) + task.duration_ns
        else:
            start = problem.start_of(number)
            idle += max(0, ends[start] - now)
            now = max(now, ends[start])
    end = max([now, *ends.values()])
    peak = sum(buffer.size_bytes for buffer in problem.buffers if buffer.writer is None)
    for at in range(len(order)):
        live = 0
        for buffer in problem.buffers:
            users = [order.index(user) for user in buffer.readers]
            born = 0 if buffer.writer is None else order.index(buffer.writer)
            dead = max([*users, born]) if users or buffer.writer is not None else len(order)
            if born <= at and (buffer.kept or at <= dead):
                live += buffer.size_bytes
        peak = max(peak, live)
    return end, idle + end - now, peak


def shortest(problem: MotionProblem, extra_bytes: int | None) -> int:
    """Step time of the shortest order whose most live bytes stay within those of the order found plus some."""
    limit = price(problem, tuple(range(len(problem.tasks))))[2] + (extra_bytes or 0)
    prices = (price(problem, order) for order in all_orders(problem))
    return min(step for step, _, peak in prices if extra_bytes is None or peak <= limit)
