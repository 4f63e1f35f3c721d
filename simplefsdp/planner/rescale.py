"""The facts of a step on other devices, in other groups or with another batch, by arithmetic instead of another trace.

Owns the arithmetic of shards, groups and batches. Must not know FX or models: facts in, facts out, planned anew.

Other devices. Compute stays what it is; the same whole tensors travel in other shares, between other ranks. Hybrid
sharding sends each reduced shard on to the replicas, in the slot where its reduction was traced::

    sharded over all     gather(all)     ...   reduce_scatter(all)
    hybrid               gather(shards)  ...   reduce_scatter(shards) -> all_reduce(replicas) of the shard

Steps that replicate parameters gather nothing, so their compute is cut and fused in other places: those only change
the number of devices.

Another batch. Every tensor and every time is a constant plus a multiple of the batch, up to the rounding of times and
kernels that turn from memory-bound to compute-bound, so two traced batches give the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from inductor_passes.costs.model import ProfileCostModel
from inductor_passes.costs.profiles import HardwareProfile
from inductor_passes.costs.topology import GroupTopology, mesh_topology
from inductor_passes.plan import Collective, GroupKey, PlanningProblem, Role
from inductor_passes.planners import plan_collectives
from simplefsdp.explainer.facts import GraphFacts, Traffic, last_use_of_sent

SHARD_GROUP, REPLICA_GROUP = "group0", "group1"
"""Labels of the two groups of a step: they are numbered as they first communicate."""


class RescaleError(ValueError):
    """The step has something that other devices or batches change in an unknown way; the text says what."""


@dataclasses.dataclass(frozen=True)
class World:
    """Devices, and how many of them share one copy of the parameters.

    Raises:
        ValueError: the factor does not divide the devices.
    """

    devices: int
    factor: int

    def __post_init__(self) -> None:
        if self.factor < 1 or self.devices % self.factor:
            raise ValueError(f"{self.devices} devices do not divide into groups of {self.factor}")

    @property
    def is_hybrid(self) -> bool:
        """Whether there are several copies, each sharded."""
        return 1 < self.factor < self.devices

    def shard_topology(self, ranks_per_node: int) -> GroupTopology:
        """Of the ranks that share one copy; of all when each has its own."""
        return mesh_topology(
            range(self.factor if self.factor > 1 else self.devices), self.devices, ranks_per_node
        )

    def replica_topology(self, ranks_per_node: int) -> GroupTopology:
        """Of the ranks that hold the same shard."""
        return mesh_topology(range(0, self.devices, self.factor), self.devices, ranks_per_node)


def at_world(
    facts: GraphFacts,
    profile: HardwareProfile,
    old: World,
    new: World,
    rows: Mapping[str, int],
) -> GraphFacts:
    """The facts of the same graph on other devices or in other groups.

    Args:
        facts: as traced.
        profile: hardware.
        old: where they were traced.
        new: where they are wanted.
        rows: size of each parameter's first dim, by name, which decides about padding; without it sizes stay.

    Returns:
        The facts that a trace there gives, with a plan of the same planner.

    Raises:
        RescaleError: collectives that are not of the parameters; from or to replicated parameters.
    """
    problem = facts.problem
    for item in problem.collectives:
        if item.role is Role.FIXED:
            raise RescaleError(f"{item.name}: a collective of the model's own")
    if (old.factor == 1) != (new.factor == 1):
        raise RescaleError("parameters that are replicated there and sharded here, or the other way round")
    if (old.devices == 1) != (new.devices == 1):
        raise RescaleError("one device, which sends nothing, there or here")
    out = _Sharing(facts, profile, old, new, rows)
    for number in range(len(problem.collectives)):
        out.add(number)
    problem = dataclasses.replace(problem, collectives=tuple(out.items), alpha_ns=out.alphas())
    plan = plan_collectives(problem, facts.plan.planner)
    return dataclasses.replace(facts, problem=problem, traffic=tuple(out.traffic), plan=plan)


class _Sharing:
    """The collectives of a graph, one after the other, in another world."""

    def __init__(
        self, facts: GraphFacts, profile: HardwareProfile, old: World, new: World, rows: Mapping[str, int]
    ) -> None:
        self._facts, self._old, self._new, self._rows = facts, old, new, rows
        self._cost = ProfileCostModel(profile)
        per_node = profile.value("ranks_per_node")
        self._topology = {
            SHARD_GROUP: new.shard_topology(per_node),
            REPLICA_GROUP: new.replica_topology(per_node),
        }
        self._number: dict[int, int] = {}  # new numbers of old collectives
        self._sent_on = {
            before: at for at, item in enumerate(facts.problem.collectives) for before in item.depends_on
        }
        self.items: list[Collective] = []
        self.traffic: list[Traffic] = []

    def add(self, number: int) -> None:
        item, held = self._facts.problem.collectives[number], self._facts.traffic[number]
        if item.key.kind == "all_reduce" and self._old.factor > 1:
            reduced = [at for at in item.depends_on if self._reduces(at)]
            if not (self._old.is_hybrid and reduced):
                raise RescaleError(f"{item.name}: a parameter that is not sharded")
            # Its reduction has brought a successor of its own, if there is one here.
            self._number[number] = self._number[reduced[0]] + self._new.is_hybrid
            return
        depends_on = tuple(self._number[at] for at in item.depends_on)
        size = self._padded(item)
        if item.key.kind == "all_reduce":
            sent = received = size
        else:
            share = size // self._new.factor
            sent, received = (share, size) if item.role is Role.GATHER else (size, share)
        goes_on = self._new.is_hybrid and item.key.kind == "reduce_scatter"
        end = len(self._facts.regions)
        sent_on = last_use_of_sent(item.earliest_issue, end)
        last_use = held.last_use if item.role is Role.GATHER else (sent_on if goes_on else end)
        share_kept = self._kept_share(number)
        self._number[number] = len(self.items)
        self._append(
            dataclasses.replace(item, size_bytes=size, staging_bytes=size, depends_on=depends_on),
            dataclasses.replace(
                held,
                sent_bytes=sent,
                received_bytes=received,
                last_use=last_use,
                kept_share=1.0 if goes_on else share_kept,
            ),
        )
        if goes_on:
            key = dataclasses.replace(item.key, kind="all_reduce", group=REPLICA_GROUP)
            self._append(
                dataclasses.replace(
                    item,
                    key=key,
                    size_bytes=received,
                    staging_bytes=received,
                    depends_on=(self._number[number],),
                ),
                Traffic(received, received, source=None, copied=False, last_use=end, kept_share=share_kept),
            )

    def alphas(self) -> dict[GroupKey, int]:
        """Fixed times of the kinds of collectives that are left."""
        keys = sorted({item.key for item in self.items})
        return {key: self._cost.alpha_ns(key.kind, self._topology[key.group]) for key in keys}

    def _append(self, item: Collective, traffic: Traffic) -> None:
        if item.key.group not in self._topology:
            raise RescaleError(f"{item.name}: a third process group")
        cost, topology = self._cost, self._topology[item.key.group]
        self.items.append(
            dataclasses.replace(
                item,
                transfer_ns=cost.transfer_ns(item.key.kind, topology, item.size_bytes),
                copy_in_ns=cost.copy_ns(traffic.sent_bytes),
                copy_out_ns=cost.copy_ns(traffic.received_bytes),
            )
        )
        self.traffic.append(traffic)

    def _kept_share(self, number: int) -> float:
        """What is left of a gradient, which a hybrid step casts behind the all-reduce that follows."""
        return self._facts.traffic[self._sent_on.get(number, number)].kept_share

    def _reduces(self, number: int) -> bool:
        return self._facts.problem.collectives[number].key.kind == "reduce_scatter"

    def _padded(self, item: Collective) -> int:
        """Bytes of the whole tensor, in shards of equal size."""
        rows = self._rows.get(item.name)
        if not rows or item.key.kind == "all_reduce":
            return item.size_bytes
        old, new = (-(-rows // world.factor) * world.factor for world in (self._old, self._new))
        return item.size_bytes // old * new


def at_batch(low: GraphFacts, low_batch: int, high: GraphFacts, high_batch: int, batch: int) -> GraphFacts:
    """The facts of the same graph with another batch.

    Args:
        low, high: of two batches.
        low_batch, high_batch: sequences per device in them.
        batch: sequences per device wanted.

    Raises:
        RescaleError: the two graphs differ in more than sizes and times.
    """

    def line(at_low: int, at_high: int) -> int:
        return at_high + (at_high - at_low) * (batch - high_batch) // (high_batch - low_batch)

    if batch == high_batch:
        return high
    if _shape(low) != _shape(high):
        raise RescaleError(f"{high.kind}: batches {low_batch} and {high_batch} give different graphs")
    problem: PlanningProblem = dataclasses.replace(
        high.problem, region_ns=tuple(map(line, low.problem.region_ns, high.problem.region_ns))
    )
    return dataclasses.replace(
        high,
        regions=tuple(
            dataclasses.replace(new, flops=line(old.flops, new.flops))
            for old, new in zip(low.regions, high.regions, strict=True)
        ),
        values=tuple(
            dataclasses.replace(new, size_bytes=line(old.size_bytes, new.size_bytes))
            for old, new in zip(low.values, high.values, strict=True)
        ),
        problem=problem,
        plan=plan_collectives(problem, high.plan.planner),
    )


def _shape(facts: GraphFacts) -> tuple[object, ...]:
    """What a batch must not change. Names of regions may: a batch of one skips an operator here and there."""
    problem = facts.problem
    return (
        facts.kind,
        facts.failure,
        [region.module for region in facts.regions],
        [(value.memory, value.born, value.dies) for value in facts.values],
        facts.traffic,
        problem.collectives,
        dict(problem.alpha_ns),
        problem.memory_budget_bytes,
    )
