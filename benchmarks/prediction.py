"""What the simulator says a step takes, beside what it took: does it rank as measured, and how far is it off?

Owns the prediction and its judgement. Must not know how steps are measured.

A prediction is the modelled schedule of forward and backward, with its compute regions scaled so that together they
last as long as compute was measured to last alone on this machine, compiled or not, plus the measured optimizer. So the
compute model's error is left out, and what is tested is the model of communication, of copies, and of what hides what.
Schedules of others are those of `simplefsdp.planner.peers`, and what FSDP2 does on CPUs: block.

What is particular to ranks of one machine that communicate by gloo is measured, see `machine`: compute is slower while
communication runs, and a collective takes longer when nothing else is in flight.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

import simplefsdp
from benchmarks.contestants import BLOCKS, Contestant
from benchmarks.names import (
    DDP,
    EAGER,
    FSDP2,
    FSDP2_COMPILED,
    NO_PASSES,
    STOCK_BLOCKS,
    STOCK_OVERLAP,
    UNCOMPILED,
)
from inductor_passes import PassConfig
from inductor_passes.inorder import plan_in_order
from inductor_passes.plan import ISSUE, WAIT, Event
from inductor_passes.planners import plan_collectives
from simplefsdp.explainer.facts import GraphFacts
from simplefsdp.explainer.schedule import COMPUTE_ROW, make_timeline
from simplefsdp.planner.build import planned
from simplefsdp.planner.peers import (
    NotModelledError,
    compile_blocks,
    plan_ddp,
    plan_fsdp2,
    plan_stock_manual,
    plan_stock_overlap,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from benchmarks.machine import Machine
    from benchmarks.workload import Workload
    from simplefsdp.explainer.report import Report
    from simplefsdp.explainer.schedule import Timeline

Pair = tuple[GraphFacts, GraphFacts]

_NS_PER_S = 1e9
_SETTLED = 1e-3
_MOST_PASSES = 50


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Predicted and measured step of one contestant, in seconds."""

    name: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """How far the prediction is off, as a part of what was measured; negative when too short."""
        return self.predicted_s / self.measured_s - 1


@dataclasses.dataclass(frozen=True)
class Outlook:
    """What the model says of a run.

    Args:
        predictions: of every contestant that was measured and whose schedule is modelled.
        bound_s: seconds of a step that no plan of ours can beat.
    """

    predictions: tuple[Prediction, ...]
    bound_s: float


def predict(
    schedules: Schedules, contestants: Sequence[Contestant], medians: Mapping[str, float], machine: Machine
) -> Outlook:
    """Predict a run.

    Args:
        schedules: of what was trained.
        contestants: who took part.
        medians: measured seconds per step.
        machine: where it ran.
    """
    scale, eager = scale_to(machine.compute_s, schedules.traced), scale_to(machine.eager_s, schedules.eager)
    found = []
    for contestant in contestants:
        if contestant.name not in medians:
            continue
        try:
            graphs = schedules.of(contestant)
        except NotModelledError:
            continue
        predicted_s = step_s(graphs, eager if contestant.name in UNCOMPILED else scale, machine)
        found.append(Prediction(contestant.name, predicted_s, medians[contestant.name]))
    return Outlook(tuple(found), bound_s(schedules.traced, scale, machine))


class Schedules:
    """Forward and backward of every contestant, as the simulator takes them, with plans made by the profile alone.

    Args:
        workload: what is trained.
        profile: hardware profile: a shipped name or a path.
        ranks: ranks of the run.

    Attributes:
        traced: our front end compiled, with collectives where they were traced.
        eager: our front end in eager mode.
    """

    def __init__(self, workload: Workload, profile: str, ranks: int) -> None:
        self._workload, self._profile, self._ranks = workload, profile, ranks
        report = self._explain()
        self.traced: Pair = _pair(report.graphs)
        self.eager: Pair = _pair(report.eager)

    def of(self, contestant: Contestant) -> Pair:
        """The schedule of a contestant.

        Raises:
            NotModelledError: there are no rules for it here.
        """
        if contestant.config is not None:
            return _pair(map(_in_final_order, planned(self.traced, contestant.config.planner)))
        rules: dict[str, Callable[[], Pair]] = {
            DDP: self._ddp,
            # On CPUs FSDP2 has no streams, and its collectives block.
            FSDP2: lambda: _blocking(plan_fsdp2(*self.eager, FSDP2)),
            FSDP2_COMPILED: lambda: _blocking(plan_fsdp2(*self._compiled_blocks(), FSDP2_COMPILED)),
            EAGER: lambda: _blocking(self.eager),
            NO_PASSES: lambda: self.traced,
            STOCK_BLOCKS: lambda: _pair(map(plan_stock_manual, self.traced)),
            STOCK_OVERLAP: lambda: _pair(
                plan_stock_overlap(facts, self._workload.block_bytes) for facts in self.traced
            ),
        }
        if contestant.name not in rules:
            raise NotModelledError(contestant.name)
        return rules[contestant.name]()

    def _explain(self, sharding_factor: int | None = None) -> Report:
        wrap = {
            "passes": PassConfig("none", BLOCKS),
            "reshard_after_forward": self._workload.reshard,
            "sharding_factor": sharding_factor,
        }
        return simplefsdp.explain(
            self._workload.model(),
            *self._workload.tokens(0),
            ranks=self._ranks,
            profile=self._profile,
            wrap=wrap,
            eager=True,
        )

    def _ddp(self) -> Pair:
        report = self._explain(sharding_factor=1)
        return plan_ddp(*_pair(report.eager), DDP)

    def _compiled_blocks(self) -> Pair:
        return _pair(map(compile_blocks, self.eager, self.traced))


