"""A training step as plain data: traced once or twice, predicted for any devices, groups and batch.

Owns: what has to be traced for which question, in which process, and what is kept of it. Must not know how results are
compared or shown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from simplefsdp.explainer.trace_errors import TraceError, explain_failure
from simplefsdp.planner.build import Traced, trace
from simplefsdp.planner.request import Request
from simplefsdp.planner.rescale import World, at_batch, at_world

if TYPE_CHECKING:
    from inductor_passes.costs.profiles import HardwareProfile
    from simplefsdp.explainer.facts import GraphFacts
    from simplefsdp.explainer.hardware import Hardware


@dataclasses.dataclass(frozen=True)
class Step:
    """A traced step.

    Args:
        request: what was asked for.
        name: of the model, for titles.
        traced: forward and backward, and the parameters.
        tokens: of one device in one step, None where the model has no such notion.
        flops_per_token: that training needs, None where it is not known.
    """

    request: Request
    name: str
    traced: Traced
    tokens: int | None
    flops_per_token: float | None

    @property
    def world(self) -> World:
        """Where it was traced."""
        return World(self.request.devices, self.request.factor)

    def tokens_of(self, batch: int) -> int | None:
        """Tokens of one device in one step with another batch."""
        return None if self.tokens is None else self.tokens // self.request.batch * batch


Tracer = Callable[[Request], Step]


def trace_step(request: Request, hardware: Hardware) -> Step:
    """Build a model and trace a step of it.

    Raises:
        UsageError: what was asked for makes no sense; says what to change.
        TraceError: the model cannot be built or traced; says where and why.
    """
    target = request.find_target()
    with explain_failure(target.name):
        traced = trace(
            target,
            hardware,
            gpus=request.devices,
            sharding_factor=request.factor,
            precision=request.precision,
            planner=request.planner,
            memory_budget_gb=request.memory_budget_gb,
            reshard_after_forward=request.reshard,
            whole=request.whole,
            eager=request.eager,
        )
    if not traced.parameters:
        raise TraceError(f"{target.name} has no parameters: there is nothing to shard or plan")
    return Step(request, target.name, traced, target.tokens, target.flops_per_token)


class Family:
    """One step with every batch, on all devices that share its kind of sharding.

    Args:
        low, high: the step with two batches; the same one where only its own batch is asked for.
        profile: hardware.
    """

    def __init__(self, low: Step, high: Step, profile: HardwareProfile) -> None:
        self.low, self.high = low, high
        self._profile = profile
        self._rows = {name: item.rows for name, item in high.traced.parameters.items()}
        self._known: dict[tuple[int, World], tuple[GraphFacts, ...]] = {}

    def is_traced(self, batch: int) -> bool:
        """Whether a batch was traced, rather than computed from others."""
        return batch in (self.low.request.batch, self.high.request.batch)

    def graphs(self, batch: int, world: World) -> tuple[GraphFacts, ...]:
        """Forward and backward, in the order of the code, kept for the next who asks.

        Raises:
            RescaleError: these facts do not tell.
        """
        if (batch, world) not in self._known:
            self._known[batch, world] = self.make_graphs(batch, world)
        return self._known[batch, world]

    def make_graphs(self, batch: int, world: World) -> tuple[GraphFacts, ...]:
        """The same, not kept."""
        pairs = zip(self.low.traced.graphs, self.high.traced.graphs, strict=True)
        return tuple(self._graph(*pair, batch, world) for pair in pairs)

    def _graph(self, low: GraphFacts, high: GraphFacts, batch: int, world: World) -> GraphFacts:
        if batch == self.low.request.batch:
            facts = low
        else:
            facts = at_batch(low, self.low.request.batch, high, self.high.request.batch, batch)
        if world != self.high.world:
            facts = at_world(facts, self._profile, self.high.world, world, self._rows)
        return facts
