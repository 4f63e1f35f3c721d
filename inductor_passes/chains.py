"""Recognise what a gathered parameter reaches in a joint graph before anything else joins in.

It owns the shape of an unshard chain. It must not know what is done with one, and it changes no graph.

The parametrization traces an unshard as one of these (F shards, R replicas; parts in brackets may be
missing)::

    FSDP, HSDP     shard -> [cast] -> all_gather -> wait -> [slice, view, cat: undo padding and dim order]
    -> full tensor-parallel shard: the same, twice if the parameter is sharded over two mesh dims DDP
    parameter -> [cast] -> full

and the model carries on with operators that read nothing else, as `weight.t().contiguous()` or `w1 + w2`::

    full -> [transpose, cast, clone, view, cat, add, ...] -> consumer(activation, ...)

All of these are gathered values: whoever holds one of them for backward holds a whole parameter. The chain
ends at the first operator that reads anything else (an activation, a buffer, a gradient) or draws random
numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from inductor_passes import graph as fxg

if TYPE_CHECKING:
    from torch import fx


def find_gathered_values(
    graph: fx.Graph, in_backward: set[fx.Node], reshard: bool | None = None
) -> dict[fx.Node, bool]:
    """Collect every value that derives only from unsharded parameters.

    A value read from both kinds of parameters counts as resharded: keeping it would keep a parameter that
    the user wants freed. A parameter that the graph itself overwrites counts as kept: gathered again, it
    would have its new value.

    Args:
        graph: a joint graph with unshard tags.
        in_backward: nodes that depend on a gradient (`graph.tangent_closure`); none of them is a gathered
            value.
        reshard: overrides the `reshard` of every tag; None follows the tags.

    Returns:
        Each value, in graph order, with True if it is freed after forward and False if it is kept for
        backward. Time is linear in nodes and edges.
    """
    overwritten = {node.args[0] for node in graph.nodes if node.target is torch.ops.aten.copy_.default}
    values: dict[fx.Node, bool] = {}
    constants: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "get_attr":
            constants.add(node)
        if node in in_backward or not _is_operator(node) or not fxg.is_tensor(node):
            continue
        sources = [source for source in node.all_input_nodes if fxg.is_tensor(source)]
        inherited = [values[source] for source in sources if source in values]
        tag = fxg.find_tag(node)
        if tag is not None:
            flag = tag.reshard if reshard is None else reshard
            values[node] = (any(inherited) if inherited else flag) and overwritten.isdisjoint(sources)
        elif fxg.is_random(node) or fxg.is_barrier(node):
            continue
        elif all(source in values or source in constants for source in sources):
            if inherited:
                values[node] = any(inherited)
            else:
                constants.add(node)
    return values


def _is_operator(node: fx.Node) -> bool:
    """Whether the node calls a plain operator. Calls of whole subgraphs are never part of a chain."""
    return fxg.is_getitem(node) or fxg.operator_name(node) != ""
