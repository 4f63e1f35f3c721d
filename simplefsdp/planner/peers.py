"""What other implementations would do with the same step: their schedules as plans for the same simulator.

Owns the rules of the peers, written from their code (torch 2.13). Must not know FX or models: facts in, facts with a
plan out. Everything is modelled; nothing of a peer runs.

* FSDP2 (`fully_shard` of each block, then of the model): see `plan_fsdp2`. In eager mode, or with each block compiled
  and the rest (embedding, last norm, head, loss) eager.
* Inductor's stock passes on the whole compiled graph: see `plan_stock_manual`.

Not modelled of any: the host falling behind the device, NCCL kernels taking multiprocessors from compute, and gathers
and reductions running at once (they share a communicator, so here they queue).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence

from inductor_passes.plan import Collective, Plan, Role
from inductor_passes.planners.bound import lower_bound
from inductor_passes.planners.instance import Instance
from inductor_passes.planners.schedule import make_plan
from simplefsdp.explainer.facts import BEFORE, GraphFacts, Memory, Value

ROOT = None
"""Stands for the parameters that are in no block: FSDP2's root module has them."""

FSDP2_EAGER = "FSDP2, eager"
FSDP2_COMPILED = "FSDP2, compiled blocks"
STOCK_MANUAL = "Inductor, by block"

_START, _WAIT = False, True


class NotModelledError(ValueError):
    """A step that the rules of a peer do not cover; the text says why."""


@dataclasses.dataclass(frozen=True)
class _Unit:
    """Collectives of one kind and one block, which a peer moves as one.

    Args:
        block: the block, `ROOT` for what is in none.
        members: numbers of the collectives, ascending.
        slot: of gathers the first use, of reductions where all gradients are there.
    """

    block: str | None
    members: tuple[int, ...]
    slot: int


@dataclasses.dataclass(frozen=True)
class _Move:
    """A start or a wait of a unit; of one slot, in the order in which they are listed."""

    slot: int
    unit: _Unit
    is_wait: bool


def plan_fsdp2(
    forward: GraphFacts, backward: GraphFacts, name: str, *, keep_last: bool = False
) -> tuple[GraphFacts, GraphFacts]:
    """FSDP2's schedule.

    Forward: the root's parameters are gathered when the model is called, and stay for backward. Gathers of blocks have
    streams of their own: one begins when the copy out of the one two before it is done, so while a block computes the
    next has arrived or arrives. A block's parameters are freed when its forward is over.

    Backward: before a block's backward its gather is waited for, then that of the block below begins. When all
    gradients of a block are there they are copied into one buffer, after a wait for the reduction of the block above.
    The root's reduction comes last, with nothing left to hide it.

    Args:
        forward, backward: facts of a step that is fully sharded over one group.
        name: for the plans.
        keep_last: the last block stays gathered between forward and backward, as in torchtitan.

    Raises:
        NotModelledError: other communication than gathers and reduce-scatters of parameters over one group.
    """
    _check_fully_sharded(forward, backward)
    gathers = _units(forward, Role.GATHER)
    blocks = [unit for unit in gathers if unit.block is not ROOT]
    roots = [unit for unit in gathers if unit.block is ROOT]
    kept = {ROOT, blocks[-1].block} if keep_last and blocks else {ROOT}
    moves = [_Move(0, unit, _START) for unit in roots] + [_Move(unit.slot, unit, _WAIT) for unit in roots]
    begin = max((unit.slot for unit in roots), default=0)
    moves += [_Move(min(begin, unit.slot), unit, _START) for unit in blocks[:2]]
    for number, unit in enumerate(blocks):
        moves.append(_Move(unit.slot, unit, _WAIT))
        moves += [_Move(unit.slot, after, _START) for after in blocks[number + 2 : number + 3]]
    planned = _with_plan(_freed_together(forward, gathers, kept), name, moves)

    backward = _without_gathers(backward, kept)
    blocks = _units(backward, Role.GATHER)
    moves = _reductions(backward, _units(backward, Role.REDUCE), wait_first=True)
    slot = 0
    for unit in blocks:
        moves += [_Move(slot, unit, _START), _Move(unit.slot, unit, _WAIT)]
        slot = unit.slot
    return planned, _with_plan(_freed_together(backward, blocks, ()), name, moves)


