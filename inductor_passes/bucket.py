"""Apply a plan to a graph: merge collectives into buckets and put every start and wait where the plan says.

It owns the rewriting and the emission order. It must not know how a plan was found, and it decides nothing.

A bucket of several members becomes, for W ranks and members whose per-rank parts have n0, n1, ... elements in sum n::

    gather    x0 (n0), x1 (n1)      -> cat (n) -> all_gather -> wait (W*n) -> view (W, n)
                                    -> slice (W, n0) -> reshape to x0's gathered shape, ...
    reduce    g0 (W*n0), g1 (W*n1)  -> view (W, n0), ... -> cat (W, n) on dim 1 -> reduce_scatter -> wait (1, n)
                                    -> slice (1, n0) -> reshape to g0's shard shape, ...
    all       g0 (n0), g1 (n1)      -> cat (n) -> all_reduce -> wait (n) -> slice (n0) -> reshape, ...

Every element travels between the same ranks, in the same dtype, and is reduced over the same ranks as before: values
are bitwise those of single collectives. No constant depends on the rank. `cat` fuses with the casts that feed it into
one kernel, without a staging copy.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from inductor_passes import _compat
from inductor_passes import graph as fxg
from inductor_passes.plan import ISSUE, Role
from inductor_passes.report import BUCKET_KEY, members_of
from inductor_passes.verify import VerificationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import fx

    from inductor_passes.plan import Plan
    from inductor_passes.program import Program

aten = torch.ops.aten
# Where a collective comes from: the tag, the modules, the source line. New nodes say the same.
_INHERITED_META = ("custom", "nn_module_stack", "fwd_nn_module_stack", "stack_trace")


def apply_plan(graph: fx.Graph, program: Program, plan: Plan) -> list[fx.Node]:
    """Rewrite a graph as a plan says.

    Nothing is erased, so that `verify.Snapshot` can undo it: merged starts and waits stay behind, unread.

    Args:
        graph: the graph that `program` was read from, changed in place.
        program: its regions and collectives.
        plan: a plan for `program.problem` that keeps the problem's rules.

    Returns:
        The nodes left unread, in an order in which they may be erased once the graph is verified.

    Raises:
        VerificationError: the graph needs a result before the plan has it.
    """
    merger = _Merger(graph)
    emission = _Emission(graph, (*program.starts, *program.waits, *itertools.chain(*program.regions)))
    unread: list[fx.Node] = []
    halves: list[tuple[fx.Node, list[fx.Node]]] = []
    for bucket in plan.buckets:
        starts = [program.starts[number] for number in bucket.members]
        waits = [program.waits[number] for number in bucket.members]
        if len(starts) == 1:
            halves.append((starts[0], waits))
            continue
        start, unpacking = merger.merge(starts, waits)
        start.meta[BUCKET_KEY] = tuple(name for member in starts for name in members_of(member))
        halves.append((start, unpacking))
        emission.hold([start, *unpacking])
        unread += [*waits, *starts]
    slot = 0
    for event in plan.events:
        for region in program.regions[slot : event.slot]:
            emission.release(region)
        slot = event.slot
        start, unpacking = halves[event.bucket]
        if event.action == ISSUE:
            emission.release([start])
        else:
            emission.release(unpacking)
            if program.problem.collectives[plan.buckets[event.bucket].members[0]].role is Role.REDUCE:
                emission.release_readers(unpacking)
    for region in program.regions[slot:]:
        emission.release(region)
    emission.finish(unread)
    return unread


def merge_waits(graph: fx.Graph) -> None:
    """Leave every collective with one wait.

    Two reads of one parameter, or two equal gradients, become one collective when the compiler removes common
    subexpressions, but their waits stay apart. A second wait is the same value. Where both are results of the graph
    the second is copied: a caller may change one of them in place.
    """
    for start in fxg.starts(graph):
        waits = [user for user in start.users if fxg.is_wait(user)]
        returned = sum(_is_returned(wait) for wait in waits)
        for extra in waits[1:]:
            value = waits[0]
            if returned > 1 and _is_returned(extra):
                with graph.inserting_before(extra):
                    value = graph.call_function(aten.clone.default, (waits[0],))
                value.meta.update(extra.meta)
            extra.replace_all_uses_with(value)
            graph.erase_node(extra)


def _is_returned(node: fx.Node) -> bool:
    """Whether a node, or a view of it, is a result of its graph."""
    return any(user.op == "output" or (fxg.is_view(user) and _is_returned(user)) for user in node.users)


def mark_planned(graph: fx.Graph) -> None:
    """Note on every collective of ours what it carries, which also says that a plan was applied."""
    for start in fxg.starts(graph):
        if fxg.find_tag(start) is not None:
            start.meta[BUCKET_KEY] = members_of(start)


def is_planned(graph: fx.Graph) -> bool:
    """Whether a plan was applied to the graph before, or there is nothing to plan."""
    return all(BUCKET_KEY in start.meta for start in fxg.starts(graph) if fxg.find_tag(start) is not None)


class _Emission:
    """Puts the nodes of a graph in a new order, one by one.

    A held node is placed when it is released. Any other node is placed just before the first node that reads it.
    """

    def __init__(self, graph: fx.Graph, held: Iterable[fx.Node]) -> None:
        self._graph = graph
        self._held = set(held)
        self._order = [node for node in graph.nodes if node.op in ("placeholder", "get_attr")]
        self._placed = set(self._order)

    def hold(self, nodes: Iterable[fx.Node]) -> None:
        """Add nodes that wait for their release."""
        self._held.update(nodes)

    def release(self, nodes: Iterable[fx.Node]) -> None:
        """Place nodes now, in this order, after whatever they read.

        Raises:
            VerificationError: one of them reads a node that is still held.
        """
        for node in nodes:
            stack = [node]
            while stack:
                current = stack[-1]
                missing = [source for source in current.all_input_nodes if source not in self._placed]
                for source in missing:
                    if source in self._held:
                        raise VerificationError(f"{node.name} needs {source.name} before the plan has it")
                if missing:
                    stack += missing
                    continue
                stack.pop()
                if current not in self._placed:
                    self._placed.add(current)
                    self._order.append(current)

    def release_readers(self, nodes: Iterable[fx.Node]) -> None:
        """Place all nodes that are not held and read nothing but placed ones, starting from these nodes' readers.

        What unpacks a reduced gradient is cheap and frees the buffer it came in.
        """
        pending = list(nodes)[::-1]
        while pending:
            for user in pending.pop().users:
                free = user not in self._held and user not in self._placed and user.op == "call_function"
                if free and all(source in self._placed for source in user.all_input_nodes):
                    self.release([user])
                    pending.append(user)

    def finish(self, unread: Sequence[fx.Node]) -> None:
        """Place what nobody asked for, and put the graph's nodes in the new order."""
        last = set(unread)
        rest = [node for node in self._graph.nodes if node.op != "output" and node not in last]
        self.release(node for node in rest if node not in self._placed)
        previous = self._order[0]
        for node in (*self._order[1:], *reversed(unread), self._graph.output_node()):
            if previous.next is not node:
                previous.append(node)
            previous = node


