"""Schedules of others where parameters have replicas: FSDP2's hybrid sharding, Inductor's, and DDP."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

from inductor_passes.costs.profiles import load_profile
from inductor_passes.plan import ISSUE, Role
from inductor_passes.planners.check import check_plan
from simplefsdp.explainer.facts import BEFORE, GraphFacts, Memory
from simplefsdp.explainer.schedule import make_timeline
from simplefsdp.planner.compare import predict_peers
from simplefsdp.planner.extend import TRACED_LAYERS, extend
from simplefsdp.planner.peers import (
    DDP_COMPILED,
    DDP_EAGER,
    FSDP2_EAGER,
    NotModelledError,
    Sharing,
    compile_blocks,
    plan_ddp,
    plan_fsdp2,
    plan_stock_manual,
    sharing_of,
)
from simplefsdp.planner.predict import Stored
from tests.simplefsdp.test_plan_peers import report_of

_MIB = 2**20


@pytest.fixture(scope="module")
def hybrid():
    """Sixteen ranks, four to a shard group: compiled, and in eager mode."""
    return report_of(TRACED_LAYERS, sharding_factor=4)


@pytest.fixture(scope="module")
def replicated():
    """Every rank of sixteen has all parameters."""
    return report_of(TRACED_LAYERS, sharding_factor=1)


def said(facts: GraphFacts) -> list[str]:
    """Starts and waits: "+G1" is the start of gathers of layer 1, R of reduce-scatters, A of all-reduces."""
    letters = {"all_gather": "G", "reduce_scatter": "R", "all_reduce": "A"}
    words = []
    for event in facts.plan.events:
        item = facts.problem.collectives[facts.plan.buckets[event.bucket].members[0]]
        where = "root" if item.block is None else item.block.removeprefix("layers.")
        words.append(f"{'+' if event.action == ISSUE else '-'}{letters[item.key.kind]}{where}")
    return words


def test_a_step_tells_how_it_shares_parameters(hybrid, replicated):
    assert sharing_of(*hybrid.graphs) is sharing_of(*hybrid.eager) is Sharing.HYBRID
    assert sharing_of(*replicated.graphs) is sharing_of(*replicated.eager) is Sharing.REPLICATED
    with pytest.raises(NotModelledError, match="FSDP2 shards"):
        plan_fsdp2(*replicated.eager, FSDP2_EAGER)
    with pytest.raises(NotModelledError, match="DDP replicates"):
        plan_ddp(*hybrid.eager, DDP_EAGER)
    forward, backward = hybrid.graphs
    kept = [item for item in backward.problem.collectives if item.role is not Role.GATHER]
    numbers = [number for number, item in enumerate(backward.problem.collectives) if item in kept]
    items = tuple(
        dataclasses.replace(item, depends_on=tuple(map(numbers.index, item.depends_on))) for item in kept
    )
    ungathered = dataclasses.replace(
        backward, problem=dataclasses.replace(backward.problem, collectives=items)
    )
    with pytest.raises(NotModelledError, match="stay gathered"):
        sharing_of(forward, ungathered)


def test_eager_mode_sends_each_reduced_shard_on(hybrid):
    _, backward = hybrid.eager
    items = backward.problem.collectives
    followed = [item for item in items if item.key.kind == "all_reduce"]
    assert len(followed) == sum(item.key.kind == "reduce_scatter" for item in items) == 10
    for item in followed:
        (before,) = item.depends_on
        assert (items[before].name, items[before].key.kind) == (item.name, "reduce_scatter")
        assert item.size_bytes * 4 == items[before].size_bytes
        assert item.key.group != items[before].key.group


def test_fsdp2_reduces_between_replicas_beside_everything_else(hybrid):
    _, backward = plan_fsdp2(*hybrid.eager, FSDP2_EAGER)
    check_plan(backward.problem, backward.plan)
    words = said(backward)
    for layer in ("3", "2", "1", "0", "root"):
        at = words.index(f"-R{layer}")
        assert words[at + 1] == f"+A{layer}", "as soon as the shards are there"
    for above, below in (("3", "2"), ("2", "1"), ("1", "0")):
        assert words.index(f"+R{below}") < words.index(f"-A{above}"), "the next block does not wait for it"
    assert words[-5:] == ["-A3", "-A2", "-A1", "-A0", "-Aroot"]
    slots = {(event.bucket, event.action): event.slot for event in backward.plan.events}
    times = make_timeline(backward).buckets
    items = backward.problem.collectives
    for number, bucket in enumerate(backward.plan.buckets):
        if items[bucket.members[0]].key.kind == "all_reduce":
            before = next(
                at
                for at, other in enumerate(backward.plan.buckets)
                if items[bucket.members[0]].depends_on[0] in other.members
            )
            assert slots[number, ISSUE] == backward.plan.buckets[before].wait_slot
            assert times[number].begin_ns >= times[before].end_ns


def test_a_slow_network_between_replicas_does_not_hold_up_fsdp2(hybrid):
    """Compute waits for all-reduces at the end alone."""
    forward, backward = hybrid.eager
    slow = tuple(
        dataclasses.replace(item, transfer_ns=10**9) if item.key.kind == "all_reduce" else item
        for item in backward.problem.collectives
    )
    problem = dataclasses.replace(backward.problem, collectives=slow)
    _, planned = plan_fsdp2(forward, dataclasses.replace(backward, problem=problem), FSDP2_EAGER)
    timeline = make_timeline(planned)
    kinds = [planned.problem.collectives[bucket.members[0]].key.kind for bucket in planned.plan.buckets]
    last = max(
        time.waited_ns for time, kind in zip(timeline.buckets, kinds, strict=True) if kind == "reduce_scatter"
    )
    assert last < 10**9 < timeline.step_ns


def test_fsdp2_reduces_between_replicas_in_place(hybrid):
    _, backward = plan_fsdp2(*hybrid.eager, FSDP2_EAGER)
    held = make_timeline(backward).memory[-1]
    gradients = sum(
        traffic.received_bytes
        for item, traffic in zip(backward.problem.collectives, backward.traffic, strict=True)
        if item.key.kind == "reduce_scatter"
    )
    assert dict(zip(Memory, held.by_use, strict=True))[Memory.GRADIENTS] == gradients


def test_inductor_by_block_waits_for_all_reduces_at_once(hybrid):
    backward = plan_stock_manual(hybrid.graphs[1], Sharing.HYBRID)
    check_plan(backward.problem, backward.plan)
    words = said(backward)
    at = words.index("-R3")
    assert words.index("+R2") < at
    assert words[at + 1 : at + 5] == ["+A3", "+A3", "-A3", "-A3"]
    with pytest.raises(NotModelledError, match="leaves all-reduces"):
        plan_stock_manual(hybrid.graphs[1], Sharing.REPLICATED)


def test_repeating_a_layer_with_replicas_equals_tracing_all(hybrid, replicated):
    for factor, few in ((4, hybrid), (1, replicated)):
        for part, all_ in zip(few.eager, report_of(5, sharding_factor=factor).eager, strict=True):
            assert extend(part, "layers", 5) == all_


def larger(facts: GraphFacts, times: int) -> GraphFacts:
    """The facts with larger gradients."""
    items = tuple(
        dataclasses.replace(item, size_bytes=item.size_bytes * times) for item in facts.problem.collectives
    )
    return dataclasses.replace(facts, problem=dataclasses.replace(facts.problem, collectives=items))


@pytest.mark.parametrize("times", [1, 400, 4000, 40000])
def test_ddp_fills_buckets_as_torch_does(replicated, times):
    forward, backward = replicated.eager
    backward = larger(backward, times)
    _, planned = plan_ddp(forward, backward, DDP_EAGER)
    items = backward.problem.collectives
    arrival = sorted(range(len(items)), key=lambda number: (items[number].earliest_issue, number))
    gradients = [torch.empty(items[number].size_bytes // 4, device="meta") for number in arrival]
    expected, _ = dist._compute_bucket_assignment_by_size(gradients, [_MIB, 25 * _MIB])
    assert [list(bucket.members) for bucket in planned.plan.buckets] == [
        sorted(arrival[at] for at in bucket) for bucket in expected
    ]


def test_ddp_reduces_full_buckets_and_waits_at_the_end(replicated):
    forward, backward = replicated.eager
    backward = larger(backward, 4000)
    _, planned = plan_ddp(forward, backward, DDP_EAGER)
    check_plan(planned.problem, planned.plan)
    buckets, items = planned.plan.buckets, backward.problem.collectives
    assert len(buckets) > 2
    end = len(backward.regions)
    for number, bucket in enumerate(buckets):
        assert bucket.issue_slot == max(items[member].earliest_issue for member in bucket.members)
        assert bucket.wait_slot == end + number
    assert [region.name for region in planned.regions[end:]] == [
        f"copy out of bucket {number}" for number in range(len(buckets))
    ]
    copies = sum(
        item.copy_in_ns + item.copy_out_ns + 2 * backward.problem.kernel_ns
        for item in backward.problem.collectives
    )
    assert sum(planned.problem.region_ns) == sum(backward.problem.region_ns) + copies


def test_ddp_keeps_buckets_beside_gradients(replicated):
    graphs = plan_ddp(*replicated.eager, DDP_EAGER)
    total = sum(item.size_bytes for item in replicated.eager[1].problem.collectives)
    for facts in graphs:
        (buffer,) = [value for value in facts.values if value.memory is Memory.COMMUNICATION]
        assert (buffer.size_bytes, buffer.born, buffer.dies) == (total, BEFORE, len(facts.regions))
    last = make_timeline(graphs[1]).memory[-1]
    assert dict(zip(Memory, last.by_use, strict=True))[Memory.GRADIENTS] == total


def test_compiled_blocks_hand_over_their_gradients_together(replicated):
    forward, backward = map(compile_blocks, replicated.eager, replicated.graphs)
    _, planned = plan_ddp(forward, larger(backward, 400_000), DDP_COMPILED, compiled=True)
    items = planned.problem.collectives
    starts = {}
    for bucket in planned.plan.buckets:
        for number in bucket.members:
            starts.setdefault(items[number].block, set()).add(bucket.issue_slot)
    for layer in range(TRACED_LAYERS):
        assert len(starts[f"layers.{layer}"]) == 1


def test_rows_of_each_way_to_share(hybrid, replicated):
    profile = load_profile("h100_sxm")
    rows = predict_peers(hybrid.graphs, hybrid.eager, profile, Stored(1000, 1000))
    assert [item.planner for item in rows.predictions] == [
        "FSDP2, eager",
        "FSDP2, compiled blocks",
        "Inductor, by block",
        "Inductor, overlap scheduling",
    ]
    assert rows.left_out == ()
    rows = predict_peers(replicated.graphs, replicated.eager, profile, Stored(1000, 1000))
    assert [item.planner for item in rows.predictions] == [
        "DDP, eager",
        "DDP, compiled blocks",
        "Inductor, overlap scheduling",
    ]
    assert rows.lines() == [
        rows.note,
        "not modelled for others: Inductor, by block: the pass leaves all-reduces where they are",
    ]
    assert "gradient_as_bucket_view is off" in rows.note
