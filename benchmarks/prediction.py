"""What the simulator says a step takes, beside what it took: does it rank as measured, and how far is it off?

Owns the prediction and its judgement. Must not know how steps are measured.

A prediction is the modelled schedule of forward and backward, with its compute regions scaled so that together they
last as long as compute was measured to last alone on this machine, plus the measured optimizer. So the compute model's
error is left out, and what is tested is the model of communication, of copies, and of what hides what. Where the
planner leaves collectives as traced, the schedule is the one that the pass over the final order makes of them.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import simplefsdp
from benchmarks.names import COMPUTE, OPTIMIZER
from inductor_passes.inorder import plan_in_order
from simplefsdp.explainer.schedule import make_timeline

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.contestants import Contestant
    from benchmarks.workload import Workload
    from simplefsdp.explainer.facts import GraphFacts

_NS_PER_S = 1e9


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
    ranks: int,
) -> list[Prediction]:
    """Predict every contestant that runs our passes and was measured.

    Args:
        workload: what was trained.
        contestants: those without a configuration of our passes are skipped.
        profile: the calibrated hardware profile.
        medians: measured seconds per step.
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
        seconds = step_s(report.graphs, medians[COMPUTE] - medians[OPTIMIZER]) + medians[OPTIMIZER]
        found.append(Prediction(contestant.name, seconds, medians[contestant.name]))
    return found


def step_s(graphs: Sequence[GraphFacts], compute_s: float) -> float:
    """Modelled seconds of forward and backward whose compute regions together last `compute_s`."""
    modelled_ns = sum(sum(facts.problem.region_ns) for facts in graphs)
    scale = compute_s * _NS_PER_S / modelled_ns
    total_ns = 0
    for facts in graphs:
        regions = tuple(round(time_ns * scale) for time_ns in facts.problem.region_ns)
        problem = dataclasses.replace(facts.problem, region_ns=regions)
        in_order = plan_in_order(problem) if facts.plan.planner == "none" else None
        plan = facts.plan if in_order is None else in_order
        total_ns += make_timeline(dataclasses.replace(facts, problem=problem), plan).step_ns
    return total_ns / _NS_PER_S


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
