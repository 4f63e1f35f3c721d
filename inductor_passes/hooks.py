"""The pass objects that TorchInductor calls.

It owns their identity in compile caches, their records, and what happens when a pass fails. It must not know where the
objects are registered (`install`), nor how a pass works.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist

from inductor_passes import _compat, work
from inductor_passes._compat import CustomGraphPass, is_tangent, trace_structured
from inductor_passes.agreement import Agreement
from inductor_passes.bucket import apply_plan, is_planned, mark_planned, merge_waits
from inductor_passes.costs.kernel_file import add_kernels
from inductor_passes.costs.model import ProfileCostModel
from inductor_passes.graph_plan import GraphPlan, plan_graph
from inductor_passes.labels import name_collectives
from inductor_passes.planners.check import check_plan
from inductor_passes.readback import kernel_times
from inductor_passes.reorder import reorder_pass
from inductor_passes.report import PassRecord, PlanReport, schedule_lines
from inductor_passes.reshard import reshard_pass
from inductor_passes.setups import Setup, choose_setup, identity
from inductor_passes.verify import Snapshot, check_graph

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx

    from inductor_passes.motion import MotionReport

log = logging.getLogger(__name__)

# Records kept per pass object: enough for the graphs of a large model compiled block by block.
_KEPT_RECORDS = 256


class Hook:
    """What all pass objects share: setups, identity, records, one warning per kind of failure.

    Args:
        setups: what the pass may choose from, in order of installation.
        pinned: use the last setup for every tagged graph, whatever its tags say (`torch.compile(options=...)`).

    Attributes:
        active: False once uninstalled; somebody's wrapper may hold the object still.
        records: what the pass did to the last graphs, oldest first.
    """

    def __init__(self, setups: tuple[Setup, ...], pinned: bool = False) -> None:
        self.setups = setups
        self.pinned = pinned
        self.active = True
        self.records: deque[PassRecord] = deque(maxlen=_KEPT_RECORDS)
        self._warned: set[tuple[str, str]] = set()

    def uuid(self) -> Any:
        """Text that differs whenever the pass could treat a graph differently."""
        what = f"{identity(self.setups)}{' pinned' if self.pinned else ''}" if self.active else "inactive"
        return f"{type(self).__name__} {what}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hook) and self.uuid() == other.uuid()

    def __hash__(self) -> int:
        return hash(self.uuid())

    def find_setup(self, graph: fx.Graph) -> Setup | None:
        """The setup to use for a graph, None to leave it alone; see `choose_setup`."""
        return choose_setup(self.setups, graph, pinned=self.pinned) if self.active else None

    def note(self, record: PassRecord) -> None:
        """Keep a record, show it to whoever traces the compilation, and warn of a failure once.

        Training goes on with the graph it would have had without the pass: slower, with the same values.
        """
        self.records.append(record)
        log.debug("%s", record)
        trace_structured(
            "artifact",
            metadata_fn=lambda: {
                "name": f"inductor_passes_{record.name}_{record.graph}",
                "encoding": "string",
            },
            payload_fn=lambda: str(record),
        )
        if record.failure and (record.name, record.graph) not in self._warned:
            self._warned.add((record.name, record.graph))
            warnings.warn(
                f"the {record.name} pass keeps the {record.graph} graph as it was: {record.failure}",
                RuntimeWarning,
                stacklevel=2,
            )


class GraphHook(Hook, CustomGraphPass):
    """A pass over FX graphs."""

    hook: ClassVar[str]

    def __call__(self, graph: fx.Graph) -> None:
        setup = self.find_setup(graph)
        if setup is not None:
            self.run(graph, setup)

    def run(self, graph: fx.Graph, setup: Setup) -> None:
        """Apply the pass to a graph with tags."""
        raise NotImplementedError

    def guarded(
        self, name: str, kind: str, graph: fx.Graph, apply: Callable[[Snapshot], tuple[Any, ...]]
    ) -> str:
        """Run a pass; when it fails, bring the graph back and note the reason. Returns it, "" where there is none."""
        snapshot: Snapshot | None = None
        items: tuple[Any, ...] = ()
        before: tuple[str, ...] = ()
        after: tuple[str, ...] = ()
        failure = ""
        try:
            snapshot = Snapshot(graph)
            before = after = tuple(schedule_lines(graph))
            items = apply(snapshot)
            after = tuple(schedule_lines(graph))
        except Exception as error:
            failure = _describe(error, name)
            if snapshot is not None:
                snapshot.restore()
            items, after = (), before
        self.note(PassRecord(name, kind, items, before, after, failure))
        return failure


class JointHook(GraphHook):
    """Re-gathering, on the joint graph of forward and backward."""

    hook = "joint_custom_post_pass"

    def __init__(self, setups: tuple[Setup, ...], pinned: bool = False) -> None:
        super().__init__(setups, pinned)
        self._meshes: deque[weakref.ref[Any]] = deque(maxlen=_KEPT_RECORDS)

    def uuid(self) -> Any:
        """See `Hook.uuid`. TorchInductor asks for it right before it computes the key of a graph's cache entry."""
        for mesh in filter(None, (reference() for reference in self._meshes)):
            _compat.forget_hash(mesh)
        return super().uuid()

    def run(self, graph: fx.Graph, setup: Setup) -> None:
        known = [reference() for reference in self._meshes]
        new = (mesh for mesh in _compat.find_meshes(graph) if all(mesh is not item for item in known))
        self._meshes.extend(map(weakref.ref, new))
        name_collectives(graph, setup.key)
        self.guarded("reshard", "joint", graph, lambda _: reshard_pass(graph, setup.config.reshard))


