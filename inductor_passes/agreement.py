"""Ranks whose plans differ: the one that plans second ends with an error, before all wait for one another for ever.

Owns the comparison: which plans must be equal, what of them, and what the user reads. Must not know how plans are
made, nor change them.

Plans go by the time of compute, so ranks that compile one model for inputs of different constant sizes may decide on
other buckets or another order. The first plan that a rank makes for given collectives is compared, through the
key-value store of the job, with the first one of each rank it shares a process group with. The store answers at once,
whatever other ranks do: nothing here waits, and ranks may compile when they like.

Later plans for the same collectives are not compared, because sizes may change on all ranks together. So a rank that
goes over to a graph for other sizes by itself is not found out; nor are graphs that compile caches served.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from inductor_passes import _compat, work
from inductor_passes import graph as fxg
from inductor_passes.plan import Role

if TYPE_CHECKING:
    from torch import fx

    from inductor_passes.graph_plan import GraphPlan
    from inductor_passes.setups import Setup

log = logging.getLogger(__name__)

_PREFIX = "inductor_passes/plan"
_ADVICE = (
    "Most likely they compile it for inputs of different sizes: make the sizes symbolic, with torch.compile(model, "
    "dynamic=True) or torch._dynamo.mark_dynamic; or give all ranks inputs of equal size; or use "
    "PassConfig(planner='block', blocks=...), whose buckets do not depend on sizes."
)
_WARM = "Or compile caches hold this graph for some of the ranks alone, and all is well; otherwise training stops here."


class PlansDifferError(RuntimeError):
    """This rank would start its collectives in another order, or other buckets, than one it communicates with."""


@dataclasses.dataclass(frozen=True)
class _Entry:
    """What a rank stores: who it is, what it planned, and whether a compile cache spared it plans before."""

    rank: int
    digest: str
    is_warm: bool

    def to_text(self) -> str:
        return json.dumps(dataclasses.astuple(self))

    @classmethod
    def of(cls, text: str) -> _Entry:
        return cls(*json.loads(text))


class Agreement:
    """The comparison of a rank's plan for a graph with those of the ranks it communicates with.

    To be made before the graph is rewritten.

    Args:
        kind: "forward" or "backward".
        graph: the graph.
        setup: what the plan was made with; its `run` names the ranks that are compared.
        found: the graph as it was read, and its plan.
    """

    def __init__(self, kind: str, graph: fx.Graph, setup: Setup, found: GraphPlan) -> None:
        self._kind = kind
        self._key = f"{_PREFIX}/{setup.run}/{_digest(_comparable(kind, graph, setup, found))}"
        self._buckets = [bucket.members for bucket in found.plan.buckets]
        groups = [item.key.group for item in found.program.problem.collectives]
        ranks_of = {
            group: _compat.group_ranks(fxg.group_of(start))
            for group, start in dict(zip(groups, found.program.starts, strict=True)).items()
        }
        self._ranks = [ranks_of[group] for group in groups]  # that take part in each collective

    def check(self, failure: str = "") -> None:
        """Compare, if this is the first plan for these collectives.

        Args:
            failure: why the graph does not follow the plan, so that its collectives stay as they were traced; "" if it
                does.

        Raises:
            PlansDifferError: another rank has planned the same collectives differently, and compile caches have no part
                in it; where they may have, that is a warning.
        """
        if not dist.is_initialized():
            return
        buckets = [(number,) for number in range(len(self._ranks))] if failure else self._buckets
        for ranks in filter(lambda ranks: len(ranks) > 1, dict.fromkeys(self._ranks)):
            order = [members for members in buckets if self._ranks[members[0]] == ranks]
            mine = _Entry(dist.get_rank(), _digest(order), _compat.cache_hits() > 0)
            key = f"{self._key}/{_digest(ranks)}"
            if _first_of(f"{key}/{mine.rank}", mine) != mine:
                continue  # compared before, for other sizes
            first = _first_of(key, mine)
            if first.digest != mine.digest:
                self._tell(first, mine, failure)

    def _tell(self, first: _Entry, mine: _Entry, failure: str) -> None:
        text = (
            f"ranks {first.rank} and {mine.rank} would wait for one another for ever: they planned the collectives of "
            f"the {self._kind} graph differently. "
        )
        text += f"On rank {mine.rank} the pass failed: {failure}" if failure else _ADVICE
        if first.is_warm or mine.is_warm:
            warnings.warn(f"{text} {_WARM}", RuntimeWarning, stacklevel=2)
            return
        log.error(text)
        raise PlansDifferError(text)


def _comparable(kind: str, graph: fx.Graph, setup: Setup, found: GraphPlan) -> list[Any]:
    """What a plan is for, as far as the sizes of inputs have no part in it.

    Training and evaluation differ in what forward returns; graphs for any size are compared among themselves.
    """
    return [
        kind,
        setup.key,
        len(graph.output_node().all_input_nodes),
        bool(work.symbols_of(graph)),
        [
            (item.name, str(item.key), 0 if item.role is Role.FIXED else item.size_bytes)
            for item in found.program.problem.collectives
        ],
    ]


def _digest(value: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]


def _first_of(key: str, entry: _Entry) -> _Entry:
    """What was stored first under a key: `entry` itself where nothing was, or the store cannot be asked."""
    try:
        return _Entry.of(bytes(_compat.default_store().compare_set(key, "", entry.to_text())).decode())
    # A store that has ended, or that has no such operation, must not end a training.
    except Exception as error:
        log.debug("plans cannot be compared", exc_info=error)
        return entry
