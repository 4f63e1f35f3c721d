"""What the schedules of others are made of: collectives that move as one, and their starts and waits in order.

Owns the way from these to a plan, and the question how a step shares its parameters. Must not know FX, models or any
one peer: facts in, facts with a plan out. Everything is modelled; nothing of a peer runs.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Iterable, Mapping, Sequence

from inductor_passes.plan import Collective, Plan, Role
from inductor_passes.planners.bound import lower_bound
from inductor_passes.planners.instance import Instance
from inductor_passes.planners.schedule import make_plan
from simplefsdp.explainer.facts import BEFORE, GraphFacts, Memory, Value

ROOT = None
"""Stands for the parameters that are in no block: FSDP2's root module has them."""

START, WAIT = False, True


class NotModelledError(ValueError):
    """A step that the rules of a peer do not cover; the text says why."""


class Sharing(enum.Enum):
    """How devices share the parameters of a step."""

    FULL = "sharded over one group"
    HYBRID = "sharded over one group, each shard replicated over another"
    REPLICATED = "replicated"


@dataclasses.dataclass(frozen=True)
class Unit:
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
class Move:
    """A start or a wait of a unit; of one slot, in the order in which they are listed."""

    slot: int
    unit: Unit
    is_wait: bool


def sharing_of(forward: GraphFacts, backward: GraphFacts) -> Sharing:
    """How the step shares its parameters.

    Raises:
        NotModelledError: communication that none of the three has; the text says which.
    """
    items = (*forward.problem.collectives, *backward.problem.collectives)
    for item in items:
        if item.role is Role.FIXED:
            raise NotModelledError(f"the model communicates by itself ({item.key.kind})")
    kinds = {item.key.kind for item in items}
    if not kinds:
        raise NotModelledError("nothing is communicated")
    groups = {kind: {item.key.group for item in items if item.key.kind == kind} for kind in sorted(kinds)}
    if kinds == {"all_reduce"} and len(groups["all_reduce"]) == 1:
        return Sharing.REPLICATED
    if any(len(its_groups) > 1 for its_groups in groups.values()):
        raise NotModelledError("its parameters are sharded over more than one group")
    if kinds - {"all_gather", "reduce_scatter", "all_reduce"} or "all_gather" not in kinds:
        raise NotModelledError(f"its parameters travel by {' and '.join(sorted(kinds))}")
    if "reduce_scatter" in kinds and groups["reduce_scatter"] != groups["all_gather"]:
        raise NotModelledError("parameters and gradients travel over different groups")
    if not any(item.role is Role.GATHER for item in backward.problem.collectives):
        raise NotModelledError("parameters stay gathered after forward")
    if "all_reduce" not in kinds:
        return Sharing.FULL
    if any(item.key.kind == "all_reduce" and not item.depends_on for item in items):
        raise NotModelledError("some parameters are sharded, others replicated")
    return Sharing.HYBRID


def is_all_reduce(item: Collective) -> bool:
    """Whether it is an all-reduce: of a shard between replicas, or of the gradient of a replicated parameter."""
    return item.key.kind == "all_reduce"


def find_units(facts: GraphFacts, role: Role, *, split_root: bool = False) -> list[Unit]:
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
        units.append(Unit(block if isinstance(block, str) else ROOT, tuple(sorted(members)), slot))
    return sorted(units, key=lambda unit: unit.slot)


def with_plan(facts: GraphFacts, name: str, moves: Sequence[Move]) -> GraphFacts:
    """Facts with the plan that moves make: by slot, of one slot as listed."""
    units = list(dict.fromkeys(move.unit for move in moves))
    number_of = {unit: number for number, unit in enumerate(units)}
    events = [
        (move.slot, number_of[move.unit], move.is_wait) for move in sorted(moves, key=lambda move: move.slot)
    ]
    return dataclasses.replace(facts, plan=plan_of(facts, name, [unit.members for unit in units], events))


def plan_of(
    facts: GraphFacts, name: str, members: Sequence[Sequence[int]], events: Sequence[tuple[int, int, bool]]
) -> Plan:
    """The plan of a decision, as `make_plan` takes it. Others know nothing of our memory budget: their bound is that of
    plans without one."""
    unbudgeted = dataclasses.replace(facts.problem, memory_budget_bytes=None)
    return make_plan(facts.problem, name, members, events, lower_bound(Instance(unbudgeted)))


def freed_together(facts: GraphFacts, gathers: Iterable[Unit], kept: Collection[str | None]) -> GraphFacts:
    """Parameters of a unit are freed after the last use of any of them; those that are kept outlive the graph."""
    traffic = list(facts.traffic)
    for unit in gathers:
        last = max(traffic[number].last_use for number in unit.members)
        if unit.block in kept:
            last = len(facts.regions)
        for number in unit.members:
            traffic[number] = dataclasses.replace(traffic[number], last_use=last)
    return dataclasses.replace(facts, traffic=tuple(traffic))


def without_gathers(facts: GraphFacts, kept: Collection[str | None]) -> GraphFacts:
    """A backward for which the parameters of some blocks are there already."""
    items = facts.problem.collectives
    gone = {number for number, item in enumerate(items) if item.role is Role.GATHER and item.block in kept}
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
    facts, _ = without(facts, gone)
    return dataclasses.replace(facts, values=(*facts.values, *values))


def without(facts: GraphFacts, gone: Collection[int]) -> tuple[GraphFacts, Mapping[int, int]]:
    """The facts without some collectives, and the new numbers of the others by their old ones."""
    items = facts.problem.collectives
    stays = [number for number in range(len(items)) if number not in gone]
    new_number = {old: new for new, old in enumerate(stays)}

    def renumbered(item: Collective) -> Collective:
        return dataclasses.replace(
            item, depends_on=tuple(new_number[other] for other in item.depends_on if other in new_number)
        )

    problem = dataclasses.replace(
        facts.problem, collectives=tuple(renumbered(items[number]) for number in stays)
    )
    traffic = tuple(facts.traffic[number] for number in stays)
    return dataclasses.replace(facts, problem=problem, traffic=traffic), new_number
