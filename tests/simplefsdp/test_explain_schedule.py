"""Timelines of schedules small enough to follow by hand: times, spans, memory, the table and the verdict."""

from __future__ import annotations

import dataclasses

import pytest

from inductor_passes.plan import Collective, GroupKey, LowerBound, PlanningProblem, Role
from inductor_passes.planners.schedule import make_plan
from inductor_passes.timeline import ExposureReason
from simplefsdp.explainer.facts import BEFORE, GraphFacts, Memory, Region, Traffic, Value
from simplefsdp.explainer.runs import Run
from simplefsdp.explainer.schedule import Activity, Span, make_timeline
from simplefsdp.explainer.table import bucket_rows, shorten, table_text
from simplefsdp.explainer.verdict import make_verdict

GATHER = GroupKey("all_gather", "group0", "bfloat16")
REDUCE = GroupKey("reduce_scatter", "group0", "float32", "avg")
REGIONS = (Region("a mm", "a"), Region("b mm", "b"), Region("c mm", "c"))


def gather(name, size, transfer):
    return Collective(
        name, GATHER, Role.GATHER, size, transfer, 0, 1, 1, copy_in_ns=4, copy_out_ns=6, staging_bytes=size
    )


def reduction(name, size, transfer):
    return Collective(
        name, REDUCE, Role.REDUCE, size, transfer, 2, 3, 3, copy_in_ns=6, copy_out_ns=4, staging_bytes=size
    )


def facts_of(collectives, values, traffic, members, events):
    """A forward of regions of 100, 200 and 300 ns, with the given buckets and (slot, bucket, is wait)."""
    problem = PlanningProblem((100, 200, 300), tuple(collectives), {GATHER: 10, REDUCE: 20}, kernel_ns=1)
    plan = make_plan(problem, "block", members, events, LowerBound(600, "compute"))
    return GraphFacts("forward", REGIONS, tuple(values), tuple(traffic), problem, plan)


@pytest.fixture
def alone():
    """A gather started ahead and used in b; the gradient that b makes, reduced while c computes."""
    return facts_of(
        [gather("w", 80, 150), reduction("w", 40, 100)],
        [
            Value("a", 5, Memory.ACTIVATIONS, BEFORE, 0),
            Value("a", 8, Memory.ACTIVATIONS, 0, 1),
            Value("b", 40, Memory.GRADIENTS, 1, 1),
        ],
        [Traffic(10, 80, None, True, 1), Traffic(40, 4, 2, False, 3)],
        [(0,), (1,)],
        [(0, 0, False), (1, 0, True), (2, 1, False), (3, 1, True)],
    )


def test_spans(alone):
    timeline = make_timeline(alone)
    assert timeline.spans == (
        Span("compute", Activity.COMPUTE, "a mm", 0, 100),
        Span("compute", Activity.EXPOSED, "all_gather w", 100, 160, 0),
        Span("compute", Activity.COMPUTE, "b mm", 160, 360),
        Span("compute", Activity.COMPUTE, "c mm", 360, 660),
        Span("group0", Activity.GATHER, "all_gather w", 0, 160, 0),
        Span("group0", Activity.REDUCE, "reduce_scatter w", 360, 480, 1),
    )
    assert (timeline.step_ns, timeline.exposed_ns) == (660, 60)


def test_memory_of_single_collectives(alone):
    curve = [(point.time_ns, point.by_use) for point in make_timeline(alone).memory]
    # activations, gathered, gradients, communication
    assert curve[0] == (0, (13, 80, 0, 10))  # input, result of a, gather in flight with the cast of its shard
    assert dict(curve[1:]) == {
        100: (8, 80, 0, 10),  # a has read its input
        160: (8, 80, 40, 0),  # the gather is done; b makes the gradient
        360: (
            0,
            0,
            44,
            0,
        ),  # b was the last to read; the reduction's result is there, its input is still read
        660: (0, 0, 4, 0),
    }


def test_memory_of_a_bucket_counts_both_forms_while_it_is_copied():
    facts = facts_of(
        [gather("v", 30, 50), gather("w", 50, 60), reduction("v", 15, 40), reduction("w", 25, 60)],
        [Value("b", 15, Memory.GRADIENTS, 1, 1), Value("b", 25, Memory.GRADIENTS, 1, 1)],
        [
            Traffic(3, 30, None, True, 1),
            Traffic(5, 50, None, True, 2),
            Traffic(15, 1, 0, False, 3),
            Traffic(25, 2, 1, False, 3),
        ],
        [(0, 1), (2, 3)],
        [(0, 0, False), (1, 0, True), (2, 1, False), (3, 1, True)],
    )
    timeline = make_timeline(facts)
    uses = [point.by_use for point in timeline.memory]
    assert (0, 80, 0, 8) in uses  # the bucket, and the packed shards
    assert (0, 160, 0, 0) in uses  # the bucket, and the parameters copied out of it
    assert (0, 50, 40, 40) in uses  # gradients, and the bucket they are copied into
    assert uses[-1] == (0, 0, 3, 0)
    copies = [span.duration_ns for span in timeline.spans if span.activity is Activity.COPY]
    assert copies == [9, 13, 13, 9]
    assert timeline.step_ns == facts.plan.step_ns


def test_the_table_says_where_and_why(alone):
    first, second = bucket_rows(alone, make_timeline(alone))
    assert (first.issued, first.awaited) == ("before a mm", "before b mm")
    assert (first.modelled_ns, first.exposed_ns, first.size_bytes) == (160, 60, 80)
    assert first.why_exposed == ExposureReason.SHORT.value
    assert (second.issued, second.awaited, second.why_exposed) == ("before c mm", "at the end", "")
    lines = table_text([first, second]).splitlines()
    assert len({line.index("group0") for line in lines[1:]}) == 1


def test_the_verdict_names_the_largest_exposed_transfer(alone):
    verdict = make_verdict([alone], [make_timeline(alone)], [Run(0)], "h100_sxm")
    assert (verdict.step_ns, verdict.bound_ns, verdict.exposed_ns, verdict.peak_bytes) == (660, 600, 60, 128)
    assert "forward all_gather w 0.000 ms exposed: too little compute" in str(verdict)
    assert str(make_verdict([], [], [], "h100_sxm")).endswith("nothing worth changing")


@pytest.mark.parametrize(
    ("kind", "advice"), [("forward", "less data would help"), ("backward", "reshard_after_forward=False")]
)
def test_a_gather_that_backward_begins_with_could_stay_from_forward(kind, advice):
    first = dataclasses.replace(gather("w", 80, 150), latest_issue=0, latest_wait=0)
    events = [(0, 0, False), (0, 0, True)]
    facts = facts_of([first], [], [Traffic(10, 80, None, True, 1)], [(0,)], events)
    facts = dataclasses.replace(facts, kind=kind, plan=dataclasses.replace(facts.plan, planner="auto"))
    assert advice in make_verdict([facts], [make_timeline(facts)], [Run(0)], "h100_sxm").change


@pytest.mark.parametrize(
    ("members", "text"),
    [
        (["a.w"], "a.w"),
        (["a.b.w", "a.b.v"], "a.b: w, v"),
        (["a.w", "a.v", "a.u"], "a: w, v, 1 more"),
        (["a.w", "b.w"], "a.w, b.w"),
        (["w", "w.v"], "w, w.v"),
    ],
)
def test_names_are_shortened_by_what_they_share(members, text):
    assert shorten(members) == text
