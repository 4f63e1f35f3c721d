"""The one line that says whether a schedule is good, and what to change.

Owns the sums over graphs and the choice of advice. Must not know graphs or how a plan was found.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from inductor_passes.plan import Role
from inductor_passes.timeline import ExposureReason
from simplefsdp.explainer.facts import GraphFacts
from simplefsdp.explainer.runs import Run, peak_by_use
from simplefsdp.explainer.schedule import Timeline, bucket_name

NEGLIGIBLE_SHARE = 0.01
"""Exposed time below this share of the step is not worth advice."""
GIB = 2**30

ADVICE = {
    ExposureReason.FIRST: "nothing computes before it; less data would help (lower precision, smaller sharding group)",
    ExposureReason.LAST: "nothing computes after it; only less data or a faster link would help",
    ExposureReason.QUEUED: "communication is the bottleneck there: more tokens per rank or a smaller sharding factor",
    ExposureReason.SHORT: (
        "too little compute to hide it: more tokens per rank, more memory budget, or a smaller sharding factor"
    ),
}

KEEP_ADVICE = (
    "backward needs it at once; where its module is wrapped before the model, with reshard_after_forward=False, it "
    "stays from forward"
)

AT_ONCE_ADVICE = "it is waited for where it starts; planner 'auto' would move them apart"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Sums over all runs of graphs in a step; everything is modelled.

    Args:
        step_ns: forward and backward.
        bound_ns: what no plan of the planners can beat.
        exposed_ns: time in which compute waits for communication.
        peak_bytes: most bytes held beside parameters, buffers and optimizer states.
        change: what to change, "" when nothing is worth it.
        profile: name of the hardware profile.
    """

    step_ns: int
    bound_ns: int
    exposed_ns: int
    peak_bytes: int
    change: str
    profile: str

    def __str__(self) -> str:
        share = self.exposed_ns / self.step_ns if self.step_ns else 0.0
        text = (
            f"modelled on {self.profile}: step {self.step_ns / 1e6:.3f} ms, lower bound {self.bound_ns / 1e6:.3f} ms, "
            f"{share:.1%} exposed, peak {self.peak_bytes / GIB:.2f} GiB beside parameters and optimizer"
        )
        return f"{text}; {self.change or 'nothing worth changing'}"


def make_verdict(
    graphs: Sequence[GraphFacts], timelines: Sequence[Timeline], runs: Sequence[Run], profile: str
) -> Verdict:
    """Judge the graphs of one step.

    Args:
        graphs: forward, backward, more after graph breaks.
        timelines: theirs.
        runs: which graph runs when.
        profile: name of the hardware profile.
    """
    step = sum(timelines[run.graph].step_ns for run in runs)
    exposed = sum(timelines[run.graph].exposed_ns for run in runs)
    return Verdict(
        step_ns=step,
        bound_ns=sum(graphs[run.graph].plan.lower_bound.time_ns for run in runs),
        exposed_ns=exposed,
        peak_bytes=sum(peak_by_use(timelines, runs)),
        change=_advice(graphs, timelines, Counter(run.graph for run in runs), step, exposed),
        profile=profile,
    )


def _advice(
    graphs: Sequence[GraphFacts],
    timelines: Sequence[Timeline],
    times: Mapping[int, int],
    step_ns: int,
    exposed_ns: int,
) -> str:
    failed = [facts for facts in graphs if facts.failure]
    if failed:
        return f"the passes left the {failed[0].kind} graph alone: {failed[0].failure}"
    worst = [
        (time.exposed_ns * times[at], at, bucket)
        for at, timeline in enumerate(timelines)
        for bucket, time in enumerate(timeline.buckets)
        if time.exposed_ns and times[at]
    ]
    if not worst or exposed_ns < NEGLIGIBLE_SHARE * step_ns:
        return ""
    most_ns, at, bucket = max(worst, key=lambda item: (item[0], -item[1], -item[2]))
    facts, reason = graphs[at], timelines[at].buckets[bucket].reason
    name = bucket_name(facts, facts.plan, bucket, most=1)
    placed = facts.plan.buckets[bucket]
    is_ours = facts.problem.collectives[placed.members[0]].role is not Role.FIXED
    at_once = is_ours and placed.issue_slot == placed.wait_slot and reason is ExposureReason.SHORT
    if at_once and facts.plan.planner != "auto":
        advice = AT_ONCE_ADVICE
    elif reason is ExposureReason.FIRST and facts.kind == "backward":
        advice = KEEP_ADVICE
    else:
        advice = ADVICE[reason]
    often = f" in {times[at]} runs" if times[at] > 1 else ""
    return f"{facts.kind} {name} {most_ns / 1e6:.3f} ms exposed{often}: {advice}"
