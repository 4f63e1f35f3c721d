"""Read off a joint graph what eager mode would run: one kernel per operator, forward, then backward.

Owns the walk over the joint graph and eager mode's rules of what is kept. Must not know how collectives are scheduled:
each stands alone where its result is needed, for `planner.peers` to plan.

What is modelled: each operator as the model's author wrote it is a kernel that reads its inputs and writes its outputs
(what it was decomposed into counts as the one operator). A tensor lives from the operator that makes it to the last one
that reads it, in forward or backward. Inside a checkpointed region it is dropped after forward, unless the policy
caches it, and made again where backward first needs the region: everything up to the last tensor backward reads, as
`torch.utils.checkpoint` does. What the policy caches is held until then, whether backward reads it or not.

What is not modelled: the device waiting for the host, references that Python holds longer than needed, and operators
that differ by device: the graph was traced for the CPU, where torch has no fused RMSNorm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from inductor_passes import graph as fxg
from inductor_passes import work
from inductor_passes._compat import CheckpointPolicy
from inductor_passes.plan import Role
from inductor_passes.planners import plan_collectives
from inductor_passes.program import make_problem, role_of
from inductor_passes.windows import Window
from simplefsdp.explainer.facts import BEFORE, GraphFacts, Memory, Region, Traffic, Value, last_use_of_sent
from simplefsdp.explainer.read import kept_share, memory_owners, region_of_kernel

if TYPE_CHECKING:
    from torch import fx

    from inductor_passes.costs.model import CostModel

_CACHED = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
_NO_REGION = -1


@dataclasses.dataclass(eq=False)
class _Kernel:
    """One operator of the model.

    Args:
        nodes: the node it is in the graph, or those it was decomposed into.
        region: checkpointed region it was traced in, or whose gradient it computes; `_NO_REGION` outside of any.
        number: what autograd numbers an operator and its gradient by; None where there is none.
        cached: whether the region's policy keeps its result.
        in_forward: whether it is part of forward.
        made: nodes whose results are tensors of their own for others to read.
    """

    nodes: list[fx.Node]
    region: int
    number: int | None
    cached: bool
    in_forward: bool
    made: tuple[fx.Node, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Step:
    """A kernel at its place in forward or backward; `again` where backward repeats a kernel of forward."""

    kernel: _Kernel
    again: bool = False


@dataclasses.dataclass(frozen=True)
class _Read:
    """A step reads a tensor; `remade` when it is the copy that a checkpointed region made again.

    `at` is the last step of the gradient the reader belongs to: autograd lets go of what a gradient reads only when all
    of it is computed.
    """

    at: int
    memory: fx.Node
    remade: bool


def read_eager(
    joint: fx.Graph, cost: CostModel, ranks_per_node: int, blocks: Sequence[str] = ()
) -> tuple[GraphFacts, GraphFacts] | None:
    """Facts of forward and backward in eager mode.

    Args:
        joint: a joint graph with fake tensors and unshard tags, before the partitioner and the passes.
        cost: prices of compute and communication.
        ranks_per_node: ranks that share a node, in the whole job.
        blocks: as in `PassConfig.blocks`.

    Returns:
        Forward and backward; None if there is no backward, or communication of the model's own.
    """
    if any(role_of(start) is Role.FIXED for start in fxg.starts(joint)):
        return None
    reader = _Reader(joint)
    if not reader.steps["backward"]:
        return None
    forward, backward = (reader.facts(kind, cost, ranks_per_node, blocks) for kind in reader.steps)
    return forward, backward


class _Reader:
    def __init__(self, joint: fx.Graph) -> None:
        self._joint = joint
        self._nominal = work.nominal_size(joint)
        self._owner = memory_owners(joint)
        self._gather_of = _gathered_parameters(joint)
        kernels = _kernels(joint)
        self._maker = {node: kernel for kernel in kernels for node in kernel.nodes}
        self._outputs = {self._owner[node] for node in joint.output_node().all_input_nodes}
        self._find_made(kernels)
        forward = [kernel for kernel in kernels if kernel.in_forward]
        backward = [kernel for kernel in kernels if not kernel.in_forward]
        self.steps = {
            "forward": [_Step(kernel) for kernel in forward],
            "backward": self._with_repetition(forward, backward),
        }
        self._kept = self._kept_for_backward()
        self._priced: dict[_Kernel, tuple[Region, int]] = {}  # what backward repeats is priced once

    def _find_made(self, kernels: Sequence[_Kernel]) -> None:
        read = {memory for kernel in kernels for memory in self._inputs(kernel)} | self._outputs
        read |= {
            self._owner[_gradient_of(start)] for start in fxg.starts(self._joint) if _is_reduction(start)
        }
        for kernel in kernels:
            kernel.made = tuple(node for node in kernel.nodes if node in read)

    def _inputs(self, kernel: _Kernel) -> Iterator[fx.Node]:
        """The memory that a kernel reads and does not make."""
        for node in kernel.nodes:
            for source in node.all_input_nodes:
                owner = self._owner[source]
                if self._maker.get(owner) is not kernel:
                    yield owner

    def _reads(self, kind: str) -> Iterator[_Read]:
        steps = self.steps[kind]
        ends = list(range(len(steps)))
        for at in reversed(range(len(steps) - 1)):
            if (
                not steps[at].kernel.in_forward
                and steps[at].kernel.number == steps[at + 1].kernel.number is not None
            ):
                ends[at] = ends[at + 1]
        for at, step in zip(ends, steps, strict=True):
            for memory in self._inputs(step.kernel):
                maker = self._maker.get(memory)
                if maker is not None:
                    same = (
                        maker.in_forward and maker.region != _NO_REGION and maker.region == step.kernel.region
                    )
                    yield _Read(at, memory, kind == "backward" and same and not maker.cached)

    def _with_repetition(self, forward: Sequence[_Kernel], backward: Sequence[_Kernel]) -> list[_Step]:
        """Backward, with the kernels of each checkpointed region repeated where it is first needed."""
        number_of = {id(kernel): number for number, kernel in enumerate(forward)}
        needed: dict[int, int] = {}  # region -> last kernel of forward in it whose result backward reads
        for kernel in backward:
            for memory in self._inputs(kernel):
                maker = self._maker.get(memory)
                if maker is not None and maker.in_forward and maker.region == kernel.region != _NO_REGION:
                    needed[maker.region] = max(needed.get(maker.region, 0), number_of[id(maker)])
        steps: list[_Step] = []
        for kernel in backward:
            last = needed.pop(kernel.region, None)
            if last is not None:
                region = [item for item in forward[: last + 1] if item.region == kernel.region]
                steps += [_Step(item, again=True) for item in region if not item.cached]
            steps.append(_Step(kernel))
        return steps

    def _kept_for_backward(self) -> dict[fx.Node, int]:
        """What forward keeps for backward, with the last step of backward that needs it."""
        kept = {
            read.memory: read.at
            for read in self._reads("backward")
            if self._maker[read.memory].in_forward and not read.remade
        }
        self._unread: set[fx.Node] = set()
        over = {step.kernel.region: at for at, step in enumerate(self.steps["backward"]) if step.again}
        for step in self.steps["forward"]:
            if step.kernel.cached and step.kernel.region in over:
                for memory in step.kernel.made:
                    if memory not in kept:
                        self._unread.add(memory)
                    kept[memory] = max(kept.get(memory, 0), over[step.kernel.region])
        return kept

    def facts(self, kind: str, cost: CostModel, ranks_per_node: int, blocks: Sequence[str]) -> GraphFacts:
        """The facts of forward or backward."""
        steps = self.steps[kind]
        end = len(steps)
        used = self._uses(kind)
        ready = self._reductions(kind)
        traced = {start: first for start, (first, _) in used.items()}
        traced |= {start: slot for start, (slot, _) in ready.items()}
        starts = sorted(traced, key=traced.__getitem__)
        number_of_start = {start: number for number, start in enumerate(starts)}
        sent_on = {start: before for start in ready if (before := _reduced_before(start)) is not None}
        windows = {start: Window(0, first, first, ()) for start, (first, _) in used.items()}
        for start, (slot, _) in ready.items():
            depends_on = (number_of_start[sent_on[start]],) if start in sent_on else ()
            windows[start] = Window(slot, end, end, depends_on)
        for step in steps:
            if step.kernel not in self._priced:
                nodes = step.kernel.nodes
                time_ns = work.time_ns(nodes, self._nominal, cost)
                self._priced[step.kernel] = (region_of_kernel(nodes, self._nominal), time_ns)
        problem = make_problem(
            region_ns=[self._priced[step.kernel][1] for step in steps],
            starts=starts,
            windows=[windows[start] for start in starts],
            cost=cost,
            ranks_per_node=ranks_per_node,
            blocks=blocks,
        )
        regions = tuple(self._priced[step.kernel][0] for step in steps)
        tensors = self._tensors(kind, {memory for _, memory in ready.values()}, regions)
        number_of = {memory: number for number, (memory, value) in enumerate(tensors) if value.born != BEFORE}
        last_use = {start: last for start, (_, last) in used.items()}
        last_use |= {before: last_use_of_sent(ready[start][0], end) for start, before in sent_on.items()}
        traffic = tuple(
            Traffic(
                sent_bytes=work.moved_bytes([fxg.input_of(start)], self._nominal),
                received_bytes=work.moved_bytes([start], self._nominal),
                source=number_of[ready[start][1]] if start in ready and start not in sent_on else None,
                copied=start not in sent_on,
                last_use=last_use.get(start, end),
                kept_share=kept_share(wait)
                if _is_reduction(start) and (wait := fxg.find_wait(start))
                else 1.0,
            )
            for start in starts
        )
        values = tuple(value for _, value in tensors)
        return GraphFacts(kind, regions, values, traffic, problem, plan_collectives(problem, "none"))

    def _uses(self, kind: str) -> dict[fx.Node, tuple[int, int]]:
        """First and last step that read each gathered parameter, by its gather."""
        used: dict[fx.Node, tuple[int, int]] = {}
        for at, step in enumerate(self.steps[kind]):
            for memory in self._inputs(step.kernel):
                start = self._gather_of.get(memory)
                if start is not None:
                    used[start] = (used.get(start, (at, at))[0], at)
        return used

    def _reductions(self, kind: str) -> dict[fx.Node, tuple[int, fx.Node]]:
        """First slot where each reduction can start, and the gradient it sends."""
        made_at = {
            node: at
            for at, step in enumerate(self.steps[kind])
            if not step.again
            for node in step.kernel.nodes
        }
        out = {}
        for start in filter(_is_reduction, fxg.starts(self._joint)):
            memory = self._owner[_gradient_of(start)]
            if memory in made_at and not self._maker[memory].in_forward:
                out[start] = (made_at[memory] + 1, memory)
        return out

    def _tensors(
        self, kind: str, gradients: set[fx.Node], regions: Sequence[Region]
    ) -> list[tuple[fx.Node, Value]]:
        """Tensors of forward or backward, those that were there before first, in the order of their end."""
        end = len(regions)
        last: dict[tuple[fx.Node, bool], int] = {}
        for read in self._reads(kind):
            last[read.memory, read.remade] = read.at
        found: list[tuple[fx.Node, int, int]] = []
        if kind == "backward":
            found += [(memory, BEFORE, dies) for memory, dies in self._kept.items()]
        for at, step in enumerate(self.steps[kind]):
            for memory in step.kernel.made:
                outlives = memory in self._outputs or (kind == "forward" and memory in self._kept)
                dies = end if outlives and not step.again else max(at, last.get((memory, step.again), at))
                found.append((memory, at, dies))
        found.sort(key=lambda item: (item[1], item[2] if item[1] == BEFORE else 0))
        out = []
        for memory, at, dies in found:
            name = regions[min(at if at != BEFORE else dies, end - 1)].module
            use = Memory.GRADIENTS if memory in gradients else Memory.ACTIVATIONS
            unread = memory in self._unread and (kind == "forward" or at == BEFORE)
            size_bytes = work.moved_bytes([memory], self._nominal)
            out.append((memory, Value(name, size_bytes, use, at, dies, unread)))
        return out


def _kernels(joint: fx.Graph) -> list[_Kernel]:
    """The operators of the model in order; communication and what prepares it are left out."""
    closure = fxg.tangent_closure(joint)
    region_of: dict[int, int] = {}  # by the number that autograd gives an operator and its gradient
    kernels: list[_Kernel] = []
    kernel_of: dict[fx.Node, _Kernel] = {}
    in_forward, open_key = True, None
    for node in joint.nodes:
        if node.op != "call_function" or fxg.find_tag(node) is not None or fxg.is_comm(node):
            continue
        in_forward = in_forward and node not in closure
        if fxg.is_getitem(node) and node.all_input_nodes[0] in kernel_of:
            kernel_of[node] = kernel_of[node.all_input_nodes[0]]
            kernel_of[node].nodes.append(node)
            continue
        if fxg.is_view(node) or not fxg.is_tensor(node):
            continue
        number, original = node.meta.get("seq_nr"), node.meta.get("original_aten")
        # By name: a copied graph holds copies of the operators.
        key = None if original is None or str(original) == str(node.target) else (str(original), number)
        if key is not None and key == open_key:
            kernels[-1].nodes.append(node)
        else:
            region = (
                node.meta.get("ac_graph_id", _NO_REGION) if in_forward else region_of.get(number, _NO_REGION)
            )
            kernels.append(_Kernel([node], region, number, False, in_forward))
            if in_forward and number is not None:
                region_of[number] = region
        open_key = key
        kernel_of[node] = kernels[-1]
        if in_forward and kernels[-1].region != _NO_REGION:
            kernels[-1].cached |= node.meta.get("recompute") in _CACHED
    return kernels


def _gathered_parameters(joint: fx.Graph) -> dict[fx.Node, fx.Node]:
    """The gather behind every value that is a whole parameter."""
    out: dict[fx.Node, fx.Node] = {}
    for node in joint.nodes:
        if fxg.find_tag(node) is not None:
            if fxg.find_kind(node) == fxg.ALL_GATHER:
                out[node] = node
            else:
                out.update((node, out[source]) for source in node.all_input_nodes if source in out)
    return out


def _is_reduction(start: fx.Node) -> bool:
    return role_of(start) is Role.REDUCE


def _reduced_before(start: fx.Node) -> fx.Node | None:
    """The reduction whose result a reduction sends on, as between replicas in hybrid sharding."""
    node = fxg.input_of(start)
    while fxg.find_tag(node) is not None:
        if fxg.is_start(node):
            return node
        node = node.all_input_nodes[0]
    return None


def _gradient_of(start: fx.Node) -> fx.Node:
    """The gradient a reduction sends, before its cast and padding."""
    node = fxg.input_of(start)
    while fxg.find_tag(node) is not None:
        node = node.all_input_nodes[0]
    return node
