"""Inductor's own passes run on traced graphs, and what they decided in words that plans have too.

Needs no Triton and no device: every time the passes ask for is given to them. Positions are counted in matrix
products, which no pass reorders.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._inductor.fx_passes import overlap_scheduling
from torch._inductor.fx_passes.overlap_manual_scheduling import manual_overlap_bucketing
from torch.utils import _runtime_estimation

import simplefsdp
from inductor_passes import graph as fxg
from inductor_passes.bucket import merge_waits
from inductor_passes.costs.model import ProfileCostModel
from inductor_passes.plan import ISSUE, PlanningProblem, Role
from inductor_passes.program import Program, read_program
from simplefsdp.explainer.capture import Capture
from simplefsdp.explainer.facts import GraphFacts
from simplefsdp.explainer.wrapping import wrap_options

_C10D = torch.ops._c10d_functional
_KINDS = {
    _C10D.all_gather_into_tensor.default: "all_gather",
    _C10D.all_gather_into_tensor_out.default: "all_gather",
    _C10D.reduce_scatter_tensor.default: "reduce_scatter",
    _C10D.all_reduce.default: "all_reduce",
    _C10D.all_reduce_.default: "all_reduce",
}
PROFILE = "h100_sxm"
RANKS_PER_NODE = 8

Price = Callable[[str, int], float]
"""Time of a collective by kind and bytes of the whole tensor."""


@dataclasses.dataclass(frozen=True, order=True)
class Travel:
    """A bucket: numbers of its collectives, and how many matrix products run before its start and before its wait."""

    members: tuple[int, ...]
    start: int
    wait: int


@dataclasses.dataclass(frozen=True)
class Traced:
    """A forward or backward graph before any scheduling, and its facts."""

    graph: fx.Graph
    program: Program
    facts: GraphFacts

    def products_before(self) -> list[int]:
        """Matrix products before each slot."""
        counts = [0]
        for region in self.facts.regions:
            counts.append(counts[-1] + (region.flops > 0))
        return counts

    def planned(self, facts: GraphFacts) -> list[Travel]:
        """What a plan for these facts does."""
        before, plan = self.products_before(), facts.plan
        slots: dict[tuple[int, str], int] = {
            (event.bucket, event.action): event.slot for event in plan.events
        }
        return [
            Travel(bucket.members, before[slots[at, ISSUE]], before[bucket.wait_slot])
            for at, bucket in enumerate(plan.buckets)
        ]


def look_at_graphs(
    build: Callable[[], nn.Module],
    inputs: Sequence[torch.Tensor],
    *,
    ranks: int,
    sharding_factor: int | None,
    blocks: tuple[str, ...],
    look: Callable[[Traced], None],
) -> None:
    """Trace forward and backward of a model on imagined ranks, and look at each while its process groups exist."""
    wrap = wrap_options(
        gpus=ranks,
        sharding_factor=sharding_factor,
        precision="bf16",
        planner="none",
        blocks=blocks,
        memory_budget_gb=None,
        reshard_after_forward=True,
        profile=PROFILE,
    )
    plan = Capture._plan

    def note(self: Capture, kind: str, graph: fx.Graph, saved: Any) -> None:
        merge_waits(graph)
        copied = _copy(graph)
        plan(self, kind, graph, saved)
        cost = ProfileCostModel(self._setups[-1].profile)
        look(Traced(copied, read_program(copied, cost, RANKS_PER_NODE, blocks), self.graphs[-1]))

    with torch.device("meta"):
        model = build()
    with mock.patch.object(Capture, "_plan", note):
        simplefsdp.explain(model, *inputs, ranks=ranks, wrap=wrap)


def schedule_overlap(traced: Traced, problem: PlanningProblem, price: Price, **options: Any) -> list[Travel]:
    """What overlap scheduling with bucketing does with a graph.

    Args:
        traced: the graph.
        problem: times of its regions. What a region computes takes its time at its first matrix product, or its first
            operator where it has none.
        price: times of collectives, in the same unit.
        options: as of `schedule_overlap_bucketing`.
    """
    graph = _copy(traced.graph)
    times = {
        _anchor(nodes).name: float(time)
        for nodes, time in zip(traced.program.regions, problem.region_ns, strict=True)
    }

    def estimate(node: fx.Node, size_bytes: int | None = None) -> float | None:
        kind = _kind_of(node)
        if kind is None:
            return times.get(node.name, 0.0 if overlap_scheduling.is_compute_node(node) else None)
        if size_bytes is None:
            size_bytes = max(_bytes(node), _bytes(node.all_input_nodes[0]))
        return price(kind, size_bytes)

    with _device_numbers():
        overlap_scheduling.schedule_overlap_bucketing(
            _module_of(graph),
            collective_bucketing=True,
            compute_estimator="analytical",
            insert_overlap_deps=False,
            custom_runtime_estimation=estimate,
            enable_fusion_regions=False,
            **options,
        )
    return _travels(traced, graph)


def schedule_by_block(traced: Traced, blocks: Sequence[str]) -> list[Travel]:
    """What manual overlap scheduling does with a graph, a bucket for each named module."""
    graph = _copy(traced.graph)

    def modules(node: fx.Node) -> list[tuple[str, type]]:
        return [("", nn.Module), *((name, nn.Module) for name, _ in fxg.module_stack(node) if name)]

    with _device_numbers():
        manual_overlap_bucketing(
            _module_of(graph), list(blocks), insert_overlap_deps=False, module_stack_fn=modules
        )
    return _travels(traced, graph)


@contextlib.contextmanager
def _device_numbers() -> Iterator[None]:
    """Give the passes numbers of a device, which they ask Triton for and of which nothing here depends."""
    with (
        mock.patch.object(_runtime_estimation, "get_gpu_dram_gbps", return_value=1.0),
        mock.patch.object(_runtime_estimation, "get_device_tflops", return_value=1.0),
    ):
        yield


def _copy(graph: fx.Graph) -> fx.Graph:
    new = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    new.output(new.graph_copy(graph, known))
    for old, node in known.items():
        node.meta = dict(old.meta)
    return fx.GraphModule(nn.Module(), new).graph


def _module_of(graph: fx.Graph) -> fx.GraphModule:
    assert graph.owning_module is not None
    return graph.owning_module


def _anchor(nodes: Sequence[fx.Node]) -> fx.Node:
    products = [node for node in nodes if overlap_scheduling.is_compute_node(node)]
    return next(iter(products or [node for node in nodes if not fxg.is_view(node)] or nodes))


def _kind_of(node: fx.Node) -> str | None:
    return _KINDS.get(node.target) if node.op == "call_function" else None  # type: ignore[call-overload]


def _bytes(node: fx.Node) -> int:
    value: torch.Tensor = node.meta["val"]
    return value.numel() * value.element_size()


def _sources(node: fx.Node, found: Callable[[fx.Node], bool]) -> Iterator[str]:
    """Names of the nearest ancestors that are what is looked for."""
    seen: set[fx.Node] = set()
    stack = list(node.all_input_nodes)
    while stack:
        source = stack.pop()
        if source in seen:
            continue
        seen.add(source)
        if found(source):
            yield source.name
        else:
            stack += source.all_input_nodes


def _travels(traced: Traced, graph: fx.Graph) -> list[Travel]:
    """The collectives of a scheduled graph. Gathers are known by the parameters they read, reductions by what made
    their gradients; so an all-reduce after a bucket of reduce-scatters counts for all of its members."""
    items, starts = traced.facts.problem.collectives, traced.program.starts
    computed = {node.name for nodes in traced.program.regions for node in nodes}

    def is_parameter(node: fx.Node) -> bool:
        return node.op == "placeholder"

    def is_computed(node: fx.Node) -> bool:
        return node.name in computed

    gathers: dict[str, int] = {}
    makers: dict[str, dict[str, int]] = {"reduce_scatter": {}, "all_reduce": {}}
    for number, start in enumerate(starts):
        kind = items[number].key.kind
        if items[number].role is Role.GATHER:
            gathers.update(dict.fromkeys(_sources(start, is_parameter), number))
        else:
            makers[kind].update(dict.fromkeys(_sources(start, is_computed), number))
    products = {
        node.name
        for nodes, region in zip(traced.program.regions, traced.facts.regions, strict=True)
        for node in [_anchor(nodes)]
        if region.flops
    }
    position: dict[fx.Node, int] = {}
    count = 0
    for node in graph.nodes:
        position[node] = count
        count += node.name in products
    out = []
    for node in graph.nodes:
        moved = _kind_of(node)
        if moved is None:
            continue
        if moved == "all_gather":
            members = {gathers[name] for name in _sources(node, is_parameter) if name in gathers}
        else:
            members = {makers[moved][name] for name in _sources(node, is_computed)}
        wait = next(user for user in node.users if fxg.is_wait(user))
        out.append(Travel(tuple(sorted(members)), position[node], position[wait]))
    return out
