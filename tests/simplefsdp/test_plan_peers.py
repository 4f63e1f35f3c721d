"""Schedules of other implementations as plans for the simulator, and what the command says of them."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest
import torch
from torch import nn

from inductor_passes.costs.profiles import load_profile
from inductor_passes.plan import ISSUE, Role
from inductor_passes.planners.check import check_plan
from simplefsdp.cli import main
from simplefsdp.explainer.facts import BEFORE, GraphFacts, Memory
from simplefsdp.explainer.schedule import make_timeline
from simplefsdp.planner import build
from simplefsdp.planner.compare import predict_peers
from simplefsdp.planner.extend import TRACED_LAYERS, extend
from simplefsdp.planner.peers import (
    FSDP2_EAGER,
    compile_blocks,
    plan_fsdp2,
    plan_stock_manual,
)
from simplefsdp.planner.predict import Stored, predict
from tests.helpers.tower import Tower, explained

SILU_TOWER = functools.partial(Tower, activation=nn.functional.silu)
"""Layers whose activation is one kernel in eager mode and several operators in a compiled graph."""


def build_tower():
    """What `--model tests.simplefsdp.test_plan_peers:build_tower` names."""
    return SILU_TOWER(6), (torch.zeros(4, 32, dtype=torch.int64),)


def report_of(layers, sharding_factor=None):
    return explained(
        functools.partial(SILU_TOWER, layers),
        sharding_factor=sharding_factor,
        memory_budget_gb=None,
        eager=True,
    )


@pytest.fixture(scope="module")
def report():
    """Four checkpointed layers on 16 ranks, fully sharded: compiled, and in eager mode."""
    return report_of(TRACED_LAYERS)


def said(facts: GraphFacts) -> list[str]:
    """Events of a plan: "+" starts, "-" waits; G gathers, R reduces; the layer, or "root"."""
    words = []
    for event in facts.plan.events:
        item = facts.problem.collectives[facts.plan.buckets[event.bucket].members[0]]
        kind = {Role.GATHER: "G", Role.REDUCE: "R"}[item.role]
        where = "root" if item.block is None else item.block.removeprefix("layers.")
        words.append(f"{'+' if event.action == ISSUE else '-'}{kind}{where}")
    return words


def test_fsdp2_keeps_the_root_and_gathers_blocks_ahead(report):
    forward, backward = plan_fsdp2(*report.eager, FSDP2_EAGER)
    assert said(forward) == ["+Groot", "-Groot", "+G0", "+G1", "-G0", "+G2", "-G1", "+G3", "-G2", "-G3"]
    assert said(backward) == (
        [
            "+G3",
            "-G3",
            "+G2",
            "+R3",
            "-G2",
            "+G1",
            "-R3",
            "+R2",
            "-G1",
            "+G0",
            "-R2",
            "+R1",
            "-G0",
            "-R1",
            "+R0",
            "-R0",
            "+Rroot",
            "-Rroot",
        ]
    )
    for facts in (forward, backward):
        check_plan(facts.problem, facts.plan)
        assert facts.plan.planner == FSDP2_EAGER
        for bucket in facts.plan.buckets:
            blocks = {facts.problem.collectives[number].block for number in bucket.members}
            assert len(blocks) == 1
            assert len(bucket.members) == 2, "embedding and head, or up and down"


def test_the_last_block_can_stay_gathered(report):
    forward, backward = plan_fsdp2(*report.eager, FSDP2_EAGER, keep_last=True)
    assert said(backward)[:5] == ["+G2", "+R3", "-G2", "+G1", "-R3"]
    kept = [value for value in backward.values if value.memory is Memory.GATHERED]
    assert sorted(value.name for value in kept) == [
        "head.weight",
        "layers.3.down.weight",
        "layers.3.up.weight",
    ]
    assert all(value.born == BEFORE for value in kept)
    outlive = {
        item.name
        for item, traffic in zip(forward.problem.collectives, forward.traffic, strict=True)
        if traffic.last_use == len(forward.regions)
    }
    assert outlive == {"embedding.weight", "head.weight", "layers.3.down.weight", "layers.3.up.weight"}


def test_parameters_of_a_block_go_together(report):
    _, backward = plan_fsdp2(*report.eager, FSDP2_EAGER)
    for bucket in backward.plan.buckets:
        if backward.problem.collectives[bucket.members[0]].role is Role.GATHER:
            assert len({backward.traffic[number].last_use for number in bucket.members}) == 1
    alone = make_timeline(report.eager[1])
    assert make_timeline(backward).exposed_ns < alone.exposed_ns


def test_stock_buckets_by_block_prefetch_before_they_wait(report):
    forward, backward = map(plan_stock_manual, report.graphs)
    assert said(forward) == [
        "+Groot",
        "+G0",
        "-Groot",
        "+G1",
        "-G0",
        "+G2",
        "-G1",
        "+G3",
        "-G2",
        "+Groot",
        "-G3",
        "-Groot",
    ]
    words = said(backward)
    for kind, after_first in (("G", False), ("R", True)):
        starts = [word for word in words if word[:2] == f"+{kind}"]
        assert len(starts) == len(set(starts)) + (kind == "R"), "head and embedding are reduced apart"
        for this, following in itertools.pairwise(starts[after_first:-1]):
            assert words.index(following) < words.index(f"-{this[1:]}")
            assert words.index(f"-{this[1:]}") - words.index(following) <= 2, "one ahead, no more"
    check_plan(backward.problem, backward.plan)


def test_compiled_blocks_take_the_time_of_the_compiled_graph(report):
    def by_block(facts: GraphFacts) -> dict[str, int]:
        out: dict[str, int] = {}
        for region, duration in zip(facts.regions, facts.problem.region_ns, strict=True):
            block = ".".join(region.module.split(".")[:2])
            out[block] = out.get(block, 0) + duration
        return out

    eager, compiled = report.eager[0], report.graphs[0]
    halved = tuple(duration // 2 for duration in compiled.problem.region_ns)
    compiled = dataclasses.replace(compiled, problem=dataclasses.replace(compiled.problem, region_ns=halved))
    mixed = compile_blocks(eager, compiled)
    times, expected, before = by_block(mixed), by_block(compiled), by_block(eager)
    for layer in range(TRACED_LAYERS):
        assert times[f"layers.{layer}"] == expected[f"layers.{layer}"] < before[f"layers.{layer}"]
    assert (times["embedding"], times["head"]) == (before["embedding"], before["head"])


def test_what_backward_does_not_read_is_kept_in_eager_mode_alone(report):
    forward, backward = report.eager
    end = len(forward.regions)
    values = list(forward.values)
    at = next(number for number, value in enumerate(values) if value.dies < end)
    values[at] = dataclasses.replace(values[at], dies=end, unread=True)
    changed = dataclasses.replace(forward, values=tuple(values))
    mixed = compile_blocks(changed, report.graphs[0])
    assert (mixed.values[at].dies, mixed.values[at].unread) == (values[at].born, False)
    assert list(compile_blocks(backward, report.graphs[1]).values) == list(backward.values)


def test_a_silu_is_one_kernel_in_eager_mode_and_backward_repeats_the_layer(report):
    def kernels(facts: GraphFacts) -> list[str]:
        return [region.name for region in facts.regions if region.module.startswith("layers.1")]

    forward, backward = map(kernels, report.eager)
    # up, silu, down, add
    assert len(forward) == 4
    # Up and silu again; then down: two products, silu backward, up: two products. The last add has no module.
    assert len(backward) == 2 + 2 + 1 + 2
    assert sum(" mm" in name for name in backward) == 5
    assert report.eager[0].problem.region_ns != report.graphs[0].problem.region_ns


def test_repeating_a_layer_of_eager_mode_equals_tracing_all(report):
    for few, all_ in zip(report.eager, report_of(6).eager, strict=True):
        assert extend(few, "layers", 6) == all_


def test_what_is_not_modelled_is_left_out_with_the_reason(report):
    profile = load_profile("h100_sxm")
    forward, backward = report.graphs
    alone = predict_peers([forward], (), profile, Stored(1000, 1000))
    assert (alone.predictions, alone.note) == ((), "")
    assert alone.lines() == [
        "not modelled for others: all: a step is one forward and one backward, here it is forward"
    ]
    items = [dataclasses.replace(backward.problem.collectives[0], role=Role.FIXED, earliest_issue=1)]
    items += backward.problem.collectives[1:]
    own = dataclasses.replace(
        backward, problem=dataclasses.replace(backward.problem, collectives=tuple(items))
    )
    assert predict_peers([forward, own], (), profile, Stored(1000, 1000)).left_out == (
        ("all", "the model communicates by itself (all_gather)"),
    )
    without_eager = predict_peers(report.graphs, (), profile, Stored(1000, 1000))
    assert [item.planner for item in without_eager.predictions] == [
        "Inductor, by block",
        "Inductor, overlap scheduling",
    ]
    assert [name for name, _ in without_eager.left_out] == ["FSDP2, eager", "FSDP2, compiled blocks"]
    assert "eager mode cannot be read" in without_eager.lines()[-1]


def test_reserved_memory_of_peers_counts_their_streams(report):
    profile = load_profile("h100_sxm")
    graphs = plan_fsdp2(*report.eager, FSDP2_EAGER)
    one, own = (
        predict(graphs, profile, Stored(10**8, 10**8), own_streams=own).memory for own in (False, True)
    )
    assert own.fragments > one.fragments >= 0
    assert dataclasses.replace(own, fragments=0) == dataclasses.replace(one, fragments=0)


def test_the_command_shows_peers_from_one_trace(capsys, monkeypatch):
    traces = []
    explain = build.explain

    def note(*arguments, **options):
        traces.append(options)
        return explain(*arguments, **options)

    monkeypatch.setattr(build, "explain", note)
    model = "tests.simplefsdp.test_plan_peers:build_tower"
    assert main(["plan", "--model", model, "--gpus", "16", "--planners", "none", "auto"]) == 0
    assert len(traces) == 1
    lines = capsys.readouterr().out.splitlines()
    rows = [
        line.split("  ")[0] for line in lines if line.startswith(("none ", "auto ", "FSDP2,", "Inductor,"))
    ]
    assert rows == [
        "none",
        "auto",
        "FSDP2, eager",
        "FSDP2, compiled blocks",
        "Inductor, by block",
        "Inductor, overlap scheduling",
    ]
    assert any(line.startswith("Rows named FSDP2 and Inductor") and "modelled" in line for line in lines)
