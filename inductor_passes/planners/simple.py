"""The planners that do not search: ``none``, ``block`` and ``greedy``.

Owns their bucketing rules. Placing is shared (``order``, ``place``). Must not know ``auto``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from inductor_passes.plan import Role
from inductor_passes.planners.instance import UNBOUNDED, Bucketing, Instance
from inductor_passes.planners.keylists import KeyList
from inductor_passes.planners.order import Lead, not_before, one_ahead, order_by_slot
from inductor_passes.planners.place import place
from inductor_passes.planners.segment import Runs


@dataclasses.dataclass(frozen=True)
class Decision:
    """What a planner decided: who travels together, and every start and wait in order.

    ``events`` are (slot, bucket, is_wait) in emission order.
    """

    members: list[tuple[int, ...]]
    events: list[tuple[int, int, bool]]


def decide_none(instance: Instance) -> Decision:
    """Each collective alone, started where it was traced and waited for at once.

    Gathers sit at their first use, reductions where their input is ready. Fixed ones keep their slots.
    """
    problem = instance.problem
    slots = [item.traced_slot for item in problem.collectives]
    keyed: list[tuple[int, int, int, bool]] = []
    for number, item in enumerate(problem.collectives):
        keyed.append((slots[number], number, 0, False))
        if item.role is Role.FIXED:
            keyed.append((item.latest_wait, -1 if item.latest_wait > slots[number] else number, 1, True))
        else:
            keyed.append((slots[number], number, 1, True))
    numbers = [number for number, item in enumerate(problem.collectives) for _ in range(2)]
    order = sorted(range(len(keyed)), key=lambda at: (keyed[at][:3], numbers[at]))
    events = [(keyed[at][0], numbers[at], keyed[at][3]) for at in order]
    return Decision([(number,) for number in range(len(problem.collectives))], events)


def decide_block(instance: Instance) -> Decision:
    """One bucket for each module of the user's ``blocks``, cut only where a run is not legal or memory is
    short.

    Gather buckets start one ahead; reduction buckets when full.
    """
    items = instance.problem.collectives

    def runs_of(key_list: KeyList, cap_bytes: int) -> Runs:
        runs: Runs = []
        for at, number in enumerate(key_list.members):
            block = items[number].block
            if at and block is not None and block == items[key_list.members[at - 1]].block:
                first = runs[-1][0]
                if _may_join(key_list, first, at, cap_bytes):
                    runs[-1] = (first, at)
                    continue
            runs.append((at, at))
        return runs

    return _within_budget(instance, runs_of)


def decide_greedy(instance: Instance) -> Decision:
    """The automatic wrapping rule of SimpleFSDP (arXiv 2411.00284, section 4).

    Gathers, in order of use: the next gather joins the open bucket while the bucket's time still fits under
    the compute it hides behind, from the first use of the bucket before it to its own first use, and while it
    fits the memory budget. The first bucket has nothing to hide behind and takes one gather. Reductions, in
    order of
    readiness: the next one joins while the bucket's time, plus the gathers that run meanwhile, fits under the
    compute from the readiness of its first member to that of the next.
    """

    def runs_of(key_list: KeyList, cap_bytes: int) -> Runs:
        rule = _greedy_gathers if key_list.is_gather else _greedy_reductions
        return rule(instance, key_list, cap_bytes)

    return _within_budget(instance, runs_of)


def _within_budget(instance: Instance, runs_of: Callable[[KeyList, int], Runs]) -> Decision:
    """Place the runs of a rule with one bucket of prefetch, under smaller and smaller caps on a bucket's
    bytes.

    Gathers, gradients and copies share one budget; buckets that are legal one by one may not fit together.
    When no cap helps, the collectives stay alone, and when even that does not fit, as traced.
    """
    for divisor in (1, 2, 4, 8):
        runs = [runs_of(key_list, instance.budget // divisor) for key_list in instance.lists]
        decision = _place_one_ahead(instance, Bucketing(instance, runs))
        if decision is not None or instance.budget == UNBOUNDED:
            break
    return decision or _place_one_ahead(instance, instance.singles()) or decide_none(instance)


def _place_one_ahead(instance: Instance, bucketing: Bucketing) -> Decision | None:
    slots = [
        max(pair) for pair in zip(one_ahead(bucketing), not_before(instance, bucketing, Lead()), strict=True)
    ]
    placed = place(instance, bucketing, order_by_slot(bucketing, slots), slots)
    return None if placed is None else Decision(bucketing.members, placed.events)


def _greedy_gathers(instance: Instance, key_list: KeyList, cap_bytes: int) -> Runs:
    uses = [instance.problem.collectives[number].latest_wait for number in key_list.members]
    before = instance.compute_before
    runs: Runs = []
    for at in range(len(uses)):
        if len(runs) > 1:
            first = runs[-1][0]
            cover = before[uses[first]] - before[uses[runs[-2][0]]]
            if _may_join(key_list, first, at, cap_bytes) and _bucket_ns(key_list, first, at) <= cover:
                runs[-1] = (first, at)
                continue
        runs.append((at, at))
    return runs


def _greedy_reductions(instance: Instance, key_list: KeyList, cap_bytes: int) -> Runs:
    items = instance.problem.collectives
    ready = [items[number].earliest_issue for number in key_list.members]
    gather_ns = _gather_time_by_slot(instance, items[key_list.members[0]].key.group)
    before = instance.compute_before
    runs: Runs = []
    for at in range(len(ready)):
        if runs:
            first = runs[-1][0]
            cover = before[ready[at]] - before[ready[first]]
            gathers = gather_ns[ready[at]] - gather_ns[ready[first]]
            busy_ns = _bucket_ns(key_list, first, at) + gathers
            if _may_join(key_list, first, at, cap_bytes) and busy_ns <= cover:
                runs[-1] = (first, at)
                continue
        runs.append((at, at))
    return runs


def _gather_time_by_slot(instance: Instance, group: str) -> Sequence[int]:
    """Total transfer time of the group's gathers used before each slot."""
    at_slot = [0] * (instance.slots + 1)
    for item in instance.problem.collectives:
        if item.role is Role.GATHER and item.key.group == group:
            at_slot[item.latest_wait + 1] += item.transfer_ns
    for slot in range(1, len(at_slot)):
        at_slot[slot] += at_slot[slot - 1]
    return at_slot


def _may_join(key_list: KeyList, first: int, last: int, cap_bytes: int) -> bool:
    held = key_list.held_sum[last + 1] - key_list.held_sum[first]
    return first >= key_list.first_legal[last] and held <= cap_bytes


def _bucket_ns(key_list: KeyList, first: int, last: int) -> int:
    return key_list.alpha_ns + key_list.transfer_sum[last + 1] - key_list.transfer_sum[first]
