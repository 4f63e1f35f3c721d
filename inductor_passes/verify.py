"""Invariants of a graph before and after a pass, and the way back when one does not hold.

It owns the checks. It must not know how a pass reaches its result, so that the checks cannot share its
mistakes.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from inductor_passes import graph as fxg

if TYPE_CHECKING:
    from torch import fx

    from inductor_passes.plan import GroupKey


class VerificationError(Exception):
    """A pass left a graph that breaks an invariant; the text says which and where."""


class Snapshot:
    """What a graph communicated and computed before a pass, and how to get back there.

    A pass that may fail must not erase a node before it is verified: it adds nodes, redirects uses and
    moves nodes, all of which `restore` undoes.

    Args:
        graph: the graph about to be changed.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._nodes = [(node, node.args, node.kwargs) for node in graph.nodes]
        self.traffic = traffic(graph)
        self.outputs = len(graph.output_node().all_input_nodes)

    def restore(self) -> None:
        """Bring back arguments and order of every node, and remove nodes that were added."""
        known = {node for node, _, _ in self._nodes}
        for node, args, kwargs in self._nodes:
            if node.args != args or node.kwargs != kwargs:
                node.args, node.kwargs = args, kwargs
        for node in reversed(self._graph.nodes):
            if node not in known:
                self._graph.erase_node(node)
        previous = self._nodes[0][0]
        for node, _, _ in self._nodes[1:]:
            if previous.next is not node:
                previous.append(node)
            previous = node


def traffic(graph: fx.Graph) -> Counter[GroupKey]:
    """Bytes of the unsharded side of all collectives that something reads, per group key."""
    total: Counter[GroupKey] = Counter()
    for start in fxg.starts(graph):
        wait = fxg.find_wait(start)
        if start.users and (wait is None or wait.users):
            total[fxg.group_key(start)] += fxg.full_bytes(start)
    return total


def check_graph(graph: fx.Graph, before: Snapshot) -> None:
    """Check what must hold after any pass that moves or merges collectives.

    Raises:
        VerificationError: the graph is malformed, a node stands before something it reads, a collective is
            never
            awaited or read unawaited, or the bytes communicated under some group key changed.
    """
    check_order(graph)
    try:
        graph.lint()
    except Exception as error:
        raise VerificationError(f"the graph is malformed: {error}") from error
    check_waits(graph)
    after = traffic(graph)
    if after != before.traffic:
        changed = sorted(key for key in after | before.traffic if after[key] != before.traffic[key])
        detail = ", ".join(f"{key}: {before.traffic[key]} -> {after[key]} B" for key in changed)
        raise VerificationError(f"the bytes communicated changed: {detail}")
    if len(graph.output_node().all_input_nodes) != before.outputs:
        raise VerificationError("the number of distinct graph outputs changed")


def check_order(graph: fx.Graph) -> None:
    """Check that every node stands after everything it reads.

    Raises:
        VerificationError: names the first node that does not.
    """
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        for source in node.all_input_nodes:
            if source not in seen:
                raise VerificationError(f"{node.name} stands before {source.name}, which it reads")
        seen.add(node)


def check_waits(graph: fx.Graph) -> None:
    """Check that each collective has exactly one wait and that nothing else reads its unfinished result.

    Raises:
        VerificationError: names the collective.
    """
    for start in fxg.starts(graph):
        if start.users and fxg.find_wait(start) is None:
            readers = ", ".join(user.name for user in start.users)
            raise VerificationError(f"{start.name} must be read by one wait only, it is read by {readers}")


def check_same_order(before: list[Any], after: list[Any]) -> None:
    """Check that a sequence is a permutation of another.

    Raises:
        VerificationError: something is missing, new or repeated.
    """
    if len(before) != len(after) or {id(item) for item in before} != {id(item) for item in after}:
        raise VerificationError(f"not a permutation: {len(before)} items became {len(after)}")