class _Merger:
    """Adds the nodes of merged collectives at the end of a graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph

    def merge(self, starts: Sequence[fx.Node], waits: Sequence[fx.Node]) -> tuple[fx.Node, list[fx.Node]]:
        """Merge collectives of one key. Readers of the old waits read the parts of the new one.

        Returns:
            The new start, and the new wait followed by the nodes that unpack it.
        """
        first, kind = starts[0], fxg.get_kind(starts[0])
        ranks = fxg.world_of(first)
        inputs = [fxg.input_of(start) for start in starts]
        gathers, scatters = kind == fxg.ALL_GATHER, kind == fxg.REDUCE_SCATTER
        with self._graph.inserting_before(self._graph.output_node()):
            flat = (ranks, -1) if scatters else (-1,)
            rows = [self._call(first, aten.reshape.default, x, flat) for x in inputs]
            packed = self._call(first, aten.cat.default, rows, 1 if scatters else 0)
            arguments = [packed if argument is inputs[0] else argument for argument in first.args]
            start = self._call(first, first.target, *arguments, **first.kwargs)
            wait = self._call(first, torch.ops._c10d_functional.wait_tensor.default, start)
            table = self._call(first, aten.reshape.default, wait, (ranks if gathers else 1, -1))
            unpacking = [wait, table]
            end = 0
            for member, old in zip(starts, waits, strict=True):
                value = fxg.value_of(old)
                begin, end = end, end + value.numel() // (ranks if gathers else 1)
                part = self._call(member, aten.slice.Tensor, table, 1, begin, end)
                result = self._call(member, aten.reshape.default, part, tuple(value.shape))
                unpacking += [part, result]
                old.replace_all_uses_with(result)
        return start, unpacking

    def _call(self, origin: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self._graph.call_function(target, args, kwargs)
        node.meta.update({key: origin.meta[key] for key in _INHERITED_META if key in origin.meta})
        node.meta["val"] = _compat.fake_result(node)
        return node
