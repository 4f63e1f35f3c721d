"""From the facts of a step to what a run on that hardware would show: tokens per second, memory, communication.

Owns the sums: forward, backward, optimizer. Must not know graphs. Everything it returns is modelled.

The optimizer is fused AdamW with gradient clipping, on float32 shards: it reads parameter, gradient and two moments,
writes all but the gradient; clipping reads the gradients, and reads and writes them again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from inductor_passes.costs.compute import ComputeModel
from inductor_passes.costs.profiles import HardwareProfile
from inductor_passes.plan import Plan
from inductor_passes.planners import plan_collectives
from simplefsdp.explainer.facts import GraphFacts, Memory
from simplefsdp.explainer.runs import Run, once_each, peak_by_use
from simplefsdp.explainer.schedule import Timeline, make_timeline
from simplefsdp.planner.allocator import reserved_bytes

MOMENTS = 2
"""AdamW keeps two tensors of the parameter's size."""
OPTIMIZER_PASSES = 7 + 3
"""Reads and writes of a parameter's size in one optimizer step: AdamW 4 + 3, clipping 2 + 1."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """Bytes that one device keeps between steps, without the optimizer's.

    Args:
        total: parameters and buffers.
        trained: parameters that have a gradient and optimizer states.
    """

    total: int
    trained: int

    @property
    def optimizer(self) -> int:
        """Bytes of the moments."""
        return MOMENTS * self.trained

    @property
    def least(self) -> int:
        """What a step holds at least: parameters, buffers, gradients and moments."""
        return self.total + (1 + MOMENTS) * self.trained


@dataclasses.dataclass(frozen=True)
class MemorySplit:
    """Bytes on one device at the moment when most is held; buffers count as parameters.

    `fragments` is what the caching allocator reserves beyond the tensors of that moment.
    """

    parameters: int
    optimizer: int
    gradients: int
    activations: int
    gathered: int
    communication: int
    fragments: int = 0

    @property
    def total_bytes(self) -> int:
        """All of them."""
        return sum(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What the model of the hardware says about one training step; nothing is measured.

    Args:
        planner: who decided the schedule.
        timelines: forward and backward; more where the graph breaks.
        runs: which of them runs when.
        optimizer_ns: clipping and AdamW.
        bound_ns: what no plan of the planners can beat, optimizer included; others that merge what is not next to each
            other may, by little.
        memory: at the peak.
        tokens: of one device in one step, None where the model has no such notion.
        flops_per_token: None where it is not known.
        peak_flops: of the device, for 16-bit matrix products.
    """

    planner: str
    timelines: tuple[Timeline, ...]
    runs: tuple[Run, ...]
    optimizer_ns: int
    bound_ns: int
    memory: MemorySplit
    tokens: int | None
    flops_per_token: float | None
    peak_flops: int

    @property
    def step_ns(self) -> int:
        """Forward, backward and optimizer."""
        return sum(self.timelines[run.graph].step_ns for run in self.runs) + self.optimizer_ns

    @property
    def exposed_ns(self) -> int:
        """Time in which compute waits for communication."""
        return sum(self.timelines[run.graph].exposed_ns for run in self.runs)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second and device."""
        return None if self.tokens is None else self.tokens * 1e9 / self.step_ns

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation, counted as in `simplefsdp.llama.flops`."""
        rate = self.tokens_per_s
        return (
            None
            if rate is None or self.flops_per_token is None
            else rate * self.flops_per_token / self.peak_flops
        )


def predict(
    graphs: Sequence[GraphFacts],
    profile: HardwareProfile,
    stored: Stored,
    *,
    runs: Sequence[Run] | None = None,
    planner: str | None = None,
    tokens: int | None = None,
    flops_per_token: float | None = None,
    own_streams: bool = False,
) -> Prediction:
    """Predict one training step.

    Args:
        graphs: forward and backward, with their plans.
        profile: hardware.
        stored: by one device.
        runs: which graph runs when; None runs each once, in order.
        planner: plan anew with this one; None keeps the plans.
        tokens: of one device in one step.
        flops_per_token: that training needs.
        own_streams: gathers and reductions allocate on streams of their own, as in FSDP2.
    """
    plans: list[Plan] = [
        facts.plan if planner in (None, facts.plan.planner) else plan_collectives(facts.problem, planner)
        for facts in graphs
    ]
    timelines = tuple(make_timeline(facts, plan) for facts, plan in zip(graphs, plans, strict=True))
    optimizer_ns = ComputeModel(profile).move_ns(OPTIMIZER_PASSES * stored.trained)
    runs = once_each(facts.kind for facts in graphs) if runs is None else tuple(runs)
    peak = peak_by_use(timelines, runs)
    held = dict(zip(Memory, peak, strict=True))
    live_bytes = stored.total + stored.optimizer + sum(peak)
    kept = [stored.total, *[stored.trained] * MOMENTS]
    reserved = reserved_bytes(timelines, runs, kept, own_streams=own_streams)
    dtypes = profile.dtypes()
    return Prediction(
        planner=planner or (graphs[0].plan.planner if graphs else "none"),
        timelines=timelines,
        runs=runs,
        optimizer_ns=optimizer_ns,
        bound_ns=sum(plans[run.graph].lower_bound.time_ns for run in runs) + optimizer_ns,
        memory=MemorySplit(
            parameters=stored.total,
            optimizer=stored.optimizer,
            gradients=held[Memory.GRADIENTS],
            activations=held[Memory.ACTIVATIONS],
            gathered=held[Memory.GATHERED],
            communication=held[Memory.COMMUNICATION],
            fragments=max(0, reserved - live_bytes),
        ),
        tokens=tokens,
        flops_per_token=flops_per_token,
        peak_flops=profile.value(f"peak_flops.{'bfloat16' if 'bfloat16' in dtypes else 'float32'}"),
    )
