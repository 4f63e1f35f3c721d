"""From the facts of a graph with a few equal layers to those of the same graph with many.

Owns the repetition. Must not know FX, models or plans: facts in, facts out.

Layers run in order, up in forward and down in backward. The second layer to run is repeated; the third shows what of it
moves along and what stays::

    traced     head | a | B | C | d | tail         B and C must be alike, or the graph cannot be extended
    extended   head | a | B | B'| B"| C | d | tail

A place (a slot or region) that an element of B names either moves with the layer (C names the place one layer later) or
is fixed (C names the same one: the start, or something behind all layers).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from inductor_passes.plan import Collective
from inductor_passes.planners import plan_collectives
from simplefsdp.explainer.facts import BEFORE, GraphFacts, Region, Traffic, Value

TRACED_LAYERS = 4
"""Layers a trace needs: the first, the one to repeat, the one to compare with, the last."""


class ExtensionError(ValueError):
    """Layers are not alike; the text says in what."""


def extend(facts: GraphFacts, stack: str, layers: int) -> GraphFacts:
    """Repeat a layer until there are as many as asked for, and plan anew.

    Args:
        facts: of a graph with `TRACED_LAYERS` layers.
        stack: fully qualified name of the `ModuleList` that holds them.
        layers: how many there shall be.

    Returns:
        The facts that tracing that many layers gives, with a plan of the same planner.

    Raises:
        ExtensionError: the layers are not alike.
    """
    if layers == TRACED_LAYERS:
        return facts
    if layers < TRACED_LAYERS:
        raise ExtensionError(f"{layers} layers: tracing {TRACED_LAYERS} and repeating one gives more")
    return _Extension(facts, stack, layers - TRACED_LAYERS).result()


def has_layers(facts: GraphFacts, stack: str) -> bool:
    """Whether anything in a graph is of one of the layers.

    Args:
        facts: of a graph.
        stack: fully qualified name of the `ModuleList` that holds them.
    """
    names = [region.module for region in facts.regions] + [item.name for item in facts.problem.collectives]
    return any(name.startswith(f"{stack}.") for name in names)


@dataclasses.dataclass(frozen=True)
class _Place:
    """How a layer's regions lie: the repeated layer is `first` to `second`, the next to `third`, the last to `tail`."""

    first: int
    second: int
    third: int
    tail: int
    end: int
    copies: int

    @property
    def period(self) -> int:
        return self.second - self.first

    def fixed(self, at: int, what: str) -> int:
        """Where a fixed place goes."""
        if at <= self.first:
            return at
        if at >= self.tail:
            return at + self.copies * self.period
        raise ExtensionError(f"{what} names a fixed place inside a layer")

    def moved(self, at: int, next_at: int, copy: int, what: str) -> int:
        """Where a place named by a repeated layer goes, given what the next layer names."""
        if next_at == at + self.period:
            return at + copy * self.period
        if next_at == at:
            return self.fixed(at, what)
        raise ExtensionError(f"{what} names place {at}, the same thing one layer later {next_at}")

    def edge(self, at: int, after: bool, what: str) -> int:
        """Where a place named by the head, the first layer, the last or the tail goes."""
        if at <= self.first or (not after and at < self.second):
            return at
        if at >= self.third or after:
            return at + self.copies * self.period
        raise ExtensionError(f"{what} names a place two layers away")


