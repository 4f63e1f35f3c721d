"""Apply a plan to a graph: merge collectives into buckets and put every start and wait where the plan says.

It owns the rewriting and the emission order. It must not know how a plan was found, and it decides nothing.

A bucket of several members becomes, for W ranks and members whose per-rank parts have n0, n1, ... elements in sum n::

    gather    x0 (n0), x1 (n1)      -> pack (1, n) -> all_gather -> wait (W, n) -> unpack (W, n0), (W, n1), ...
                                    -> reshape to x0's gathered shape, ...
    reduce    g0 (W*n0), g1 (W*n1)  -> pack (W, n) -> reduce_scatter -> wait (1, n) -> slice (1, n0), ...
                                    -> reshape to g0's shard shape, ...
    all       g0 (n0), g1 (n1)      -> pack (1, n) -> all_reduce -> wait (1, n) -> slice (1, n0) -> reshape, ...

Every element travels between the same ranks, in the same dtype, and is reduced over the same ranks as before: values
are bitwise those of single collectives. No constant depends on the rank. `pack` reads what a member was before it was
cast and laid out for sending, so that nothing is staged.

Members keep the order of the graph, not that in which the parameters were registered. The graph does not tell the
latter, and does not need to: the program is the same on every rank, so each finds the same order, and where in a
message a value travels changes no bit of it.
"""

from __future__ import annotations

import itertools
import operator
from typing import TYPE_CHECKING, Any

import torch

from inductor_passes import _compat, bucket_ops
from inductor_passes import graph as fxg
from inductor_passes.emission import Emission
from inductor_passes.plan import ISSUE, Role
from inductor_passes.report import BUCKET_KEY, members_of

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
    inputs = [node for node in graph.nodes if node.op in ("placeholder", "get_attr")]
    emission = Emission(
        lambda node: node.all_input_nodes,
        held=(*program.starts, *program.waits, *itertools.chain(*program.regions), graph.output_node()),
        placed=inputs,
    )
    unread: list[fx.Node] = []
    halves: list[tuple[fx.Node, list[fx.Node]]] = []
    for bucket in plan.buckets:
        starts = [program.starts[number] for number in bucket.members]
        waits = [program.waits[number] for number in bucket.members]
        if len(starts) == 1:
            halves.append((starts[0], waits))
            continue
        start, unpacking, skipped = merger.merge(starts, waits)
        start.meta[BUCKET_KEY] = tuple(name for member in starts for name in members_of(member))
        halves.append((start, unpacking))
        emission.hold([start, *unpacking])
        unread += [*waits, *starts, *skipped]
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
                emission.release_readers(unpacking, lambda node: node.users)
    for region in program.regions[slot:]:
        emission.release(region)
    last = {*unread, graph.output_node()}
    order = emission.finish([node for node in graph.nodes if node not in last])
    put_in_order(
        graph, [*(node for node in order if node not in last), *reversed(unread), graph.output_node()]
    )
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


def put_in_order(graph: fx.Graph, order: Iterable[fx.Node]) -> None:
    """Move the nodes of a graph into an order that holds all of them, inputs first, output last."""
    previous: fx.Node | None = None
    for node in order:
        if previous is not None and previous.next is not node:
            previous.append(node)
        previous = node


class _Merger:
    """Adds the nodes of merged collectives at the end of a graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph

    def merge(
        self, starts: Sequence[fx.Node], waits: Sequence[fx.Node]
    ) -> tuple[fx.Node, list[fx.Node], list[fx.Node]]:
        """Merge collectives of one key. Readers of the old waits read the parts of the new one.

        Returns:
            The new start, the new wait followed by the nodes that unpack it, and what prepared members for sending and
            is not needed any more, readers first.
        """
        first, kind = starts[0], fxg.get_kind(starts[0])
        ranks, gathers = fxg.world_of(first), kind == fxg.ALL_GATHER
        rows = ranks if kind == fxg.REDUCE_SCATTER else 1
        sent = [fxg.input_of(start) for start in starts]
        parts, skipped = [], []
        for node in sent:
            part, between = _source_of(node, rows)
            parts.append(part)
            skipped += between
        values = [fxg.value_of(wait) for wait in waits]
        columns = [value.numel() // (ranks if gathers else 1) for value in values]
        with self._graph.inserting_before(self._graph.output_node()):
            packed = self._call(first, bucket_ops.pack, parts, rows, fxg.value_of(sent[0]).dtype)
            arguments = [packed if argument is sent[0] else argument for argument in first.args]
            start = self._call(first, first.target, *arguments, **first.kwargs)
            wait = self._call(first, torch.ops._c10d_functional.wait_tensor.default, start)
            unpacking = [wait]
            if gathers:
                unpacking.append(self._call(first, bucket_ops.unpack, wait, columns))
            for number, (member, old, end) in enumerate(
                zip(starts, waits, itertools.accumulate(columns), strict=True)
            ):
                if gathers:
                    part = self._call(member, operator.getitem, unpacking[1], number)
                else:
                    part = self._call(member, aten.slice.Tensor, wait, 1, end - columns[number], end)
                result = self._call(member, aten.reshape.default, part, tuple(values[number].shape))
                unpacking += [part, result]
                old.replace_all_uses_with(result)
        return start, unpacking, skipped

    def _call(self, origin: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self._graph.call_function(target, args, kwargs)
        node.meta.update({key: origin.meta[key] for key in _INHERITED_META if key in origin.meta})
        node.meta["val"] = _compat.fake_result(node)
        return node


_PREPARATIONS = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.clone.default,
)


def _source_of(sent: fx.Node, rows: int) -> tuple[fx.Node, list[fx.Node]]:
    """What a collective sends, before it was cast and laid out for that.

    Args:
        sent: the input of a collective.
        rows: how many parts it is cut into along its first dimension.

    Returns:
        A node with the same elements in the same order, whose first dimension `rows` divides too; at most one cast lies
        between the two, and nothing overwrites it. And all between, `sent` first, which nothing else reads.
    """
    best, between = sent, []
    node, passed, cast = sent, [], False
    while len(node.users) == 1 and (node.target in _PREPARATIONS or (fxg.is_cast(node) and not cast)):
        source, *sizes = node.all_input_nodes
        if sizes or any(map(fxg.is_barrier, source.users)):
            break
        passed.append(node)
        cast = cast or fxg.is_cast(node)
        node = source
        shape = fxg.value_of(node).shape
        if rows == 1 or (shape and shape[0] % rows == 0):
            best, between = node, passed[:]
    return best, between
