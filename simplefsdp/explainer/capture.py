"""Run the passes on the graphs of a model and keep what they saw and decided; nothing computes.

Owns the imitation of a training compilation: joint graph, partition, forward graph, backward graph. The graphs come out
as fake tensors would have it and are never executed.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from inductor_passes._compat import aot_autograd_backend, is_tangent, min_cut_partition
from inductor_passes.bucket import merge_waits
from inductor_passes.costs.model import ProfileCostModel
from inductor_passes.graph_plan import GraphPlan, plan_graph
from inductor_passes.hooks import JointHook, PostGradHook
from inductor_passes.setups import choose_setup
from simplefsdp import _compat
from simplefsdp.explainer.eager import read_eager
from simplefsdp.explainer.facts import GraphFacts, Memory
from simplefsdp.explainer.lines import graph_lines
from simplefsdp.explainer.read import Saved, read_contents, saved_values
from simplefsdp.explainer.runs import Recorder, Run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import fx

    from inductor_passes.setups import Setup


GRAPH_BREAK, RECOMPILE = "graph break", "recompile"
_JOINT = "simplefsdp_joint"
"""In `meta` of the output of a forward and a backward graph: the number of the joint graph both are of."""


@dataclasses.dataclass(frozen=True)
class Dump:
    """A graph before and after one pass, as normalised lines.

    Args:
        number: which of the model's graphs, from 0; more than one only after graph breaks.
        name: "reshard" or "bucket".
        graph: "joint", "forward", "backward" or "inference".
    """

    number: int
    name: str
    graph: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    failure: str = ""


@dataclasses.dataclass(frozen=True)
class Interruption:
    """A place where compilation did not go through in one piece.

    Args:
        kind: `GRAPH_BREAK` or `RECOMPILE`.
        place: "file.py:12".
        reason: what Dynamo says.
    """

    kind: str
    place: str
    reason: str


class Capture:
    """A `torch.compile` backend that runs the passes and executes nothing.

    Args:
        setups: what the passes may choose from.
        pinned: use the last setup for every tagged graph.
        eager: also read what eager mode would run.
        dumps: keep each graph before and after each pass; False leaves graphs as they are once they are planned.

    Attributes:
        graphs: facts of every graph, in order of compilation; of one without tags, that of a piece without parameters
            for one, as traced.
        runs: which of them ran, in order; a model that is called twice adds to them.
        eager: forward and backward of eager mode for every joint graph, where asked for and where it can be read.
        dumps: each graph before and after each pass.
        interruptions: graph breaks, in order.
        profiles: names of the hardware profiles that planned, each once; none where no graph reads a sharded parameter.
        compiled: number of graphs Dynamo handed over.
    """

    def __init__(
        self, setups: tuple[Setup, ...], pinned: bool = False, eager: bool = False, dumps: bool = True
    ) -> None:
        self._setups, self._pinned = setups, pinned
        self._joint = JointHook(setups, pinned)
        self._joints = 0
        self._forward: dict[int, tuple[int, dict[str, Saved]]] = {}  # of each joint graph
        self._recorder = Recorder()
        self._read_eager, self._keep_dumps = eager, dumps
        self.graphs: list[GraphFacts] = []
        self.eager: list[GraphFacts] = []
        self.dumps: list[Dump] = []
        self.interruptions: list[Interruption] = []
        self.profiles: dict[str, None] = {}
        self.compiled = 0
        self._backend = aot_autograd_backend(
            fw_compiler=self._compiler("forward"),
            bw_compiler=self._compiler("backward"),
            inference_compiler=self._compiler("inference"),
            partition_fn=self._partition,
            decompose=True,
        )

    def __call__(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.compiled += 1
        found = _compat.find_graph_break(gm)
        if found is not None:
            interruption = Interruption(GRAPH_BREAK, found[1], found[0])
            if interruption not in self.interruptions:
                self.interruptions.append(interruption)
        compiled: Callable[..., Any] = self._backend(gm, inputs)
        return compiled

    def _partition(self, joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        setup = choose_setup(self._setups, joint.graph, pinned=self._pinned)
        if self._read_eager and setup is not None:
            profile = setup.profile
            found = read_eager(
                joint.graph, ProfileCostModel(profile), profile.value("ranks_per_node"), setup.config.blocks
            )
            self.eager += found or ()
        self._run("joint", self._joint, joint.graph)
        parts = min_cut_partition(joint, inputs, **kwargs)
        for part in parts:
            part.graph.output_node().meta[_JOINT] = self._joints
        self._joints += 1
        return parts

    def _compiler(self, kind: str) -> Callable[..., Any]:
        def compile_graph(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
            if kind == "inference":
                self._run("joint", self._joint, gm.graph)
            joint, number = gm.graph.output_node().meta.get(_JOINT, -1), len(self.graphs)
            if kind == "backward":
                forward, made = self._forward.get(joint, (None, {}))
                self._plan(kind, gm.graph, _starts_of(gm.graph) | made)
                return _without_computing(gm, lambda: self._recorder.backward(number, forward))
            if kind == "forward":
                self._forward[joint] = number, saved_values(gm.graph)
            self._plan(kind, gm.graph, None)
            return _without_computing(gm, lambda: self._recorder.forward(number))

        return compile_graph

    def _plan(self, kind: str, graph: fx.Graph, saved: Mapping[str, Saved] | None) -> None:
        setup = choose_setup(self._setups, graph, pinned=self._pinned)
        merge_waits(graph)
        if setup is None:  # nothing in it asks for passes: it takes its time, and its collectives stay
            self.graphs.append(_as_traced(kind, graph, self._setups[-1], saved))
            return
        self.profiles[setup.profile.name] = None
        if not self._keep_dumps:  # what the pass would make of the graph nobody sees, and nothing runs it
            self.graphs.append(_facts(kind, graph, plan_graph(graph, setup), saved))
            return
        read: list[GraphFacts] = []
        hook = PostGradHook(
            self._setups, self._pinned, lambda found: read.append(_facts(kind, graph, found, saved))
        )
        failure = self._run(kind, hook, graph)
        if failure or not read:  # the pass failed, or there is nothing to plan
            read = [dataclasses.replace(_as_traced(kind, graph, setup, saved), failure=failure)]
        self.graphs += read

    @property
    def runs(self) -> tuple[Run, ...]:
        """See the class."""
        return tuple(self._recorder.runs)

    def _run(self, kind: str, hook: JointHook | PostGradHook, graph: fx.Graph) -> str:
        """Run a pass, and keep the graph before and after; returns why the pass failed, or ""."""
        known = len(hook.records)
        before = graph_lines(graph) if self._keep_dumps else ()
        hook(graph)
        if len(hook.records) == known:
            return ""
        record = hook.records[-1]
        if self._keep_dumps:
            number = sum(dump.graph == kind for dump in self.dumps)
            self.dumps.append(Dump(number, record.name, kind, before, graph_lines(graph), record.failure))
        return record.failure


def _starts_of(graph: fx.Graph) -> dict[str, Saved]:
    """The gradients that a backward graph starts from."""
    inputs = filter(is_tangent, graph.find_nodes(op="placeholder"))
    return {node.name: Saved(Memory.ACTIVATIONS, node.name) for node in inputs}


def _as_traced(kind: str, graph: fx.Graph, setup: Setup, saved: Mapping[str, Saved] | None) -> GraphFacts:
    """Facts of a graph that no pass changes."""
    config = dataclasses.replace(setup.config, planner="none", move_compute=False)
    return _facts(kind, graph, plan_graph(graph, dataclasses.replace(setup, config=config)), saved)


def _facts(kind: str, graph: fx.Graph, found: GraphPlan, saved: Mapping[str, Saved] | None) -> GraphFacts:
    """What explaining needs to know of a planned graph; it is in the order of its plan, and not rewritten."""
    contents = read_contents(graph, found.program, saved)
    return GraphFacts(
        kind,
        contents.regions,
        contents.values,
        contents.traffic,
        found.program.problem,
        found.plan,
        motion="" if found.motion is None else str(found.motion),
    )


def _without_computing(gm: fx.GraphModule, ran: Callable[[], None]) -> Callable[..., Any]:
    """A stand-in for a compiled graph that returns tensors of the right shapes.

    They are fake in the mode of the inputs, not of the trace: code between two graphs may use both together.

    Args:
        gm: the graph.
        ran: called at every run.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    outputs = gm.graph.output_node().args[0]

    def run(*args: Any) -> tuple[Any, ...]:
        ran()
        given = dict(zip(inputs, args, strict=True))
        return tuple(_outputs(outputs, given, _compat.find_fake_mode(args)))

    return run


def _outputs(outputs: Any, given: dict[fx.Node, Any], mode: Any) -> Iterator[Any]:
    for node in outputs:
        if node is None or not hasattr(node, "meta"):
            yield node
        elif node in given:
            yield given[node]
        else:
            value = node.meta["val"]
            if isinstance(value, torch.Tensor):
                yield value.detach() if mode is None else _compat.fake_like(value, mode)
            else:
                yield value