def plan_stock_manual(facts: GraphFacts) -> GraphFacts:
    """Inductor's manual overlap scheduling with buckets by block, as torchtitan and AutoParallel use it.

    One bucket for each block; parameters in no block share one with their neighbours. The gather of the next bucket
    starts before the wait for this one; the wait for a reduction comes after the start of the next.

    Args:
        facts: a compiled graph.

    Raises:
        NotModelledError: other communication than gathers and reduce-scatters of parameters over one group.
    """
    _check_fully_sharded(facts)
    moves = _reductions(facts, _units(facts, Role.REDUCE, split_root=True), wait_first=False)
    gathers = _units(facts, Role.GATHER, split_root=True)
    moves += [_Move(unit.slot, unit, _START) for unit in gathers[:1]]
    for number, unit in enumerate(gathers):
        moves += [_Move(unit.slot, after, _START) for after in gathers[number + 1 : number + 2]]
        moves.append(_Move(unit.slot, unit, _WAIT))
    return _with_plan(facts, STOCK_MANUAL, moves)


def compile_blocks(eager: GraphFacts, compiled: GraphFacts) -> GraphFacts:
    """A step whose blocks are compiled one by one and whose rest runs in eager mode.

    Kernels of a block together take as long as in the compiled graph, each its share; what a checkpointing policy
    caches and backward does not read is not kept. Tensors inside a block are those of eager mode, which is too many
    while the block computes.

    Args:
        eager: forward or backward in eager mode.
        compiled: the same, compiled as one graph.
    """
    names = sorted({item.block for item in eager.problem.collectives if item.block is not None})
    where = _block_of_regions(eager, names)
    spent = _time_by_block(eager, where)
    allowed = _time_by_block(compiled, _block_of_regions(compiled, names))
    times, done, given = [], dict.fromkeys(spent, 0), dict.fromkeys(spent, 0)
    for block, duration in zip(where, eager.problem.region_ns, strict=True):
        if block is not None and allowed.get(block) and spent[block]:
            done[block] += duration
            share = allowed[block] * done[block] // spent[block] - given[block]
            given[block] += share
            times.append(share)
        else:
            times.append(duration)
    values = tuple(_read_only(value, len(times)) for value in eager.values)
    problem = dataclasses.replace(eager.problem, region_ns=tuple(times))
    return dataclasses.replace(eager, problem=problem, values=values)


def _read_only(value: Value, end: int) -> Value:
    """A tensor that is kept unread goes at once."""
    if not value.unread:
        return value
    return dataclasses.replace(value, dies=0 if value.born == BEFORE else value.born, unread=False)


def _block_of_regions(facts: GraphFacts, names: Sequence[str]) -> list[str | None]:
    """The block each region belongs to; what names no module between two regions of a block is of that block."""
    out: list[str | None] = []
    for region in facts.regions:
        parts = region.module.split(".")
        prefixes = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
        out.append(next((name for name in prefixes if name in names), None))
    inside = [at for at, block in enumerate(out) if block is not None]
    for at in range(inside[0], inside[-1]) if inside else ():
        out[at] = out[at] or out[at - 1]
    return out


def _time_by_block(facts: GraphFacts, where: Iterable[str | None]) -> dict[str, int]:
    out: dict[str, int] = {}
    for block, duration in zip(where, facts.problem.region_ns, strict=True):
        if block is not None:
            out[block] = out.get(block, 0) + duration
    return out


def _check_fully_sharded(*graphs: GraphFacts) -> None:
    for facts in graphs:
        items = facts.problem.collectives
        if len({item.key.group for item in items}) > 1 or any(
            item.role is Role.FIXED or item.key.kind not in ("all_gather", "reduce_scatter") for item in items
        ):
            raise NotModelledError(
                "the schedules of others are modelled for steps fully sharded over one group"
            )


