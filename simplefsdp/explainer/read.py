"""Read the facts off a graph that is about to be planned: names of regions, tensors and how long they live.

Owns the walk over FX nodes. Must not know plans or times, and changes no graph.

What counts as a tensor of its own memory: the result of a matrix product or attention, and whatever a fused kernel of
light operators leaves for others, that is, results read outside their region. Views share the memory of what they view.
A fused kernel writes a result over a tensor of equal size that the graph made and that ends there, as TorchInductor
does: the two count once.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING

from inductor_passes import graph as fxg
from inductor_passes import work
from inductor_passes.plan import Role
from simplefsdp.explainer.facts import BEFORE, Memory, Region, Traffic, Value, last_use_of_sent

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import fx

    from inductor_passes.program import Program


@dataclasses.dataclass(frozen=True)
class Contents:
    """Regions, values and traffic of a graph, as `GraphFacts` holds them."""

    regions: tuple[Region, ...]
    values: tuple[Value, ...]
    traffic: tuple[Traffic, ...]


@dataclasses.dataclass(frozen=True)
class Saved:
    """One tensor that a forward hands to backward; equal `owner` means shared memory."""

    memory: Memory
    owner: str


def read_contents(graph: fx.Graph, program: Program, saved: Mapping[str, Saved] | None = None) -> Contents:
    """Read regions, tensors and the memory of collectives.

    Args:
        graph: a forward, backward or inference graph with fake tensors.
        program: the same graph, read for planning.
        saved: of a backward graph, what its inputs are by name; inputs that are not in it were alive before and are
            left out. None leaves out all inputs.

    Returns:
        The contents, with the numbers that `program` gives to regions and collectives.
    """
    nominal = work.nominal_size(graph)
    region_of = {node: at for at, nodes in enumerate(program.regions) for node in nodes}
    memory_of = memory_owners(graph, saved)
    last_use = _last_uses(graph, region_of, memory_of, len(program.regions))
    regions = tuple(region_of_kernel(nodes, nominal) for nodes in program.regions)

    sources: dict[fx.Node, list[int]] = {}
    copies: list[bool] = []
    for number, start in enumerate(program.starts):
        source, copied = _source(start, region_of, memory_of)
        copies.append(copied)
        if source is not None:
            sources.setdefault(source, []).append(number)

    values: list[Value] = []
    number_of: dict[fx.Node, int] = {}
    tensors = list(_tensors(graph, region_of, memory_of, saved))
    overwritten = _overwritten(tensors, last_use, sources, nominal)
    # What was there before comes in the order in which it is used up: like layers stay in like order.
    tensors.sort(key=lambda item: (item[1], last_use.get(item[0], 0) if item[1] == BEFORE else 0))
    for node, at in tensors:
        sent = [program.problem.collectives[number] for number in sources.get(node, ())]
        memory = Memory.ACTIVATIONS if at != BEFORE else (saved or {})[node.name].memory
        if sent and all(item.role is Role.REDUCE for item in sent):
            memory = Memory.GRADIENTS
        dies = max(last_use.get(node, at), at, 0)
        if node in overwritten:
            dies -= 1
            if dies < at:
                continue  # made and overwritten in one region
        number_of[node] = len(values)
        # A backward may compute nothing at all: what it hands on was saved.
        name = regions[min(at if at != BEFORE else dies, len(regions) - 1)].module if regions else ""
        values.append(Value(name, work.moved_bytes([node], nominal), memory, at, dies))

    forwarded = {}  # reductions whose result only goes into another one (HSDP): held until that starts
    for number, start in enumerate(program.starts):
        wait = _sent_wait(start, region_of)
        if wait is not None:
            issue = program.problem.collectives[number].earliest_issue
            forwarded[wait] = last_use_of_sent(issue, len(regions))
    traffic = []
    for number, (start, wait) in enumerate(zip(program.starts, program.waits, strict=True)):
        source, _ = _source(start, region_of, memory_of)
        slot = program.problem.collectives[number].latest_wait
        is_gather = program.problem.collectives[number].role is not Role.REDUCE
        used = last_use.get(wait, slot) if is_gather else forwarded.get(wait, len(regions))
        traffic.append(
            Traffic(
                sent_bytes=work.moved_bytes([fxg.input_of(start)], nominal),
                received_bytes=work.moved_bytes([start], nominal),
                source=None if source is None else number_of.get(source),
                copied=copies[number],
                last_use=used,
                kept_share=1.0 if is_gather else kept_share(wait),
            )
        )
    return Contents(regions, tuple(values), tuple(traffic))


def kept_share(wait: fx.Node) -> float:
    """Bytes of the gradient that a graph returns to those of the reduction's result, whose wait is given.

    1 where the result goes into another reduction (HSDP): what is left is that one's.
    """
    node, casts = wait, False
    while len(node.users) == 1:
        (user,) = node.users
        if not (fxg.is_view(user) or fxg.is_cast(user)):
            break
        casts = casts or fxg.is_cast(user)
        node = user
    if not casts or any(user.op != "output" for user in node.users):
        return 1.0
    return fxg.value_of(node).element_size() / fxg.value_of(wait).element_size()


def module_of(nodes: Iterable[fx.Node]) -> str:
    """The module that most of the nodes were traced in; "" when none says."""
    names = Counter(name for node in nodes if (name := fxg.module_fqn(node)))
    return max(names, key=names.__getitem__) if names else ""


def summary_of(nodes: Sequence[fx.Node]) -> str:
    """What nodes compute, in a few words: the heavy operators, or the first light ones."""
    heavy = [_short_name(node) for node in nodes if fxg.is_heavy(node)]
    light = [_short_name(node) for node in nodes if not fxg.is_heavy(node) and not fxg.is_view(node)]
    if heavy:
        return "+".join(heavy)
    names = list(dict.fromkeys(light))
    return "+".join(names[:3]) + ("+..." if len(names) > 3 else "") if names else "views"


def saved_values(graph: fx.Graph) -> dict[str, Saved]:
    """What a forward graph hands to backward and made itself, by node name: gathered parameters and activations."""
    memory_of = memory_owners(graph)
    out = {}
    for node in graph.output_node().all_input_nodes:
        base = memory_of[node]
        if base.op != "placeholder":
            is_gather = fxg.is_wait(base) and fxg.find_tag(base) is not None
            out[node.name] = Saved(Memory.GATHERED if is_gather else Memory.ACTIVATIONS, base.name)
    return out


def region_of_kernel(nodes: Sequence[fx.Node], nominal: int) -> Region:
    """The region that nodes make up: where they were traced, what they compute, their operations."""
    heavy = [node for node in nodes if fxg.is_heavy(node)]
    module = module_of(heavy or nodes)
    flops = sum(item.flops for item in work.kernels(nodes, nominal, named=False))
    return Region(f"{module or 'model'} {summary_of(nodes)}", module, flops)


def _short_name(node: fx.Node) -> str:
    name = fxg.operator_name(node).rpartition("::")[2].lstrip("_")
    return "attention" + ("_backward" if name.endswith("backward") else "") if "scaled_dot" in name else name


def memory_owners(graph: fx.Graph, saved: Mapping[str, Saved] | None = None) -> dict[fx.Node, fx.Node]:
    """The node whose memory each node's result lies in: its own, or that of what it views.

    Args:
        graph: any graph with fake tensors.
        saved: as in `read_contents`; inputs of one owner share memory.
    """
    out: dict[fx.Node, fx.Node] = {}
    owners: dict[str, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and saved is not None and node.name in saved:
            out[node] = owners.setdefault(saved[node.name].owner, node)
            continue
        is_view = fxg.is_view(node) and bool(node.all_input_nodes)
        if is_view and fxg.is_getitem(
            node
        ):  # one of several results: of a split a view, of attention a tensor
            source = node.all_input_nodes[0]
            is_view = out[source] is not source or fxg.is_view(source)
        out[node] = out[node.all_input_nodes[0]] if is_view else node
    return out


def _last_uses(
    graph: fx.Graph, region_of: Mapping[fx.Node, int], memory_of: Mapping[fx.Node, fx.Node], end: int
) -> dict[fx.Node, int]:
    """Last region that reads each memory, itself or through views; `end` for results of the graph."""
    last: dict[fx.Node, int] = {}
    for node in graph.nodes:
        at = end if node.op == "output" else region_of.get(node, BEFORE)
        if fxg.is_view(node) and not fxg.is_getitem(node):
            continue
        for source in node.all_input_nodes:
            memory = memory_of[source]
            last[memory] = max(last.get(memory, BEFORE), at)
    return {node: at for node, at in last.items() if at != BEFORE}


def _tensors(
    graph: fx.Graph,
    region_of: Mapping[fx.Node, int],
    memory_of: Mapping[fx.Node, fx.Node],
    saved: Mapping[str, Saved] | None,
) -> Iterable[tuple[fx.Node, int]]:
    """Nodes whose result takes memory of its own, with the region that makes it."""
    outside: set[fx.Node] = set()  # memory that something outside of its own region reads
    for node in graph.nodes:
        for source in node.all_input_nodes:
            memory = memory_of[source]
            if region_of.get(node, BEFORE) != region_of.get(memory, BEFORE):
                outside.add(memory)
    for node in graph.nodes:
        if node.op == "placeholder":
            if saved is not None and node.name in saved and memory_of[node] is node and fxg.is_tensor(node):
                yield node, BEFORE
        elif node in region_of and memory_of[node] is node and fxg.is_tensor(node):
            several = any(fxg.is_getitem(user) for user in node.users)
            if not several and (fxg.is_heavy(node) or node in outside):
                yield node, region_of[node]


def _overwritten(
    tensors: Sequence[tuple[fx.Node, int]],
    last_use: Mapping[fx.Node, int],
    sources: Mapping[fx.Node, Sequence[int]],
    nominal: int,
) -> set[fx.Node]:
    """Tensors over which a fused kernel of the region that reads them last writes a result of equal size."""
    ending: dict[tuple[int, int], list[fx.Node]] = {}  # (region, bytes) -> tensors that nothing reads later
    for node, at in tensors:
        end = last_use.get(node, at)
        if at != BEFORE and node not in sources and (end > at or fxg.is_heavy(node)):
            ending.setdefault((end, work.moved_bytes([node], nominal)), []).append(node)
    out: set[fx.Node] = set()
    for node, at in tensors:
        if at != BEFORE and not fxg.is_heavy(node):
            candidates = ending.get((at, work.moved_bytes([node], nominal)))
            if candidates:
                out.add(candidates.pop())
    return out


def _sent_wait(start: fx.Node, region_of: Mapping[fx.Node, int]) -> fx.Node | None:
    """The wait of the collective whose result a collective sends, if it sends one."""
    node = fxg.input_of(start)
    while node not in region_of and node.op != "placeholder" and node.all_input_nodes:
        if fxg.is_wait(node):
            return node
        node = node.all_input_nodes[0]
    return None


def _source(
    start: fx.Node, region_of: Mapping[fx.Node, int], memory_of: Mapping[fx.Node, fx.Node]
) -> tuple[fx.Node | None, bool]:
    """The tensor of compute that a collective sends, None for a shard; and whether it sends a copy of it."""
    node, copied = fxg.input_of(start), False
    while node not in region_of and node.op != "placeholder" and not fxg.is_wait(node):
        sources = [source for source in node.all_input_nodes if fxg.is_tensor(source)]
        if not sources:
            return None, True
        copied = copied or not fxg.is_view(node)
        node = sources[0]
    return (memory_of[node] if node in region_of else None), copied
