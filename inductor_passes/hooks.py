"""The pass objects that TorchInductor calls, and what identifies them in compile caches.

It owns the choice of configuration for a graph, the cache identity, and what happens when a pass fails. It
must not know where the objects are registered (`install`), nor how a pass works.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import pathlib
import warnings
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from inductor_passes import graph as fxg
from inductor_passes._compat import CustomGraphPass, is_tangent, trace_structured
from inductor_passes.bucket import apply_plan, is_planned, mark_planned, merge_waits
from inductor_passes.costs.model import ProfileCostModel
from inductor_passes.labels import name_collectives
from inductor_passes.planners import plan_collectives
from inductor_passes.planners.check import check_plan
from inductor_passes.program import read_program
from inductor_passes.report import PassRecord, PlanReport, schedule_lines
from inductor_passes.reshard import reshard_pass
from inductor_passes.verify import Snapshot, check_graph

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import fx

    from inductor_passes.config import PassConfig
    from inductor_passes.costs.profiles import HardwareProfile

log = logging.getLogger(__name__)

# Records kept per pass object: enough for the graphs of a large model compiled block by block.
_KEPT_RECORDS = 256
_KEY_LENGTH = 8


@dataclass(frozen=True)
class Setup:
    """Everything that a plan depends on besides the graph: the user's options and the machine.

    Args:
        config: options of the passes.
        profile: hardware profile, equal on every rank.
    """

    config: PassConfig
    profile: HardwareProfile

    @functools.cached_property
    def key(self) -> str:
        """Short text that differs whenever an option or a constant of the profile differs."""
        text = f"{self.config.cache_key()} {self.profile.identity()}"
        return hashlib.sha256(text.encode()).hexdigest()[:_KEY_LENGTH]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Setup) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@functools.cache
def source_hash() -> str:
    """Hash of every source file of this package: an edited pass must not find results of the old one."""
    package = pathlib.Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def identity(setups: Iterable[Setup]) -> str:
    """Cache identity of a pass: our sources, the version of torch, and every setup the pass may choose."""
    text = " ".join([source_hash(), torch.__version__, *sorted(setup.key for setup in setups)])
    return hashlib.sha256(text.encode()).hexdigest()


class GraphHook(CustomGraphPass):
    """A pass over FX graphs, as an object with a cache identity.

    A graph names its setup by the key in its tags. A tag without a key gets the setup installed last; a tag
    with None asks for no passes. Graphs without tags are left alone.

    Args:
        setups: what the pass may choose from, in order of installation.
        pinned: use the last setup for every tagged graph, whatever its tags say
            (`torch.compile(options=...)`).
    """

    hook: ClassVar[str]

    def __init__(self, setups: tuple[Setup, ...], pinned: bool = False) -> None:
        self.setups = setups
        self.pinned = pinned
        self.active = True
        self.records: deque[PassRecord] = deque(maxlen=_KEPT_RECORDS)
        self._warned: set[tuple[str, str]] = set()

    def uuid(self) -> Any:
        return f"{type(self).__name__} {identity(self.setups) if self.active else 'inactive'}"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.uuid() == other.uuid()

    def __hash__(self) -> int:
        return hash(self.uuid())

    def __call__(self, graph: fx.Graph) -> None:
        setup = self.find_setup(graph)
        if setup is not None:
            self.run(graph, setup)

    def find_setup(self, graph: fx.Graph) -> Setup | None:
        """The setup to use for a graph, None to leave it alone.

        When modules with different setups meet in one graph, the one installed last decides for all of it:
        a plan covers a whole graph.
        """
        if not self.active or not self.setups:
            return None
        keys = {tag.passes for tag in map(fxg.find_tag, graph.nodes) if tag is not None}
        if not keys:
            return None
        if self.pinned:
            return self.setups[-1]
        chosen = [setup for setup in self.setups if setup.key in keys]
        if chosen:
            return chosen[-1]
        return self.setups[-1] if "" in keys else None

    def run(self, graph: fx.Graph, setup: Setup) -> None:
        """Apply the pass to a graph with tags."""
        raise NotImplementedError

    def guarded(
        self, name: str, kind: str, graph: fx.Graph, apply: Callable[[Snapshot], tuple[Any, ...]]
    ) -> None:
        """Run a pass; when it fails, bring the graph back, warn once and keep the reason.

        Training goes on with the graph it would have had without the pass: slower, with the same values.
        """
        snapshot = Snapshot(graph)
        before = tuple(schedule_lines(graph))
        items: tuple[Any, ...] = ()
        failure = ""
        try:
            items = apply(snapshot)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            log.debug("%s pass failed on the %s graph", name, kind, exc_info=True)
            snapshot.restore()
        record = PassRecord(name, kind, items, before, tuple(schedule_lines(graph)), failure)
        self.records.append(record)
        log.debug("%s", record)
        trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": f"inductor_passes_{name}_{kind}", "encoding": "string"},
            payload_fn=lambda: str(record),
        )
        if failure and (name, kind) not in self._warned:
            self._warned.add((name, kind))
            warnings.warn(
                f"the {name} pass keeps the {kind} graph as it was: {failure}", RuntimeWarning, stacklevel=2
            )


class JointHook(GraphHook):
    """Re-gathering, on the joint graph of forward and backward."""

    hook = "joint_custom_post_pass"

    def run(self, graph: fx.Graph, setup: Setup) -> None:
        name_collectives(graph, setup.key)
        self.guarded("reshard", "joint", graph, lambda _: reshard_pass(graph, setup.config.reshard))


class PostGradHook(GraphHook):
    """Bucketing and prefetch, on the graph of forward, of backward, or of a call without gradient."""

    hook = "post_grad_custom_post_pass"

    def run(self, graph: fx.Graph, setup: Setup) -> None:
        if is_planned(graph):
            return
        merge_waits(graph)
        kind = "backward" if any(map(is_tangent, graph.find_nodes(op="placeholder"))) else "forward"
        self.guarded("bucket", kind, graph, lambda snapshot: (bucket_pass(graph, setup, snapshot),))


def bucket_pass(graph: fx.Graph, setup: Setup, before: Snapshot) -> PlanReport:
    """Read a graph, plan its collectives, rewrite it, verify it.

    Args:
        graph: forward, backward or inference graph, changed in place.
        setup: options and hardware profile.
        before: the graph as it was; on an exception the caller restores it.

    Returns:
        What was planned.

    Raises:
        ValueError: the plan breaks a rule.
        VerificationError: the graph that came out breaks an invariant.
    """
    config, profile = setup.config, setup.profile
    program = read_program(
        graph,
        ProfileCostModel(profile),
        ranks_per_node=profile.value("ranks_per_node"),
        blocks=config.blocks,
        memory_budget_bytes=config.memory_budget_bytes,
    )
    plan = plan_collectives(program.problem, config.planner, bucketing=config.bucketing)
    check_plan(program.problem, plan)
    unread = apply_plan(graph, program, plan)
    check_graph(graph, before)
    for node in unread:
        graph.erase_node(node)
    mark_planned(graph)
    return PlanReport(program.problem, plan)
