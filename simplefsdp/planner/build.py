"""From options to the facts of a whole step: build, trace a few layers, extend.

Owns the order of these. Must not know how results are shown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from torch import nn

from inductor_passes.planners import plan_collectives
from simplefsdp.explainer.api import explain
from simplefsdp.explainer.facts import GraphFacts
from simplefsdp.explainer.hardware import Hardware
from simplefsdp.explainer.report import Report
from simplefsdp.explainer.runs import Run
from simplefsdp.explainer.target import Target
from simplefsdp.explainer.wrapping import block_patterns, wrap_options
from simplefsdp.planner.extend import TRACED_LAYERS, ExtensionError, extend, has_layers
from simplefsdp.planner.predict import Stored
from simplefsdp.planner.stack import cut, find_stack, restore


@dataclasses.dataclass(frozen=True)
class Parameter:
    """Size of a parameter.

    Args:
        rows: length of the dim that is sharded; 1 for one that has no dim.
        row_bytes: bytes of what lies in one row.
        trained: whether it has a gradient and optimizer states.
    """

    rows: int
    row_bytes: int
    trained: bool = True

    @classmethod
    def of(cls, parameter: nn.Parameter) -> Parameter:
        """The size of a parameter that is sharded along its first dim."""
        rows = parameter.shape[0] if parameter.dim() else 1
        return cls(
            rows, parameter.numel() // max(rows, 1) * parameter.dtype.itemsize, parameter.requires_grad
        )

    def stored_bytes(self, factor: int) -> int:
        """What one of `factor` devices stores of it; of uneven shards the largest."""
        return -(-self.rows // factor) * self.row_bytes


@dataclasses.dataclass(frozen=True)
class Traced:
    """A step of a model, ready to be predicted.

    Args:
        graphs: forward and backward; more where the graph breaks.
        runs: which of them runs when in a step.
        parameters: of the whole model, by name.
        note: how the graphs were obtained.
        warnings: graph breaks and recompiles.
        eager: forward and backward in eager mode, if that was asked for and can be read.
        buffer_bytes: of the model's buffers, which every device has.
    """

    graphs: tuple[GraphFacts, ...]
    runs: tuple[Run, ...]
    parameters: Mapping[str, Parameter]
    note: str
    warnings: tuple[str, ...]
    eager: tuple[GraphFacts, ...] = ()
    buffer_bytes: int = 0

    def stored(self, factor: int) -> Stored:
        """What one device stores when `factor` of them share a copy; of uneven shards the largest."""
        sizes = [(item.stored_bytes(factor), item.trained) for item in self.parameters.values()]
        return Stored(
            sum(size for size, _ in sizes) + self.buffer_bytes,
            sum(size for size, trained in sizes if trained),
        )


def trace(
    target: Target,
    hardware: Hardware,
    *,
    gpus: int,
    sharding_factor: int | None = None,
    precision: str = "bf16",
    planner: str = "auto",
    memory_budget_gb: float | None = 4.0,
    reshard_after_forward: bool = True,
    whole: bool = False,
    eager: bool = False,
) -> Traced:
    """Trace a step; of a stack of equal layers only a few are traced, and the facts are extended.

    Args:
        target: the model; its stack is cut.
        hardware: what to model.
        gpus, sharding_factor, precision, planner, memory_budget_gb, reshard_after_forward: as in the command line.
        whole: trace every layer.
        eager: also read what eager mode would run.

    Raises:
        ValueError: numbers that do not divide.
    """
    stack = None if whole else find_stack(target.model)
    wrap = wrap_options(
        gpus=gpus,
        sharding_factor=sharding_factor,
        precision=precision,
        planner="none",  # what is traced is not yet what is planned
        blocks=block_patterns(target.model) if stack is None else (f"{stack.name}.*",),
        memory_budget_gb=memory_budget_gb,
        reshard_after_forward=reshard_after_forward,
        profile=hardware.profile,
    )
    parameters = {name: Parameter.of(item) for name, item in target.model.named_parameters()}
    buffer_bytes = sum(item.nbytes for item in target.model.buffers())

    def look() -> Report:
        return explain(
            target.model, *target.inputs, ranks=gpus, wrap=wrap, title=target.name, eager=eager, dumps=False
        )

    note = "every layer traced"
    if stack is not None:
        removed = cut(target.model, stack)
        try:
            report = look()
            if len(report.runs) > len(report.graphs):
                raise ExtensionError("the graph breaks inside a layer")
            is_broken = len(report.graphs) > 2 and any(
                has_layers(facts, stack.name) for facts in report.graphs
            )
            graphs, eager_graphs = (
                tuple(
                    facts  # a piece before or behind the layers
                    if is_broken and not has_layers(facts, stack.name)
                    else extend(facts, stack.name, stack.layers)
                    for facts in few
                )
                for few in (report.graphs, report.eager)
            )
        except Exception as error:
            why = f"with fewer layers of {stack.name!r} the model cannot be traced"  # forward may count them
            note += f": {error if isinstance(error, ExtensionError) else why}"
            restore(target.model, stack, removed)
        else:
            note = f"{TRACED_LAYERS} of the {stack.layers} equal layers of {stack.name!r} traced, one of them repeated"
            return Traced(
                planned(graphs, planner),
                report.runs,
                parameters,
                note,
                report.warnings,
                eager_graphs,
                buffer_bytes,
            )
    report = look()
    return Traced(
        planned(report.graphs, planner),
        report.runs,
        parameters,
        note,
        report.warnings,
        report.eager,
        buffer_bytes,
    )


def planned(graphs: Iterable[GraphFacts], planner: str) -> tuple[GraphFacts, ...]:
    """The same graphs with plans of a planner; what has one already keeps it."""
    return tuple(
        facts
        if facts.plan.planner == planner
        else dataclasses.replace(facts, plan=plan_collectives(facts.problem, planner))
        for facts in graphs
    )
