"""Decide in the joint graph which gathered parameters are gathered again in backward.

It owns the recompute tags of unshard chains. It must not know about buckets, costs or schedules, and it
moves no node.

Without it the partitioner keeps every collective's result for backward, that is, every full weight. With
it, a resharded parameter crosses from forward to backward only as its shard::

    forward:   shard -> cast -> all_gather -> wait -> t ------> mm ------> loss
    saved:     shard                                            activations
    backward:  shard -> cast -> all_gather -> wait -> t -> t -> mm(grad) -> ...

The tags are those of selective activation checkpointing. All chains share one `ac_graph_id`, above the id
of every checkpointed region: torch saves a value that flows into a region with a higher id, which here
would be the weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from inductor_passes import graph as fxg
from inductor_passes import work
from inductor_passes._compat import CheckpointPolicy
from inductor_passes.chains import find_gathered_values

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import fx

_RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


@dataclass(frozen=True)
class ReshardRecord:
    """What the reshard pass did with one parameter.

    Args:
        param: fully qualified name, relative to the compiled object.
        size_bytes: bytes of the gathered value.
        action: "gather again", "keep" or "forward only".
        why: one clause for the report.
    """

    param: str
    size_bytes: int
    action: str
    why: str

    def __str__(self) -> str:
        return f"{self.param} {self.size_bytes} B: {self.action}; {self.why}"


def reshard_pass(graph: fx.Graph, reshard: bool | None = None) -> tuple[ReshardRecord, ...]:
    """Tag every gathered value of a joint graph for recompute in backward, or for saving.

    Gathers whose value nothing reads are removed. A parameter that only the forward reads is not gathered
    again just to recompute a result smaller than itself: that result is saved.

    Args:
        graph: joint graph, changed in place: `meta["recompute"]`, `meta["ac_graph_id"]`, and unread gathers.
        reshard: overrides the `reshard` of every tag; None follows the tags.

    Returns:
        One record per unsharded parameter, in graph order. Empty when the graph has no backward part.
    """
    in_backward = fxg.tangent_closure(graph)
    if not in_backward:
        _erase_unread_gathers(graph)
        return ()
    values = find_gathered_values(graph, in_backward, reshard)
    needed = _needed_in_backward(values, in_backward)
    _save_small_results(values, needed, work.nominal_size(graph))
    _mark_resharded(graph, values)
    _mark_kept(values)
    records = tuple(_records(values, needed))
    _erase_unread_gathers(graph)
    return records


def _erase_unread_gathers(graph: fx.Graph) -> None:
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users and fxg.find_tag(node) is not None:
            graph.erase_node(node)


def _needed_in_backward(values: dict[fx.Node, bool], in_backward: set[fx.Node]) -> set[fx.Node]:
    """The values that a gradient, or an activation recomputed for one, reads directly or through others."""

    def reads_in_backward(user: fx.Node) -> bool:
        return user in in_backward or user.meta.get("recompute") in _RECOMPUTED

    needed: set[fx.Node] = set()
    for node in reversed(values):
        if any(user in needed if user in values else reads_in_backward(user) for user in node.users):
            needed.add(node)
    return needed


def _save_small_results(values: dict[fx.Node, bool], needed: set[fx.Node], nominal: int) -> None:
    """Forbid recomputing results smaller than the parameter they would have to gather again.

    To the partitioner a resharded parameter is free in backward: it would look an embedding up again rather
    than save the result, at the price of gathering the whole table. Ranks decide alike: symbolic sizes have their
    nominal value, not this rank's.
    """
    gathered_bytes: dict[fx.Node, int] = {}
    for node, resharded in values.items():
        inherited = [gathered_bytes[source] for source in node.all_input_nodes if source in values]
        own = [work.moved_bytes([node], nominal)] if fxg.is_comm(node) or not inherited else []
        gathered_bytes[node] = max(inherited + own)
        if not resharded or node in needed:
            continue
        for user in node.users:
            outside = user not in values and user.op == "call_function"
            if outside and work.moved_bytes([user], nominal) < gathered_bytes[node]:
                user.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _mark_resharded(graph: fx.Graph, values: dict[fx.Node, bool]) -> None:
    """Tag all of them, needed in backward or not: reads of one parameter may be merged later, and the
    partitioner recomputes nothing that backward does not read."""
    region = 1 + max((node.meta.get("ac_graph_id", 0) for node in graph.nodes), default=0)
    for node, resharded in values.items():
        if resharded:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = region


def _mark_kept(values: dict[fx.Node, bool]) -> None:
    """Save what an unshard communicated, also inside checkpointed regions. Casts before it and derived
    values are left to the partitioner and to the region: they are cheap to have again."""
    communicated: set[fx.Node] = set()
    for node, resharded in values.items():
        if resharded or fxg.find_tag(node) is None:
            continue
        if fxg.is_comm(node) or not communicated.isdisjoint(node.all_input_nodes):
            communicated.add(node)
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _records(values: dict[fx.Node, bool], needed: set[fx.Node]) -> Iterable[ReshardRecord]:
    gathered = {fxg.param_fqn(node): node for node in values if fxg.find_tag(node) is not None}
    for param, node in gathered.items():
        if not values[node]:
            action, why = (
                "keep",
                "its module or the configuration asks for no reshard, or the graph overwrites it",
            )
        elif node in needed:
            action, why = "gather again", "a gradient reads it"
        else:
            action, why = "forward only", "no gradient reads it"
        yield ReshardRecord(param, fxg.size_bytes(node), action, why)
