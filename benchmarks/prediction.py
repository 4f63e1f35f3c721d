"""What the simulator says a step takes, beside what it took: does it rank as measured, and how far is it off?

Owns the prediction and its judgement. Must not know how steps are measured.

A prediction is the modelled schedule of forward and backward, with its compute regions scaled so that together they
last as long as compute was measured to last alone on this machine, plus the measured optimizer. So the compute model's
error is left out, and what is tested is the model of communication, of copies, and of what hides what. Where the
planner leaves collectives as traced, the schedule is the one that the pass over the final order makes of them.

Ranks of one machine share its cores with the threads that communicate, so compute is slower while communication runs:
see `machine_of`. On a cluster the network card does that work; there the pace is 1.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import simplefsdp
from benchmarks.names import COMMUNICATION, COMPUTE, OPTIMIZER
from inductor_passes.inorder import plan_in_order
from simplefsdp.explainer.schedule import COMPUTE_ROW, make_timeline

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.contestants import Contestant
    from benchmarks.workload import Workload
    from inductor_passes.plan import Plan
    from simplefsdp.explainer.facts import GraphFacts
    from simplefsdp.explainer.schedule import Timeline

_NS_PER_S = 1e9
_LEAST_PACE = 0.1
"""Compute never stops: the scheduler of the operating system gives every thread its turn."""
_SETTLED = 1e-3
_MOST_PASSES = 50


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a run measured of the machine itself.

    Args:
        compute_s: seconds of forward and backward without communication or optimizer.
        optimizer_s: seconds of the optimizer.
        pace: speed of compute while communication runs, as a part of its speed alone.
    """

    compute_s: float
    optimizer_s: float
    pace: float = 1.0


def machine_of(times: Mapping[str, float], busy: Mapping[str, float], cores: float) -> Machine:
    """The machine as a run found it.

    Compute alone and communication alone each keep so many cores busy. Where both together need more than there are,
    communication gets what it needs, for its threads run in short bursts, and compute what is left.

    Args:
        times: median seconds per step, by contestant.
        busy: median seconds of processor per step and rank, by contestant.
        cores: cores for each rank.
    """
    needs = {name: busy[name] / times[name] for name in (COMPUTE, COMMUNICATION)}
    pace = (cores - needs[COMMUNICATION]) / needs[COMPUTE]
    return Machine(times[COMPUTE] - times[OPTIMIZER], times[OPTIMIZER], min(1.0, max(_LEAST_PACE, pace)))


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


def predict(
    workload: Workload,
    contestants: Sequence[Contestant],
    profile: str,
    medians: Mapping[str, float],
    machine: Machine,
    ranks: int,
) -> list[Prediction]:
    """Predict every contestant that runs our passes and was measured.

    Args:
        workload: what was trained.
        contestants: those without a configuration of our passes are skipped.
        profile: the calibrated hardware profile.
        medians: measured seconds per step.
        machine: where it ran.
        ranks: ranks of the run.
    """
    found = []
    for contestant in contestants:
        if contestant.config is None or contestant.name not in medians:
            continue
        wrap: dict[str, Any] = {"passes": contestant.config, "reshard_after_forward": workload.reshard}
        report = simplefsdp.explain(
            workload.model(), *workload.tokens(0), ranks=ranks, profile=profile, wrap=wrap
        )
        found.append(Prediction(contestant.name, step_s(report.graphs, machine), medians[contestant.name]))
    return found


def step_s(graphs: Sequence[GraphFacts], machine: Machine) -> float:
    """Modelled seconds of a step on a machine, optimizer included."""
    modelled_ns = sum(sum(facts.problem.region_ns) for facts in graphs)
    scale = machine.compute_s * _NS_PER_S / modelled_ns
    return sum(_graph_ns(facts, scale, machine.pace) for facts in graphs) / _NS_PER_S + machine.optimizer_s


def _graph_ns(facts: GraphFacts, scale: float, pace: float) -> int:
    """Modelled ns of a graph whose compute is scaled, and slower while communication runs.

    Slower compute hides more communication, which slows more of it: repeated until it settles.
    """
    compute_ns = scale * sum(facts.problem.region_ns)
    hidden_ns = 0
    for _ in range(_MOST_PASSES):
        # Of the time that communication is hidden, compute gets the part `pace`; it needs the rest again.
        stretch = 1 + hidden_ns * (1 - pace) / compute_ns
        timeline = _timeline(facts, scale * stretch)
        before, hidden_ns = hidden_ns, _hidden_ns(timeline)
        if abs(hidden_ns - before) <= _SETTLED * timeline.step_ns:
            break
    return timeline.step_ns


def _timeline(facts: GraphFacts, scale: float) -> Timeline:
    regions = tuple(round(time_ns * scale) for time_ns in facts.problem.region_ns)
    problem = dataclasses.replace(facts.problem, region_ns=regions)
    in_order: Plan | None = plan_in_order(problem) if facts.plan.planner == "none" else None
    plan = facts.plan if in_order is None else in_order
    return make_timeline(dataclasses.replace(facts, problem=problem), plan)


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
