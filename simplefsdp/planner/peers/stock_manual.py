"""Inductor's manual overlap scheduling of a compiled graph: buckets by block, as torchtitan and AutoParallel use it.

Owns its rules, written from `overlap_manual_scheduling.py` (torch 2.13). Must not know FX or models: facts in, facts
with a plan out.

One bucket for each block; parameters in no block share one with their neighbours. The gather of the next bucket starts
before the wait for this one; the wait for a reduce-scatter comes after the start of the next. The pass buckets no
all-reduce and lets none wait for more compute: in hybrid sharding those of a block start, one for each parameter, when
its reduce-scatter has been waited for, and are waited for at once.
"""

from __future__ import annotations

from inductor_passes.plan import Role
from simplefsdp.explainer.facts import GraphFacts
from simplefsdp.planner.peers.units import (
    START,
    WAIT,
    Move,
    NotModelledError,
    Sharing,
    Unit,
    find_units,
    is_all_reduce,
    with_plan,
)

STOCK_MANUAL = "Inductor, by block"


def plan_stock_manual(facts: GraphFacts, sharing: Sharing = Sharing.FULL) -> GraphFacts:
    """The schedule of the module docstring.

    Args:
        facts: a compiled graph.
        sharing: how the step shares its parameters.

    Raises:
        NotModelledError: replicated parameters, whose all-reduces the pass leaves alone.
    """
    if sharing is Sharing.REPLICATED:
        raise NotModelledError("the pass leaves all-reduces where they are")
    items = facts.problem.collectives
    reductions = [
        unit
        for unit in find_units(facts, Role.REDUCE, split_root=True)
        if not is_all_reduce(items[unit.members[0]])
    ]
    next_of: dict[int, list[Unit]] = {}  # all-reduces by the reduce-scatter whose result they send on
    for number, item in enumerate(items):
        for before in item.depends_on:
            next_of.setdefault(before, []).append(Unit(item.block, (number,), item.traced_slot))
    moves: list[Move] = []
    for number, unit in enumerate(reductions):
        moves.append(Move(unit.slot, unit, START))
        moves += _end(reductions[number - 1], unit.slot, next_of) if number else []
    moves += _end(reductions[-1], facts.problem.last_slot, next_of) if reductions else []
    gathers = find_units(facts, Role.GATHER, split_root=True)
    moves += [Move(unit.slot, unit, START) for unit in gathers[:1]]
    for number, unit in enumerate(gathers):
        moves += [Move(unit.slot, after, START) for after in gathers[number + 1 : number + 2]]
        moves.append(Move(unit.slot, unit, WAIT))
    return with_plan(facts, STOCK_MANUAL, moves)


def _end(unit: Unit, slot: int, next_of: dict[int, list[Unit]]) -> list[Move]:
    """The wait for a reduce-scatter, and what follows it at once."""
    following = [after for number in unit.members for after in next_of.get(number, ())]
    return [
        Move(slot, unit, WAIT),
        *(Move(slot, after, START) for after in following),
        *(Move(slot, after, WAIT) for after in following),
    ]
