"""Read a forward or backward graph as a planning problem: compute regions, slots, and collectives with their windows.

It owns the division of a graph into what stays where it is and what travels with a collective. It must not know how
plans are found or applied, and it changes no graph.

Compute nodes are *anchored*: they keep their order and are cut into regions. What only serves a collective *floats*
and goes wherever its collective goes::

    floats before a start      shard -> cast -> pad -> [start]        gradient -> transpose -> cast -> [start]
    floats after a wait        [wait] -> slice -> transpose -> matmul    [wait] -> cast -> output

A region ends where a plan may want to act: before a matrix product, before the first reader of a collective's result,
after the producer of a collective's input, and around barriers and collectives that are not ours to move. Floating
nodes count as no compute, so that ranks with uneven shards, whose graphs differ in padding, see equal problems.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from typing import TYPE_CHECKING

import torch.distributed as dist

from inductor_passes import _compat, work
from inductor_passes import graph as fxg
from inductor_passes.config import class_name_of
from inductor_passes.costs.topology import GroupTopology, mesh_topology
from inductor_passes.plan import Collective, GroupKey, PlanningProblem, Role
from inductor_passes.report import members_of
from inductor_passes.windows import Walk, Window

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import fx

    from inductor_passes.costs.model import CostModel


@dataclasses.dataclass(frozen=True)
class Program:
    """A graph, read for planning. Numbers of collectives and regions are those of the problem.

    Args:
        regions: anchored nodes of each region, in graph order.
        starts: the start of each collective, in graph order.
        waits: the wait of each collective.
        problem: what the planners see.
    """

    regions: tuple[tuple[fx.Node, ...], ...]
    starts: tuple[fx.Node, ...]
    waits: tuple[fx.Node, ...]
    problem: PlanningProblem


def read_program(
    graph: fx.Graph,
    cost: CostModel,
    ranks_per_node: int,
    blocks: Sequence[str] = (),
    memory_budget_bytes: int | None = None,
) -> Program:
    """Read a graph as a planning problem.

    Args:
        graph: a forward, backward or inference graph with fake tensors.
        cost: prices of compute and communication.
        ranks_per_node: ranks that share a node, in the whole job.
        blocks: the modules of `PassConfig.blocks`.
        memory_budget_bytes: bound on bytes in flight, None for none.

    Returns:
        The program; without collectives if the graph has none. Time is linear in nodes and edges.
    """
    starts = [node for node in fxg.starts(graph) if fxg.find_wait(node) is not None]
    roles = {start: role_of(start) for start in starts}
    walk = _walk(graph, starts, roles)
    regions = walk.regions()
    nominal = work.nominal_size(graph)
    problem = make_problem(
        region_ns=[work.time_ns(nodes, nominal, cost) for nodes in regions],
        starts=starts,
        windows=walk.windows(),
        cost=cost,
        ranks_per_node=ranks_per_node,
        blocks=blocks,
        memory_budget_bytes=memory_budget_bytes,
    )
    waits = tuple(wait for wait in map(fxg.find_wait, starts) if wait is not None)
    return Program(regions, tuple(starts), waits, problem)


def make_problem(
    *,
    region_ns: Sequence[int],
    starts: Sequence[fx.Node],
    windows: Sequence[Window],
    cost: CostModel,
    ranks_per_node: int,
    blocks: Sequence[str] = (),
    memory_budget_bytes: int | None = None,
) -> PlanningProblem:
    """The planning problem of collectives with known windows among regions of known length.

    Args:
        region_ns: modelled time of each region.
        starts: start of each collective, from one graph, in the order of their numbers.
        windows: slots each may use.
        cost: prices of communication.
        ranks_per_node: ranks that share a node, in the whole job.
        blocks: the modules of `PassConfig.blocks`.
        memory_budget_bytes: bound on bytes in flight, None for none.
    """
    labels = group_labels(starts)
    topologies = group_topologies(starts, ranks_per_node)
    nominal = work.nominal_size(starts[0].graph) if starts else 1
    collectives = []
    for number, (start, window) in enumerate(zip(starts, windows, strict=True)):
        key = _planning_key(start, number, labels)
        collectives.append(_collective(start, key, window, cost, topologies[key.group], nominal, blocks))
    keys = sorted({item.key for item in collectives})
    return PlanningProblem(
        region_ns=tuple(region_ns),
        collectives=tuple(collectives),
        alpha_ns={key: cost.alpha_ns(key.kind, topologies[key.group]) for key in keys},
        issue_ns=cost.issue_ns(),
        kernel_ns=cost.kernel_ns(),
        memory_budget_bytes=memory_budget_bytes,
    )


def _planning_key(start: fx.Node, number: int, labels: dict[str, str]) -> GroupKey:
    """A collective's group key with the group's label; one of symbolic size has a key that no other shares, because
    buckets are laid out in fixed sizes."""
    key = fxg.group_key(start)
    key = dataclasses.replace(key, group=labels[key.group])
    sizes = (*fxg.value_of(fxg.input_of(start)).shape, *fxg.value_of(start).shape)
    static = all(isinstance(size, int) for size in sizes)
    return key if static else dataclasses.replace(key, dtype=f"{key.dtype} of symbolic size {number}")


def role_of(start: fx.Node) -> Role:
    """Whether a collective gathers a parameter, reduces a gradient, or is none of ours."""
    if fxg.find_tag(start) is None:
        return Role.FIXED
    kind = fxg.get_kind(start)
    if kind == fxg.ALL_GATHER:
        return Role.GATHER
    return Role.REDUCE if kind in (fxg.REDUCE_SCATTER, fxg.ALL_REDUCE) else Role.FIXED


def find_floating(graph: fx.Graph, roles: dict[fx.Node, Role]) -> set[fx.Node]:
    """The nodes that only serve a movable collective: what prepares its input or unpacks its result, cheaply.

    That is, nodes of an unshard, views, and light operators on nothing but graph inputs, if all that they feed (or
    all that they read) is a movable collective or floats itself.
    """
    movable = {start for start, role in roles.items() if role is not Role.FIXED}
    waits = {wait for start in movable if (wait := fxg.find_wait(start)) is not None}
    from_inputs: set[fx.Node] = set()
    for node in graph.nodes:
        light = node.op == "placeholder" or (_may_float(node) and not fxg.is_heavy(node))
        if light and all(source in from_inputs for source in node.all_input_nodes):
            from_inputs.add(node)
    floating: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        serves = node.users and all(user in movable or user in floating for user in node.users)
        if serves and _may_float(node) and (_is_service(node) or node in from_inputs):
            floating.add(node)
    for node in graph.nodes:
        sources = node.all_input_nodes
        unpacks = sources and all(source in waits or source in floating for source in sources)
        if unpacks and _may_float(node) and _is_service(node):
            floating.add(node)
    return floating


def _may_float(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and not fxg.is_start(node)
        and not fxg.is_wait(node)
        and not fxg.is_barrier(node)
        and not fxg.is_random(node)
    )


def _is_service(node: fx.Node) -> bool:
    return fxg.is_view(node) or fxg.find_tag(node) is not None


def _walk(graph: fx.Graph, starts: Sequence[fx.Node], roles: dict[fx.Node, Role]) -> Walk[fx.Node]:
    number_of = {start: number for number, start in enumerate(starts)}
    floating = find_floating(graph, roles)
    walk: Walk[fx.Node] = Walk([roles[start] is Role.FIXED for start in starts])
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node in number_of:
            walk.start(node, inputs)
        elif fxg.is_wait(node) and inputs[0] in number_of:
            walk.wait(node, number_of[inputs[0]])
        elif node in floating or node.op != "call_function":
            walk.floating(node, inputs)
        else:
            walk.anchored(
                node,
                inputs,
                cut_before=fxg.is_heavy(node),
                cut_after=any(user in floating or user in number_of for user in node.users),
                # A start or wait without its other half is something the passes do not understand.
                barrier=fxg.is_barrier(node) or fxg.is_start(node) or fxg.is_wait(node),
            )
    return walk


def group_labels(starts: Iterable[fx.Node]) -> dict[str, str]:
    """Names for process groups that are equal on every rank and in every run: numbered as they first occur."""
    names = dict.fromkeys(_compat.group_name(fxg.group_of(start)) for start in starts)
    return {name: f"group{number}" for number, name in enumerate(names)}


def group_topologies(starts: Iterable[fx.Node], ranks_per_node: int) -> dict[str, GroupTopology]:
    """Where the ranks of each process group sit, by the group's label; alike on every rank of the mesh."""
    starts = list(starts)
    world_size = dist.get_world_size() if dist.is_initialized() else 0
    groups = {_compat.group_name(fxg.group_of(start)): fxg.group_of(start) for start in starts}
    labels = group_labels(starts)
    return {
        labels[name]: mesh_topology(_compat.group_ranks(group), world_size, ranks_per_node)
        for name, group in groups.items()
    }


