"""FSDP2's schedule: `fully_shard` of each block, then of the model, fully sharded or hybrid.

Owns its rules, written from its code (`torch/distributed/fsdp/_fully_shard`, torch 2.13). Must not know FX or models:
facts in, facts with a plan out. The facts may be those of eager mode, or of compiled blocks with the rest (embedding,
last norm, head, loss) in eager mode.

Not modelled: the host falling behind the device, NCCL kernels taking multiprocessors from compute, and gathers and
reductions running at once (they share a communicator, so here they queue).
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping, Sequence

from inductor_passes.plan import Role
from simplefsdp.explainer.facts import GraphFacts
from simplefsdp.explainer.schedule import COMPUTE_ROW, Activity, make_timeline
from simplefsdp.planner.peers.units import (
    ROOT,
    START,
    WAIT,
    Move,
    NotModelledError,
    Sharing,
    Unit,
    find_units,
    freed_together,
    is_all_reduce,
    sharing_of,
    with_plan,
    without,
    without_gathers,
)

FSDP2_EAGER = "FSDP2, eager"
FSDP2_COMPILED = "FSDP2, compiled blocks"


def plan_fsdp2(
    forward: GraphFacts, backward: GraphFacts, name: str, *, keep_last: bool = False
) -> tuple[GraphFacts, GraphFacts]:
    """FSDP2's schedule.

    Forward: the root's parameters are gathered when the model is called, and stay for backward. Gathers of blocks have
    streams of their own: one begins when the copy out of the one two before it is done, so while a block computes the
    next has arrived or arrives. A block's parameters are freed when its forward is over.

    Backward: before a block's backward its gather is waited for, then that of the block below begins. When all
    gradients of a block are there they are copied into one buffer, after a wait for the reduce-scatter of the block
    above. The root's comes last, with nothing left to hide it.

    Hybrid sharding: the all-reduce of a block runs on a stream of its own, in the buffer of the reduce-scatter and as
    soon as that is done; compute and the reduce-scatter of the next block do not wait for it, only the end of backward
    does. Here it begins with the first kernel after that moment, which is up to one kernel late.

    Args:
        forward, backward: facts of a step that is sharded over one group, with replicas or without.
        name: for the plans.
        keep_last: the last block stays gathered between forward and backward, as in torchtitan.

    Raises:
        NotModelledError: other communication than that; parameters that stay gathered after forward.
    """
    sharing = sharing_of(forward, backward)
    if sharing is Sharing.REPLICATED:
        raise NotModelledError("FSDP2 shards parameters")
    gathers = find_units(forward, Role.GATHER)
    blocks = [unit for unit in gathers if unit.block is not ROOT]
    roots = [unit for unit in gathers if unit.block is ROOT]
    kept = {ROOT, blocks[-1].block} if keep_last and blocks else {ROOT}
    moves = [Move(0, unit, START) for unit in roots] + [Move(unit.slot, unit, WAIT) for unit in roots]
    begin = max((unit.slot for unit in roots), default=0)
    moves += [Move(min(begin, unit.slot), unit, START) for unit in blocks[:2]]
    for number, unit in enumerate(blocks):
        moves.append(Move(unit.slot, unit, WAIT))
        moves += [Move(unit.slot, after, START) for after in blocks[number + 2 : number + 3]]
    planned = with_plan(freed_together(forward, gathers, kept), name, moves)

    backward = without_gathers(backward, kept)
    backward = freed_together(backward, find_units(backward, Role.GATHER), ())
    if sharing is Sharing.HYBRID:
        backward = _reduced_in_place(backward)
        sharded, number_of = without(backward, _all_reduces(backward))
        done = _arrivals(with_plan(sharded, name, _backward_moves(sharded)))
        arrival = {old: done[new] for old, new in number_of.items()}
        return planned, with_plan(backward, name, _backward_moves(backward, arrival))
    return planned, with_plan(backward, name, _backward_moves(backward))


def _backward_moves(facts: GraphFacts, arrival: Mapping[int, int] | None = None) -> list[Move]:
    """Starts and waits of a backward.

    Args:
        facts: the backward.
        arrival: the slot where each collective is done, by number; of reduce-scatters that all-reduces follow.
    """
    end = facts.problem.last_slot
    items = facts.problem.collectives
    units = find_units(facts, Role.REDUCE)
    roots = [dataclasses.replace(unit, slot=end) for unit in units if unit.block is ROOT]
    units = [*(unit for unit in units if unit.block is not ROOT), *roots]
    following = {
        before: unit
        for unit in units
        if is_all_reduce(items[unit.members[0]])
        for number in unit.members
        for before in items[number].depends_on
    }
    units = [unit for unit in units if not is_all_reduce(items[unit.members[0]])]
    moves: list[Move] = []
    for number, unit in enumerate(units):
        moves.append(Move(unit.slot, unit, START))
        limit = units[number + 1].slot if number + 1 < len(units) else end
        slot = limit if arrival is None else min(limit, max(unit.slot, arrival[unit.members[0]]))
        moves.append(Move(slot, unit, WAIT))
        moves += [Move(slot, after, START) for after in _after(unit, following)]
    moves += [Move(end, after, WAIT) for unit in units for after in _after(unit, following)]
    slot = 0
    for unit in find_units(facts, Role.GATHER):
        moves += [Move(slot, unit, START), Move(unit.slot, unit, WAIT)]
        slot = unit.slot
    return moves


def _after(unit: Unit, following: Mapping[int, Unit]) -> Sequence[Unit]:
    return list(dict.fromkeys(following[number] for number in unit.members if number in following))


def _all_reduces(facts: GraphFacts) -> set[int]:
    return {number for number, item in enumerate(facts.problem.collectives) if is_all_reduce(item)}


def _arrivals(facts: GraphFacts) -> dict[int, int]:
    """The first slot at which each collective of a planned graph is done, by number."""
    timeline = make_timeline(facts)
    begins = [
        span.begin_ns
        for span in timeline.spans
        if span.row == COMPUTE_ROW and span.activity is Activity.COMPUTE
    ]
    regions = [region for region, duration in enumerate(facts.problem.region_ns) if duration]
    slots = [*regions, facts.problem.last_slot]
    return {
        number: slots[bisect.bisect_left(begins, time.end_ns)]
        for bucket, time in zip(facts.plan.buckets, timeline.buckets, strict=True)
        for number in bucket.members
    }


def _reduced_in_place(facts: GraphFacts) -> GraphFacts:
    """All-reduces work in the buffer of the reduce-scatter before them, which is the gradient in the end."""
    items, traffic = list(facts.problem.collectives), list(facts.traffic)
    for number in _all_reduces(facts):
        for before in items[number].depends_on:
            traffic[before] = dataclasses.replace(traffic[before], last_use=len(facts.regions))
        items[number] = dataclasses.replace(items[number], copy_in_ns=0, copy_out_ns=0, staging_bytes=0)
        traffic[number] = dataclasses.replace(traffic[number], sent_bytes=0, received_bytes=0)
    problem = dataclasses.replace(facts.problem, collectives=tuple(items))
    return dataclasses.replace(facts, problem=problem, traffic=tuple(traffic))