class _Extension:
    def __init__(self, facts: GraphFacts, stack: str, copies: int) -> None:
        self._facts, self._copies = facts, copies
        self._name = re.compile(rf"^{re.escape(stack)}\.(\d+)(?=\.|\s|$)")
        self._stack = stack
        region_layers = self._fill([self._layer(region.module) for region in facts.regions])
        order = list(dict.fromkeys(layer for layer in region_layers if layer is not None))
        if len(order) != TRACED_LAYERS or order not in (sorted(order), sorted(order, reverse=True)):
            raise ExtensionError(f"{facts.kind}: layers of {stack!r} run in the order {order}")
        self._order = order
        ordinals = [None if layer is None else order.index(layer) for layer in region_layers]
        counts = [ordinals.count(at) for at in range(TRACED_LAYERS)]
        first, second = ordinals.index(1), ordinals.index(2)
        third = second + counts[2]
        if ordinals[first:third] != [1] * counts[1] + [2] * counts[2] or counts[1] != counts[2]:
            raise ExtensionError(f"{facts.kind}: layers of {stack!r} overlap or differ in length")
        tail = 1 + max(at for at, ordinal in enumerate(ordinals) if ordinal is not None)
        self._place = _Place(first, second, third, tail, len(facts.regions), copies)
        self._ordinals = ordinals
        times = facts.problem.region_ns
        if times[first:second] != times[second:third]:
            raise ExtensionError(f"{facts.kind}: layers of {stack!r} take different times")

    def result(self) -> GraphFacts:
        facts, place = self._facts, self._place
        regions: list[Region] = []
        times: list[int] = []
        for at, copy in self._sequence([self._phase_of_region(at) for at in range(place.end)]):
            region = facts.regions[at]
            ordinal = self._ordinals[at]
            name, module = (self._renamed(text, ordinal, copy) for text in (region.name, region.module))
            regions.append(dataclasses.replace(region, name=name, module=module))
            times.append(facts.problem.region_ns[at])
        values, number_of = self._values()
        collectives, traffic = self._collectives(number_of)
        problem = dataclasses.replace(facts.problem, region_ns=tuple(times), collectives=tuple(collectives))
        plan = plan_collectives(problem, facts.plan.planner)
        return dataclasses.replace(
            facts,
            regions=tuple(regions),
            values=tuple(values),
            traffic=tuple(traffic),
            problem=problem,
            plan=plan,
        )

    def _values(self) -> tuple[list[Value], dict[tuple[int, int], int]]:
        values = self._facts.values
        anchors = [value.dies if value.born == BEFORE else value.born for value in values]
        ordinals = [self._ordinals[at] if at < self._place.end else None for at in anchors]
        phases = [self._phase(at, ordinal) for at, ordinal in zip(anchors, ordinals, strict=True)]
        twins = self._twins(ordinals, "tensors")
        made: list[tuple[tuple[int, int], Value]] = []
        for number, copy in self._sequence(phases):
            value, twin = values[number], twins.get(number)
            if twin is not None and (value.size_bytes, value.memory) != (
                values[twin].size_bytes,
                values[twin].memory,
            ):
                raise ExtensionError(f"a tensor of {value.name} differs from that of the next layer")
            what = f"a tensor of {value.name}"
            other_born, other_dies = (None, None) if twin is None else (values[twin].born, values[twin].dies)
            born = value.born
            if born != BEFORE:
                born = self._where(born, other_born, copy, phases[number], what)
            dies = self._where(value.dies, other_dies, copy, phases[number], what)
            name = self._renamed(value.name, ordinals[number], copy)
            made.append(((number, copy), dataclasses.replace(value, name=name, born=born, dies=dies)))
        # As in a trace: what was there before comes first, in the order in which it is used up.
        made.sort(key=lambda item: (item[1].born, item[1].dies if item[1].born == BEFORE else 0))
        number_of = {old: number for number, (old, _) in enumerate(made)}
        return [value for _, value in made], number_of

    def _collectives(self, number_of: dict[tuple[int, int], int]) -> tuple[list[Collective], list[Traffic]]:
        items, traffic = self._facts.problem.collectives, self._facts.traffic
        layers = [self._layer(item.name) for item in items]
        ordinals = [None if layer is None else self._order.index(layer) for layer in layers]
        phases = [
            self._phase(item.traced_slot, ordinal) for item, ordinal in zip(items, ordinals, strict=True)
        ]
        twins = self._twins(ordinals, "collectives")
        per_layer = len(twins)
        keyed: list[tuple[int, int, int]] = []
        for number, copy in self._sequence(phases):
            # Collectives of neighbouring layers may interleave, so their order follows from their numbers.
            shift = copy if phases[number] == 1 else (self._copies if phases[number] == 2 else 0)
            keyed.append((number + shift * per_layer, number, copy))
        keyed.sort()
        if [key for key, _, _ in keyed] != list(range(len(keyed))):
            raise ExtensionError(f"{self._facts.kind}: collectives of the layers do not repeat in order")
        position = {(number, copy): at for at, (_, number, copy) in enumerate(keyed)}
        new_items, new_traffic = [], []
        for _, number, copy in keyed:
            item, sent = items[number], traffic[number]
            twin = twins.get(number)
            other, other_sent = (None, None) if twin is None else (items[twin], traffic[twin])
            if other is not None and (item.key, item.size_bytes) != (other.key, other.size_bytes):
                raise ExtensionError(f"{item.name} differs from {other.name}")

            def place(
                at: int, next_at: int | None, what: str = item.name, number: int = number, copy: int = copy
            ) -> int:
                return self._where(at, next_at, copy, phases[number], what)

            new_items.append(
                dataclasses.replace(
                    item,
                    name=self._renamed(item.name, ordinals[number], copy),
                    block=None if item.block is None else self._renamed(item.block, ordinals[number], copy),
                    earliest_issue=place(
                        item.earliest_issue, None if other is None else other.earliest_issue
                    ),
                    latest_issue=place(item.latest_issue, None if other is None else other.latest_issue),
                    latest_wait=place(item.latest_wait, None if other is None else other.latest_wait),
                    depends_on=tuple(
                        self._follow(position, before, copy, "dependency") for before in item.depends_on
                    ),
                )
            )
            new_traffic.append(
                dataclasses.replace(
                    sent,
                    source=None
                    if sent.source is None
                    else self._follow(number_of, sent.source, copy, "gradient"),
                    last_use=place(sent.last_use, None if other_sent is None else other_sent.last_use),
                )
            )
        return new_items, new_traffic

    def _where(self, at: int, next_at: int | None, copy: int, phase: int, what: str) -> int:
        if next_at is not None and phase == 1:
            return self._place.moved(at, next_at, copy, what)
        return self._place.edge(at, phase == 2, what)

    def _follow(self, new: dict[tuple[int, int], int], old: int, copy: int, what: str) -> int:
        """The new number of something that an element names: of the same copy, or not repeated."""
        if (old, copy) in new:
            return new[old, copy]
        if (old, 0) in new and (old, 1) not in new:
            return new[old, 0]
        raise ExtensionError(f"a {what} reaches into another layer")

    def _sequence(self, phases: Sequence[int]) -> list[tuple[int, int]]:
        """(old number, copy) in new order: what comes before, every copy of the layer, what comes after."""
        numbers = range(len(phases))
        before = [(number, 0) for number in numbers if phases[number] == 0]
        repeated = [
            (number, copy) for copy in range(self._copies + 1) for number in numbers if phases[number] == 1
        ]
        after = [(number, 0) for number in numbers if phases[number] == 2]
        return [*before, *repeated, *after]

    def _twins(self, ordinals: Sequence[int | None], what: str) -> dict[int, int]:
        """The element of the next layer for each element of the repeated one, by number."""
        mine = [number for number, ordinal in enumerate(ordinals) if ordinal == 1]
        others = [number for number, ordinal in enumerate(ordinals) if ordinal == 2]
        if len(mine) != len(others):
            raise ExtensionError(f"{self._facts.kind}: layers have {len(mine)} and {len(others)} {what}")
        return dict(zip(mine, others, strict=True))

    def _phase_of_region(self, at: int) -> int:
        return self._phase(at, self._ordinals[at])

    def _phase(self, at: int, ordinal: int | None) -> int:
        if ordinal is None:
            return 0 if at < self._place.first else 2
        return min(ordinal, 2)

    def _layer(self, name: str) -> int | None:
        found = self._name.match(name)
        return None if found is None else int(found[1])

    def _renamed(self, name: str, ordinal: int | None, copy: int) -> str:
        if ordinal is None or self._name.match(name) is None:
            return name
        layers = TRACED_LAYERS + self._copies
        at = ordinal + (copy if ordinal == 1 else self._copies if ordinal > 1 else 0)
        layer = at if self._order[0] == 0 else layers - 1 - at
        return self._name.sub(f"{self._stack}.{layer}", name)

    @staticmethod
    def _fill(layers: list[int | None]) -> list[int | None]:
        """Regions without a layer between regions of layers belong to the layer before them."""
        inside = [at for at, layer in enumerate(layers) if layer is not None]
        if not inside:
            return layers
        out = list(layers)
        for at in range(inside[0], inside[-1]):
            if out[at] is None:
                out[at] = out[at - 1]
        return out
