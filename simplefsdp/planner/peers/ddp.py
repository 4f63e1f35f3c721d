"""DDP's schedule: gradients of replicated parameters in buckets, reduced while backward runs.

Owns its rules, written from `DistributedDataParallel` and its reducer (torch 2.13), with their defaults. Must not know
FX or models: facts in, facts with a plan out.

* Buckets are filled in the order in which gradients come, as DDP arranges them after the first step: one is closed when
  it holds 1 MiB, the others when they hold 25 MiB. A gradient larger than that is a bucket of its own, or closes one.
* A gradient is copied into its bucket by a kernel of its own when it is there. A full bucket is reduced at once.
* When backward is over buckets are waited for in order, and each gradient is copied out again: the buckets stay beside
  the gradients for the whole step, since `gradient_as_bucket_view` is off unless somebody sets it.

Where blocks are compiled, a block hands over its gradients when its whole backward is done.

Not modelled: buffers that the first rank sends at the start of forward, the cast of a gradient where there is one
besides the copy, and the host falling behind the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from inductor_passes.plan import GroupKey
from simplefsdp.explainer.facts import BEFORE, GraphFacts, Memory, Region, Value
from simplefsdp.planner.peers.units import (
    ROOT,
    START,
    WAIT,
    Move,
    NotModelledError,
    Sharing,
    Unit,
    sharing_of,
    with_plan,
)

DDP_EAGER = "DDP, eager"
DDP_COMPILED = "DDP, compiled blocks"

_MIB = 2**20
FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 * _MIB, 25 * _MIB


def plan_ddp(
    forward: GraphFacts, backward: GraphFacts, name: str, *, compiled: bool = False
) -> tuple[GraphFacts, GraphFacts]:
    """The schedule of the module docstring.

    Args:
        forward, backward: facts of a step with replicated parameters.
        name: for the plans.
        compiled: gradients of a block come together.

    Raises:
        NotModelledError: other communication than all-reduces of gradients over one group.
    """
    if sharing_of(forward, backward) is not Sharing.REPLICATED:
        raise NotModelledError("DDP replicates parameters")
    buckets = _buckets(backward, _ready_slots(backward, compiled=compiled))
    size_bytes = sum(item.size_bytes for item in backward.problem.collectives)
    backward = _with_copies(backward, buckets)
    end = backward.problem.last_slot - len(buckets)
    moves = [Move(bucket.slot, bucket, START) for bucket in buckets]
    moves += [Move(end + number, bucket, WAIT) for number, bucket in enumerate(buckets)]
    return (
        with_plan(_with_buffer(forward, size_bytes), name, []),
        with_plan(_with_buffer(backward, size_bytes), name, moves),
    )


def _ready_slots(facts: GraphFacts, *, compiled: bool) -> list[int]:
    """Where each gradient is handed over."""
    items = facts.problem.collectives
    last: dict[str, int] = {}
    for item in items:
        if item.block is not ROOT:
            last[item.block] = max(last.get(item.block, 0), item.earliest_issue)
    return [
        last[item.block] if compiled and item.block is not ROOT else item.earliest_issue for item in items
    ]


def _buckets(facts: GraphFacts, ready: Sequence[int]) -> list[Unit]:
    """Gradients in the order in which they come, closed when a bucket is full; kinds of their own have buckets of
    their own."""
    items = facts.problem.collectives
    closed: list[Unit] = []
    filling: dict[GroupKey, list[int]] = {}
    limit: dict[GroupKey, int] = {}

    def close(key: GroupKey) -> None:
        members = filling.pop(key)
        closed.append(Unit(ROOT, tuple(sorted(members)), max(ready[number] for number in members)))

    for number in sorted(range(len(items)), key=lambda at: (ready[at], at)):
        key = items[number].key
        filling.setdefault(key, []).append(number)
        if sum(items[member].size_bytes for member in filling[key]) >= limit.get(key, FIRST_BUCKET_BYTES):
            close(key)
            limit[key] = BUCKET_BYTES
    for key in list(filling):
        close(key)
    return sorted(closed, key=lambda bucket: bucket.slot)


def _with_copies(facts: GraphFacts, buckets: Sequence[Unit]) -> GraphFacts:
    """A backward whose regions copy each gradient they make into its bucket, and with a region for each bucket that
    copies out of it in the end."""
    problem, end = facts.problem, len(facts.regions)
    times = list(problem.region_ns)
    for item in problem.collectives:
        times[max(item.earliest_issue - 1, 0)] += item.copy_in_ns + problem.kernel_ns
    regions = list(facts.regions)
    for number, bucket in enumerate(buckets):
        members = [problem.collectives[member] for member in bucket.members]
        times.append(sum(item.copy_out_ns + problem.kernel_ns for item in members))
        regions.append(Region(f"copy out of bucket {number}", ""))
    added = len(buckets)
    collectives = tuple(
        dataclasses.replace(
            item, copy_in_ns=0, copy_out_ns=0, latest_issue=end + added, latest_wait=end + added
        )
        for item in problem.collectives
    )
    return dataclasses.replace(
        facts,
        regions=tuple(regions),
        values=tuple(
            dataclasses.replace(value, dies=end + added) if value.dies == end else value
            for value in facts.values
        ),
        # The bucket is there already; what is left of a reduction is the gradient.
        traffic=tuple(
            dataclasses.replace(held, sent_bytes=0, last_use=end + added) for held in facts.traffic
        ),
        problem=dataclasses.replace(problem, region_ns=tuple(times), collectives=collectives),
    )


def _with_buffer(facts: GraphFacts, size_bytes: int) -> GraphFacts:
    """A graph beside which the buckets stay."""
    buckets = Value("buckets of DDP", size_bytes, Memory.COMMUNICATION, BEFORE, len(facts.regions))
    return dataclasses.replace(facts, values=(*facts.values, buckets))
