"""The language of planning: what is to be planned (a problem) and what was decided (a plan).

Owns frozen, graph-free data: it can be printed, compared, serialised and sent. Must not know FX, torch, cost
models or how plans are found (``planners/``).

Positions are *slots*. Compute is cut into regions ``0 .. n-1``; slot ``k`` is the gap just before region
``k``, slot ``n`` the end. Starts and waits live in slots; inside one slot the order is that of
``Plan.events``::

    slot 0   region 0   slot 1   region 1   ...   region n-1   slot n

What counts as in flight, and is bounded by the memory budget:

* a gather holds ``size_bytes`` in every region from its start up to the last slot where it may start, its first
  use (gathered but not yet used; from there on any plan has it in flight or in use);
* a reduction holds ``size_bytes`` in every region from its input's existence to the region before its wait (a
  gradient waiting to be reduced);
* a bucket of several members holds ``staging_bytes`` of each once more for a moment: gathers at the wait (the
  bucket and the values copied out of it), reductions at the start (the gradients and the bucket they are
  copied into).

A schedule that starts each collective where it is needed and waits at once holds nothing by this count.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping
from typing import Any

PLAN_FORMAT = 1


class Role(str, enum.Enum):
    """What a planner may do with a collective."""

    GATHER = "gather"
    """Start anywhere from its earliest slot to its first use; waited for at its first use."""
    REDUCE = "reduce"
    """Start anywhere once its input exists; waited for as late as memory allows."""
    FIXED = "fixed"
    """Not ours to move: starts and is waited for where it was traced, alone."""


@dataclasses.dataclass(frozen=True, order=True)
class GroupKey:
    """What collectives must have in common to share a bucket.

    Args:
        kind: Collective kind, as the cost model names it.
        group: Label of the process group, equal on every rank and in every run (not torch's group name).
        dtype: Dtype on the wire.
        reduce_op: Reduction, empty for gathers.
    """

    kind: str
    group: str
    dtype: str
    reduce_op: str = ""

    def __str__(self) -> str:
        return "/".join(part for part in (self.kind, self.group, self.dtype, self.reduce_op) if part)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One traced collective. Its number is its position in ``PlanningProblem.collectives``, the program
    order.

    Args:
        name: What reports call it: the parameter's name, say.
        key: Only equal keys share a bucket.
        role: What may be done with it.
        size_bytes: Bytes it holds in flight, as in the module docstring: the gathered value, the gradient.
        transfer_ns: Its share of the time of whatever bucket it travels in, without the alpha.
        earliest_issue: First slot where its input exists (0 for parameters).
        latest_issue: Last slot where it may start: for a gather its first use.
        latest_wait: Slot where its result is needed; the last slot for results that are graph outputs.
        depends_on: Numbers of earlier collectives whose *results* feed it; they must be waited for before its
        start.
        copy_in_ns: Time to copy it into a bucket, when it shares one.
        copy_out_ns: Time to copy it out of a bucket, when it shares one.
        staging_bytes: Extra bytes it holds for a moment, when it shares a bucket.
        block: Name of the module the user's ``blocks`` put it in, if any.
    """

    name: str
    key: GroupKey
    role: Role
    size_bytes: int
    transfer_ns: int
    earliest_issue: int
    latest_issue: int
    latest_wait: int
    depends_on: tuple[int, ...] = ()
    copy_in_ns: int = 0
    copy_out_ns: int = 0
    staging_bytes: int = 0
    block: str | None = None

    @property
    def traced_slot(self) -> int:
        """Where it starts when nothing is moved: gathers at their first use, the others once their input
        exists."""
        return self.latest_issue if self.role is Role.GATHER else self.earliest_issue


@dataclasses.dataclass(frozen=True)
class PlanningProblem:
    """Everything a planner may know.

    Args:
        region_ns: Duration of each compute region, in order.
        collectives: In program order, which on every rank is the order they were traced.
        alpha_ns: Fixed time of a collective of each key; a bucket pays it once.
        issue_ns: Time a start takes from the compute stream.
        kernel_ns: Fixed cost of the copy kernel into, and of the one out of, a bucket of several.
        memory_budget_bytes: Bound on bytes in flight; ``None`` for none.

    Raises:
        ValueError: A window is empty or outside the slots, a dependency points forward, a key has no alpha.
    """

    region_ns: tuple[int, ...]
    collectives: tuple[Collective, ...]
    alpha_ns: Mapping[GroupKey, int]
    issue_ns: int = 0
    kernel_ns: int = 0
    memory_budget_bytes: int | None = None

    def __post_init__(self) -> None:
        last = len(self.region_ns)
        for number, item in enumerate(self.collectives):
            where = f"collective {number} ({item.name})"
            if not 0 <= item.earliest_issue <= item.latest_issue <= item.latest_wait <= last:
                raise ValueError(
                    f"{where}: need 0 <= earliest_issue <= latest_issue <= latest_wait <= {last}, got "
                    f"{item.earliest_issue}, {item.latest_issue}, {item.latest_wait}"
                )
            if item.role is Role.FIXED and item.earliest_issue != item.latest_issue:
                raise ValueError(f"{where}: a fixed collective has one slot to start in")
            if item.key not in self.alpha_ns:
                raise ValueError(f"{where}: no alpha for key {item.key}")
            for other in item.depends_on:
                if not 0 <= other < number:
                    raise ValueError(f"{where}: depends on {other}, which is not an earlier collective")
                if self.collectives[other].traced_slot > item.traced_slot:
                    raise ValueError(f"{where}: is traced before collective {other}, which it depends on")

    @property
    def last_slot(self) -> int:
        """Number of the slot after all compute."""
        return len(self.region_ns)


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Collectives that travel as one, or a single one left alone.

    Args:
        members: Numbers of its collectives, ascending: the order inside the bucket on every rank.
        issue_slot: Where it starts.
        wait_slot: Where it is waited for.
    """

    members: tuple[int, ...]
    issue_slot: int
    wait_slot: int


@dataclasses.dataclass(frozen=True)
class Event:
    """A start or a wait in the final order. ``bucket`` is a position in ``Plan.buckets``."""

    slot: int
    action: str
    bucket: int


ISSUE, WAIT = "issue", "wait"


class AloneReason(str, enum.Enum):
    """Why a collective shares no bucket."""

    FIXED = "it is not ours to move"
    OFF = "bucketing is off"
    PLANNER = "the planner makes no such bucket"
    ONLY_ONE = "no other collective has its key"
    WINDOW = "its neighbours of the same key must start before it can, or are needed after it must"
    DEPENDENCY = "its neighbour of the same key needs its result"
    MEMORY = "with a neighbour it would not fit the memory budget"
    HIDDEN = "it is hidden already; a bucket would only add copies"
    SLOWER = "with a neighbour the modelled step is not shorter"


@dataclasses.dataclass(frozen=True)
class Exposed:
    """A bucket that blocks compute: for how long, and why.

    ``blocker`` is the bucket it queues behind, if that is the reason.
    """

    bucket: int
    exposed_ns: int
    reason: str
    blocker: int | None = None


@dataclasses.dataclass(frozen=True)
class LowerBound:
    """No plan for the problem can be faster.

    ``limit`` says what it comes from: ``"compute"`` (with the unavoidable first gather and last reduction) or
    ``"communication on <group>"``.
    """

    time_ns: int
    limit: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to do with each collective, and what the model says it costs.

    Args:
        planner: Name of the planner that found it.
        buckets: In the order of their starts; every collective is in exactly one.
        events: Every start and wait, in the order they are to be emitted.
        step_ns: Modelled time of the graph.
        compute_ns: Modelled time the compute stream is busy, copies included.
        lower_bound: What no plan can beat.
        peak_in_flight_bytes: Largest number of bytes in flight, as the module docstring counts them.
        alone: Why each collective that shares no bucket does not, by number.
        exposed: Buckets that block compute, by bucket.
    """

    planner: str
    buckets: tuple[Bucket, ...]
    events: tuple[Event, ...]
    step_ns: int
    compute_ns: int
    lower_bound: LowerBound
    peak_in_flight_bytes: int
    alone: tuple[tuple[int, AloneReason], ...] = ()
    exposed: tuple[Exposed, ...] = ()

    @property
    def exposed_ns(self) -> int:
        """Modelled time the compute stream stands still."""
        return self.step_ns - self.compute_ns

    @property
    def gap_per_mille(self) -> int:
        """How far the modelled step is above the lower bound, in per mille of the bound."""
        bound = self.lower_bound.time_ns
        return 0 if bound == 0 else (self.step_ns - bound) * 1000 // bound

    def to_json(self) -> str:
        """Canonical text: equal plans give equal bytes. :meth:`from_json` reads it back."""
        return json.dumps(
            {"format": PLAN_FORMAT, **dataclasses.asdict(self)}, sort_keys=True, separators=(",", ":")
        )

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read a plan written by :meth:`to_json`.

        Raises:
            ValueError: The text is of another format.
        """
        data: dict[str, Any] = json.loads(text)
        if data.pop("format", None) != PLAN_FORMAT:
            raise ValueError(f'a plan must have "format": {PLAN_FORMAT}')
        data["buckets"] = tuple(
            Bucket(**{**item, "members": tuple(item["members"])}) for item in data["buckets"]
        )
        data["events"] = tuple(Event(**item) for item in data["events"])
        data["lower_bound"] = LowerBound(**data["lower_bound"])
        data["alone"] = tuple((number, AloneReason(reason)) for number, reason in data["alone"])
        data["exposed"] = tuple(Exposed(**item) for item in data["exposed"])
        return Plan(**data)

    def bucket_of(self) -> dict[int, int]:
        """Which bucket each collective is in, by number."""
        return {member: at for at, bucket in enumerate(self.buckets) for member in bucket.members}