def _units(facts: GraphFacts, role: Role, *, split_root: bool = False) -> list[_Unit]:
    """Collectives of one role by key and block, in the order in which they are needed or ready.

    Args:
        facts: the graph.
        role: which collectives.
        split_root: what is in no block makes a unit of its own before, between and after blocks.
    """
    found: dict[tuple[object, ...], list[int]] = {}
    items = facts.problem.collectives
    passed = 0  # members of blocks so far
    for number in sorted(range(len(items)), key=lambda at: (items[at].traced_slot, at)):
        item = items[number]
        if item.role is role:
            passed += item.block is not ROOT
            found.setdefault(
                (item.key, item.block, passed if split_root and item.block is ROOT else 0), []
            ).append(number)
    units = []
    for (_, block, _), members in found.items():
        slots = [items[number].traced_slot for number in members]
        slot = min(slots) if role is Role.GATHER else max(slots)
        units.append(_Unit(block if isinstance(block, str) else ROOT, tuple(sorted(members)), slot))
    return sorted(units, key=lambda unit: unit.slot)


def _reductions(facts: GraphFacts, units: Sequence[_Unit], *, wait_first: bool) -> list[_Move]:
    """Each reduction starts when its gradients are there, and is waited for at the start of the next: before or after
    it. With `wait_first` the root comes last, when backward is over."""
    end = facts.problem.last_slot
    if wait_first:
        roots = [dataclasses.replace(unit, slot=end) for unit in units if unit.block is ROOT]
        units = [*(unit for unit in units if unit.block is not ROOT), *roots]
    moves: list[_Move] = []
    for number, unit in enumerate(units):
        start = [_Move(unit.slot, unit, _START)]
        wait = [_Move(unit.slot, before, _WAIT) for before in units[max(0, number - 1) : number]]
        moves += wait + start if wait_first else start + wait
    return moves + [_Move(end, unit, _WAIT) for unit in units[-1:]]


def _with_plan(facts: GraphFacts, name: str, moves: Sequence[_Move]) -> GraphFacts:
    """Facts with the plan that moves make: by slot, of one slot as listed."""
    units = list(dict.fromkeys(move.unit for move in moves))
    number_of = {unit: number for number, unit in enumerate(units)}
    events = [
        (move.slot, number_of[move.unit], move.is_wait) for move in sorted(moves, key=lambda move: move.slot)
    ]
    bound = lower_bound(Instance(facts.problem))
    plan: Plan = make_plan(facts.problem, name, [unit.members for unit in units], events, bound)
    return dataclasses.replace(facts, plan=plan)


def _freed_together(facts: GraphFacts, gathers: Iterable[_Unit], kept: Collection[str | None]) -> GraphFacts:
    """Parameters of a unit are freed after the last use of any of them; those that are kept outlive the graph."""
    traffic = list(facts.traffic)
    for unit in gathers:
        last = max(traffic[number].last_use for number in unit.members)
        if unit.block in kept:
            last = len(facts.regions)
        for number in unit.members:
            traffic[number] = dataclasses.replace(traffic[number], last_use=last)
    return dataclasses.replace(facts, traffic=tuple(traffic))


def _without_gathers(facts: GraphFacts, kept: Collection[str | None]) -> GraphFacts:
    """A backward for which the parameters of some blocks are there already."""
    items = facts.problem.collectives
    gone = {number for number, item in enumerate(items) if item.role is Role.GATHER and item.block in kept}
    stays = [number for number in range(len(items)) if number not in gone]
    new_number = {old: new for new, old in enumerate(stays)}

    def renumbered(item: Collective) -> Collective:
        return dataclasses.replace(
            item, depends_on=tuple(new_number[other] for other in item.depends_on if other in new_number)
        )

    values = [
        Value(
            items[number].name,
            held.received_bytes,
            Memory.GATHERED,
            BEFORE,
            min(held.last_use, len(facts.regions) - 1),
        )
        for number, held in enumerate(facts.traffic)
        if number in gone
    ]
    problem = dataclasses.replace(
        facts.problem, collectives=tuple(renumbered(items[number]) for number in stays)
    )
    traffic = tuple(facts.traffic[number] for number in stays)
    return dataclasses.replace(facts, problem=problem, traffic=traffic, values=(*facts.values, *values))
