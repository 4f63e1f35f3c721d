"""What explaining needs to know of one compiled graph, as plain data: compute regions, tensors, collectives, plan.

Owns frozen values without FX or torch: they can be extended (`planner`), simulated and drawn. Must not know where they
come from (`read.py`) or what is made of them (`schedule.py`).

Regions and collectives have the numbers they have in the planning problem. The time a tensor is alive is given in
regions: it exists from the start of region `born` (`BEFORE` the first) to the end of region `dies`; `dies` equal to
the number of regions means that it outlives the graph.
"""

from __future__ import annotations

import dataclasses
import enum

from inductor_passes.plan import Plan, PlanningProblem

BEFORE = -1


class Memory(str, enum.Enum):
    """What memory is used for."""

    ACTIVATIONS = "activations"
    GATHERED = "gathered parameters"
    GRADIENTS = "gradients"
    COMMUNICATION = "communication buffers"


@dataclasses.dataclass(frozen=True)
class Region:
    """Consecutive compute between two places where a collective may start or be waited for.

    Args:
        name: the module it was traced in, and what it does: "layers.0.mlp.up_proj mm".
        module: fully qualified name of that module, "" for the root.
        flops: floating-point operations of its matrix products and attention.
    """

    name: str
    module: str
    flops: int = 0


@dataclasses.dataclass(frozen=True)
class Value:
    """A tensor of its own memory.

    Args:
        name: module of the region that makes it, or of the last that reads it if it was there before.
        size_bytes: bytes.
        memory: what it is.
        born: region that makes it, or `BEFORE`.
        dies: last region that reads it.
        unread: kept from forward to backward although nothing in backward reads it.
    """

    name: str
    size_bytes: int
    memory: Memory
    born: int
    dies: int
    unread: bool = False


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The memory of one collective.

    Args:
        sent_bytes: its input.
        received_bytes: its result.
        source: number of the value it sends, if compute made it.
        copied: whether its input is a copy (a cast), made when it starts.
        last_use: last region that reads its result; the number of regions if that outlives the graph.
        kept_share: bytes of what a reduced gradient is once it was waited for, to those of the result: not 1 where it
            is cast to the dtype of its parameter.
    """

    sent_bytes: int
    received_bytes: int
    source: int | None
    copied: bool
    last_use: int
    kept_share: float = 1.0


def last_use_of_sent(issue_slot: int, regions: int) -> int:
    """`Traffic.last_use` of a result that only goes into another reduction (HSDP): it does not outlive the graph.

    Args:
        issue_slot: first slot in which that one may start.
        regions: how many the graph has.
    """
    return max(0, min(issue_slot, regions - 1))


@dataclasses.dataclass(frozen=True)
class GraphFacts:
    """One compiled graph: what is in it, and what the passes decided.

    Args:
        kind: "forward", "backward" or "inference".
        regions: compute, in order.
        values: tensors, inputs that were alive before (parameters, buffers, arguments) left out.
        traffic: one for each collective of `problem`.
        problem: what was planned.
        plan: what was decided.
        failure: why the passes left the graph alone; "" when they did not.
        motion: what was moved under collectives that are not ours, for reading; "" where there are none.
    """

    kind: str
    regions: tuple[Region, ...]
    values: tuple[Value, ...]
    traffic: tuple[Traffic, ...]
    problem: PlanningProblem
    plan: Plan
    failure: str = ""
    motion: str = ""

    @property
    def flops(self) -> int:
        """Floating-point operations of all matrix products and attention."""
        return sum(region.flops for region in self.regions)

    def slot_name(self, slot: int) -> str:
        """Where a slot is, for reading: "before layers.0.mlp.up_proj mm", or "at the end"."""
        return f"before {self.regions[slot].name}" if slot < len(self.regions) else "at the end"
