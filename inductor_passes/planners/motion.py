"""Which compute to move under collectives that stay exposed: a pure function from tasks to a new order of them.

Owns the choice between policies. Must not know graphs, torch, buckets or gathered parameters: collectives that can be
prefetched are none of its business and come as floating tasks without a time.

The case it is made for, backward of tensor-parallel layers, found and moved (dX feeds the reduction ``~~``, dW
feeds nothing but a gradient)::

    compute   |dW2|dX2|......|dW1|dX1|......|         compute   |dX2|dW2|.|dX1|dW1|.|
    group             |~~~~~~|       |~~~~~~|         group         |~~~~~~|  |~~~~~~|

How many tasks may be held back, which of them fills a gap, and whether later tasks may fill it make a policy of the
sweep in ``hold``. Several are tried; the shortest order within the memory limit wins, the order found being one of
them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from inductor_passes.planners.hold import Facts, Policy, Sweep
from inductor_passes.planners.tasks import Kind, Mobility, MotionProblem, Outcome, judge

_CAPS = (1, 2, 4, 8, 16, 32, 1 << 30)
"""How many tasks a policy may hold back, tried one by one; the last is no limit."""
_FIRST_CAP = 8
"""Where the other choices are compared when there are too many tasks to try every combination."""
_FULL_SEARCH_TASKS = 400
"""Problems up to this size are tried with every combination of choices, larger ones with one choice at a time."""


@dataclasses.dataclass(frozen=True)
class Motion:
    """The order chosen. ``order`` holds the numbers of all tasks; ``moved`` those that crossed a start or a wait."""

    order: tuple[int, ...]
    moved: tuple[int, ...]
    before: Outcome
    after: Outcome

    @property
    def is_found_order(self) -> bool:
        """Whether nothing changed."""
        return self.order == tuple(range(len(self.order)))


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
    facts = Facts(problem)

    def better(policy: Policy) -> bool:
        nonlocal best, best_key
        order = Sweep(facts, policy, limit).run()
        outcome = judge(problem, order)
        key = (outcome.step_ns, outcome.peak_bytes)
        if key >= best_key or (limit is not None and outcome.peak_bytes > limit):
            return False
        best, best_key = tuple(order), key
        return True

    choices = list(itertools.product((False, True), repeat=2))
    if len(problem.tasks) <= _FULL_SEARCH_TASKS:
        for cap, (fit, ahead) in itertools.product(_CAPS, choices):
            better(Policy(cap, fit, ahead))
    else:
        favourite = choices[0]
        for choice in choices:
            if better(Policy(_FIRST_CAP, *choice)):
                favourite = choice
        for cap in _CAPS:
            better(Policy(cap, *favourite))
    return Motion(best, tuple(_moved(problem, best)), before, judge(problem, best))


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
            flying.remove(problem.start_of(number))
        elif task.mobility is Mobility.MOVES:
            under[number] = tuple(flying)
    return under