def find_block(node: fx.Node, blocks: Sequence[str]) -> str | None:
    """The innermost module of `blocks` that holds the module a node was traced in, None when there is none.

    Args:
        node: a node with a module stack.
        blocks: fully qualified names, globs whose `*` stands for one part of a name, or class names, qualified
            or not. A module whose class derives from a named one counts. Containers that are never called, such
            as a `ModuleList`, have a name here and no class.
    """
    classes = dict(fxg.module_stack(node))
    parts = fxg.module_fqn(node).split(".")
    for length in range(len(parts), -1, -1):
        fqn = ".".join(parts[:length])
        if any(block in _class_names(classes.get(fqn)) or _matches(fqn, block) for block in blocks):
            return fqn
    return None


def _class_names(cls: type | str | None) -> set[str]:
    if isinstance(cls, type):
        return {name for base in cls.__mro__ for name in (base.__name__, class_name_of(base))}
    return set() if cls is None else {cls}


def _matches(fqn: str, pattern: str) -> bool:
    parts, patterns = fqn.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def _collective(
    start: fx.Node,
    key: GroupKey,
    window: Window,
    cost: CostModel,
    topology: GroupTopology,
    nominal: int,
    blocks: Sequence[str],
) -> Collective:
    sent = work.moved_bytes([fxg.input_of(start)], nominal)
    received = work.moved_bytes([start], nominal)
    full = received if key.kind == fxg.ALL_GATHER else sent
    return Collective(
        name="+".join(members_of(start)) if role_of(start) is not Role.FIXED else key.kind,
        key=key,
        role=role_of(start),
        size_bytes=full,
        transfer_ns=cost.transfer_ns(key.kind, topology, full),
        earliest_issue=window.earliest_issue,
        latest_issue=window.latest_issue,
        latest_wait=window.latest_wait,
        depends_on=window.depends_on,
        copy_in_ns=cost.copy_ns(sent),
        copy_out_ns=cost.copy_ns(received),
        staging_bytes=full,
        block=find_block(start, blocks),
    )