class PostGradHook(GraphHook):
    """Bucketing and prefetch, on the graph of forward, of backward, or of a call without gradient.

    Args:
        setups, pinned: as in `Hook`.
        planned: called with the plan of each graph before that is rewritten.
    """

    hook = "post_grad_custom_post_pass"

    def __init__(
        self,
        setups: tuple[Setup, ...],
        pinned: bool = False,
        planned: Callable[[GraphPlan], None] | None = None,
    ) -> None:
        super().__init__(setups, pinned)
        self._planned = planned

    def run(self, graph: fx.Graph, setup: Setup) -> None:
        if is_planned(graph):
            return
        merge_waits(graph)
        kind = _kind(graph)
        comparisons: list[Agreement] = []

        def planned(found: GraphPlan) -> None:
            if setup.run:  # other ranks plan this graph, too
                comparisons.append(Agreement(kind, graph, setup, found))
            if self._planned is not None:
                self._planned(found)

        failure = self.guarded(
            "bucket", kind, graph, lambda snapshot: bucket_pass(graph, setup, snapshot, planned)
        )
        for comparison in comparisons:
            comparison.check(failure)


def bucket_pass(
    graph: fx.Graph, setup: Setup, before: Snapshot, planned: Callable[[GraphPlan], None] | None = None
) -> tuple[PlanReport] | tuple[PlanReport, MotionReport]:
    """Read a graph, move compute, plan its collectives, rewrite it, verify it.

    Args:
        graph: forward, backward or inference graph, changed in place.
        setup: options and hardware profile.
        before: the graph as it was; on an exception the caller restores it.
        planned: called with the plan before the graph is rewritten.

    Returns:
        What was planned, and what was moved where something may be.

    Raises:
        ValueError: the plan breaks a rule.
        VerificationError: the graph that came out breaks an invariant.
    """
    found = plan_graph(graph, setup)
    if planned is not None:
        planned(found)
    check_plan(found.program.problem, found.plan)
    unread = apply_plan(graph, found.program, found.plan)
    check_graph(graph, before)
    for node in unread:
        graph.erase_node(node)
    mark_planned(graph)
    report = PlanReport(found.program.problem, found.plan)
    return (report,) if found.motion is None else (report, found.motion)


class ReorderHook(Hook):
    """The final order of scheduler nodes. TorchInductor keys it in its caches by what pickle makes of it.

    Args:
        setups: what the pass may choose from, in order of installation.
        pinned: use the last setup for every tagged graph.
        previous: the settings that installation replaced.
    """

    def __init__(
        self,
        setups: tuple[Setup, ...],
        pinned: bool = False,
        previous: _compat.SchedulerSettings | None = None,
    ) -> None:
        super().__init__(setups, pinned)
        self.previous = previous

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.setups, self.pinned, None), {"active": self.active, "identity": self.uuid()}

    def __call__(self, snodes: list[Any]) -> list[Any]:
        graph = _compat.lowered_graph()
        setup = self.find_setup(graph)
        if setup is None or not setup.config.reorder or not snodes:
            # The stock pass, which installation switched off for graphs of ours, still runs for all others.
            stock = setup is None and self.previous is not None and self.previous.stock_overlap
            return _compat.stock_overlap(snodes) if stock else snodes
        self._write_kernel_costs(setup, graph, snodes)
        order, failure = snodes, ""
        items: tuple[Any, ...] = ()
        try:
            order, report = reorder_pass(
                snodes,
                ProfileCostModel(setup.profile),
                setup.profile.value("ranks_per_node"),
                setup.config.memory_budget_bytes,
                setup.config.move_compute,
            )
            items = (report,)
        except Exception as error:
            failure = _describe(error, "reorder")
        self.note(PassRecord("reorder", _kind(graph), items, (), (), failure))
        return order

    def _write_kernel_costs(self, setup: Setup, graph: fx.Graph, snodes: list[Any]) -> None:
        """Keep what the scheduler knows of kernels for the next run, unless this run plans with such a file.

        One rank writes: what the next run plans with must be one thing for all.
        """
        path = setup.config.kernel_costs
        if path is None or not _is_first_rank() or any(map(work.is_light_key, setup.profile.kernels)):
            return
        try:
            add_kernels(path, kernel_times(graph, snodes, ProfileCostModel(setup.profile)))
        except Exception as error:
            self.note(PassRecord("kernel costs", _kind(graph), (), (), (), _describe(error, "kernel costs")))


def _kind(graph: fx.Graph) -> str:
    return "backward" if any(map(is_tangent, graph.find_nodes(op="placeholder"))) else "forward"


def _describe(error: Exception, name: str) -> str:
    log.debug("%s pass failed", name, exc_info=error)
    return f"{type(error).__name__}: {error}"


def _is_first_rank() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