def _pair(graphs: Iterable[GraphFacts]) -> Pair:
    forward, backward = graphs
    return forward, backward


def _in_final_order(facts: GraphFacts) -> GraphFacts:
    """What the pass over the final order makes of collectives that the planner left where they were."""
    plan = plan_in_order(facts.problem) if facts.plan.planner == "none" else None
    return facts if plan is None else dataclasses.replace(facts, plan=plan)


def _blocking(pair: Pair) -> Pair:
    """Every collective is waited for where it starts."""
    return _pair(
        dataclasses.replace(
            facts, plan=dataclasses.replace(facts.plan, events=tuple(_started_and_awaited(facts.plan.events)))
        )
        for facts in pair
    )


def _started_and_awaited(events: Iterable[Event]) -> Iterator[Event]:
    for event in events:
        if event.action == ISSUE:
            yield event
            yield dataclasses.replace(event, action=WAIT)


def scale_to(compute_s: float, graphs: Iterable[GraphFacts]) -> float:
    """By how much to stretch compute so that all of these graphs together lasts so many seconds."""
    return compute_s * _NS_PER_S / sum(sum(facts.problem.region_ns) for facts in graphs)


def step_s(graphs: Iterable[GraphFacts], scale: float, machine: Machine) -> float:
    """Modelled seconds of a step on a machine, optimizer included.

    Args:
        graphs: forward and backward.
        scale: of all compute.
        machine: where it runs.
    """
    return sum(_graph_ns(facts, scale, machine) for facts in graphs) / _NS_PER_S + machine.optimizer_s


def bound_s(graphs: Iterable[GraphFacts], scale: float, machine: Machine) -> float:
    """Seconds that no plan of ours for these graphs can beat on a machine, optimizer included.

    Each graph takes the longer one of its compute and its communication, with a first gather and a last reduction. That
    is more than the longer one of the step, where forward has more compute than communication and backward less.

    Args:
        graphs: forward and backward.
        scale: of all compute.
        machine: where it runs; that communication takes from compute is left out.
    """
    plans = [plan_collectives(_stretched(facts, scale).problem, "none") for facts in graphs]
    return sum(plan.lower_bound.time_ns for plan in plans) / _NS_PER_S + machine.optimizer_s


def _stretched(facts: GraphFacts, scale: float) -> GraphFacts:
    """The graph with all compute scaled."""
    regions = tuple(round(time_ns * scale) for time_ns in facts.problem.region_ns)
    return dataclasses.replace(facts, problem=dataclasses.replace(facts.problem, region_ns=regions))


def _graph_ns(facts: GraphFacts, scale: float, machine: Machine) -> int:
    """Modelled ns of a graph whose compute is scaled, and slower while communication runs.

    Slower compute hides more communication, which slows more of it: repeated until it settles.
    """
    compute_ns = scale * sum(facts.problem.region_ns)
    hidden_ns = 0
    for _ in range(_MOST_PASSES):
        # Of the time that communication is hidden, compute gets the part `pace`; it needs the rest again.
        stretch = 1 + hidden_ns * (1 - machine.pace) / compute_ns
        timeline = _timeline(facts, scale * stretch, machine)
        before, hidden_ns = hidden_ns, _hidden_ns(timeline)
        if abs(hidden_ns - before) <= _SETTLED * timeline.step_ns:
            break
    return timeline.step_ns


def _timeline(facts: GraphFacts, scale: float, machine: Machine) -> Timeline:
    """The schedule with scaled compute, in which a bucket ends no sooner than a lone collective would.

    What a bucket takes longer for it, and so who waits behind it, follows from the schedule: repeated until it settles.
    """
    facts = _stretched(facts, scale)
    buckets = facts.plan.buckets
    sizes = [sum(facts.problem.collectives[number].size_bytes for number in item.members) for item in buckets]
    kinds = [facts.problem.collectives[item.members[0]].key.kind for item in buckets]
    lone_ns = [machine.lone_ns(kind, size) for kind, size in zip(kinds, sizes, strict=True)]
    more_ns = [0] * len(buckets)
    for _ in range(_MOST_PASSES):
        items = list(facts.problem.collectives)
        for bucket, more in zip(buckets, more_ns, strict=True):
            first = bucket.members[0]
            items[first] = dataclasses.replace(items[first], transfer_ns=items[first].transfer_ns + more)
        problem = dataclasses.replace(facts.problem, collectives=tuple(items))
        timeline = make_timeline(dataclasses.replace(facts, problem=problem))
        found_ns = [
            max(0, item.issued_ns + lone - (item.end_ns - more))
            for item, lone, more in zip(timeline.buckets, lone_ns, more_ns, strict=True)
        ]
        if found_ns == more_ns:
            break
        more_ns = found_ns
    return timeline


def _hidden_ns(timeline: Timeline) -> int:
    """Time in which compute and communication both run."""
    sent = sum(span.duration_ns for span in timeline.spans if span.row != COMPUTE_ROW)
    return max(0, sent - timeline.exposed_ns)


def judge(predictions: Sequence[Prediction]) -> str:
    """One line: are the contestants ranked as measured, and how large is the largest error?"""
    pairs = list(itertools.combinations(predictions, 2))
    wrong = [
        f"{first.name} and {second.name}"
        for first, second in pairs
        if (first.predicted_s - second.predicted_s) * (first.measured_s - second.measured_s) < 0
    ]
    largest = max((abs(item.error) for item in predictions), default=0.0)
    order = (
        f"{len(wrong)} of {len(pairs)} pairs in the wrong order ({'; '.join(wrong)})"
        if wrong
        else "ranks as measured"
    )
    return f"{order}; largest error {largest:.0%} (target: ranks as measured, error below 10%)"
