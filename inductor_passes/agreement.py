"""Ranks whose plans differ learn it while they compile, instead of waiting for one another for ever.

Owns the comparison: which plans must be equal, what of them, and what the user reads. Must not know how plans are
made, nor change them.

Plans go by the time of compute, so ranks that compile one model for inputs of different constant sizes may decide on
other buckets or another order. The first plan that a rank makes for given collectives is compared, through the
key-value store of the job, with the first one of the other ranks. The store answers at once, whatever other ranks do:
nothing here waits, and ranks may compile when they like.

Later plans for the same collectives are not compared: sizes may change on all ranks together, and a compile cache may
have spared some of them the planning. Symbolic sizes count the same on all ranks (`work`), so such graphs have equal
plans.
"""

from __future__ import annotations

import hashlib
import json
import logging
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from inductor_passes import _compat
from inductor_passes import graph as fxg

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inductor_passes.graph_plan import GraphPlan
    from inductor_passes.plan import PlanningProblem
    from inductor_passes.setups import Setup

log = logging.getLogger(__name__)

_PREFIX = "inductor_passes/plan"


class PlansDifferError(RuntimeError):
    """This rank would start its collectives in another order, or other buckets, than one it communicates with."""


def check_agreement(kind: str, setup: Setup, found: GraphPlan, *, applied: bool) -> None:
    """Compare a plan for constant sizes with that of the ranks this graph communicates with.

    Args:
        kind: "forward" or "backward".
        setup: what the plan was made with.
        found: the graph as it was read, and its plan.
        applied: whether the graph follows the plan; otherwise its collectives stay as they were traced.

    Raises:
        PlansDifferError: another rank has planned the same collectives differently.
    """
    problem = found.program.problem
    if not problem.collectives or not dist.is_initialized() or dist.get_backend() == "fake":
        return
    members = [bucket.members for bucket in found.plan.buckets] if applied else _as_traced(problem)
    rank = dist.get_rank()
    own = f"{rank} {_digest(members)}"
    signature = _digest(_comparable(kind, setup, problem))
    groups = dict.fromkeys(_compat.group_ranks(fxg.group_of(start)) for start in found.program.starts)
    for ranks in filter(lambda ranks: len(ranks) > 1, groups):
        key = f"{_PREFIX}/{signature}/{_digest(ranks)}"
        if _first_of(f"{key}/{rank}", own) != own:
            continue  # compared before, for other sizes
        other, _, theirs = _first_of(key, own).partition(" ")
        if theirs != _digest(members):
            raise PlansDifferError(
                f"ranks {other} and {rank} would wait for one another for ever: they planned the collectives of the "
                f"{kind} graph differently, because they compile it for inputs of different sizes. Make the sizes "
                "symbolic, with torch.compile(model, dynamic=True) or torch._dynamo.mark_dynamic; or give all ranks "
                "inputs of equal size; or use PassConfig(planner='block', blocks=...), whose buckets do not depend on "
                "sizes. If the sizes are equal, empty TorchInductor's cache directory on all hosts: some ranks found "
                "schedules in it that others have to plan."
            )


def _as_traced(problem: PlanningProblem) -> list[tuple[int, ...]]:
    return [(number,) for number in range(len(problem.collectives))]


def _comparable(kind: str, setup: Setup, problem: PlanningProblem) -> Any:
    """What a plan is for, without what depends on the sizes of inputs: ranks compare plans for equal collectives."""
    return [
        kind,
        setup.key,
        len(problem.region_ns),
        [
            (
                item.name,
                str(item.key),
                item.size_bytes,
                item.earliest_issue,
                item.latest_issue,
                item.latest_wait,
            )
            for item in problem.collectives
        ],
    ]


def _digest(value: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]


def _first_of(key: str, value: str) -> str:
    """What was stored first under a key: `value` itself where nothing was, or the store cannot be asked."""
    try:
        return bytes(_compat.default_store().compare_set(key, "", value)).decode()
    except (
        Exception
    ) as error:  # a store that has ended, or that has no such operation, must not end a training
        log.debug("plans cannot be compared", exc_info=error)
        return value
