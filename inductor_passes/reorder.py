"""Give the fused scheduler nodes their final order: every start and wait where the modelled time is shortest.

It owns the reading of scheduler nodes and the permutation. It must not know how slots are chosen, and it creates,
removes and fuses nothing.

TorchInductor reorders kernels for memory after the graph passes, and so undoes part of their placing. This pass runs
last. Compute stays in the order it finds, unless the step is shorter in the order of the graph (`lowered`), or it may
move under collectives that stay exposed (`motion_kernels`). Collectives keep their order among each other, which torch
has frozen; the kernels that only pack for a start or unpack after a wait travel with them::

    pack, pack, start, mm, mm, wait, unpack, mm      found
    mm, pack, pack, start, mm, wait, unpack, mm      returned
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from inductor_passes import _compat, bucket_ops, work
from inductor_passes import graph as fxg
from inductor_passes.emission import Emission
from inductor_passes.inorder import plan_in_order, plan_of
from inductor_passes.lowered import lowered_order
from inductor_passes.motion import MotionReport, report_motion
from inductor_passes.motion_kernels import Timed, label_kernels, read_kernels
from inductor_passes.plan import ISSUE, Plan, PlanningProblem, Role
from inductor_passes.planners.motion import plan_motion
from inductor_passes.planners.tasks import check_motion
from inductor_passes.program import make_problem, role_of
from inductor_passes.report import PlanReport
from inductor_passes.verify import VerificationError, check_same_order
from inductor_passes.windows import Walk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import fx

    from inductor_passes.costs.model import CostModel


_WORTH_PER_MILLE = 10
"""How much shorter the step must be for compute to leave TorchInductor's order, which holds less memory."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Scheduler nodes, read for planning.

    Args:
        snodes: all of them, in the order found.
        inputs: what each needs to have run before.
        anchored: nodes that stay in order; the region of that number holds one.
        starts: starts of the collectives the passes understand, in order.
        waits: the wait of each.
        problem: what is to be planned.
        found: the plan that the order found amounts to.
    """

    snodes: tuple[Any, ...]
    inputs: dict[Any, tuple[Any, ...]]
    anchored: tuple[Any, ...]
    starts: tuple[Any, ...]
    waits: tuple[Any, ...]
    problem: PlanningProblem
    found: Plan


@dataclasses.dataclass(frozen=True)
class ReorderReport:
    """What the reorder pass decided. All times and bytes are modelled.

    Args:
        found: the plan that the order found amounts to.
        placed: the best plan known.
        kept: why the order was kept, "" if it was not.
        motion: what compute was moved under exposed collectives, None if nothing could move.
        restored: compute is in the order of the graph again.
    """

    found: Plan
    placed: PlanReport
    kept: str
    motion: MotionReport | None = None
    restored: bool = False

    @property
    def step_ns(self) -> int:
        """Modelled time of the order that was decided."""
        return self.found.step_ns if self.kept else self.placed.plan.step_ns

    def __str__(self) -> str:
        outcome = f"order kept: {self.kept}" if self.kept else "order changed"
        if self.restored:
            outcome += ", compute back in the order of the graph"
        head = (
            f"{outcome}; modelled {self.found.step_ns / 1e6:.3f} ms before, "
            f"{self.placed.plan.step_ns / 1e6:.3f} ms after"
        )
        motion = "" if self.motion is None else f"\n  {self.motion}"
        return f"{head}{motion}\n  {self.placed}"


def reorder_pass(
    snodes: Sequence[Any],
    cost: CostModel,
    ranks_per_node: int,
    memory_budget_bytes: int | None,
    move_compute: bool = False,
) -> tuple[list[Any], ReorderReport]:
    """Find the final order of scheduler nodes.

    Args:
        snodes: fused scheduler nodes in an order that obeys their dependencies.
        cost: prices of compute and communication.
        ranks_per_node: ranks that share a node, in the whole job.
        memory_budget_bytes: bound on bytes in flight, None for none.
        move_compute: move compute under collectives that are not ours to prefetch.

    Returns:
        A permutation of `snodes`, the same order where none is better, and what was decided.

    Raises:
        VerificationError: the order of the collectives cannot be kept, or the new order breaks an invariant.
    """
    found = schedule = read_schedule(snodes, cost, ranks_per_node, memory_budget_bytes)
    plan = plan_in_order(found.problem)
    if plan is None:
        raise VerificationError("a collective must start before one that stands before it can")

    def attempt(nodes: Sequence[Any], left: int | None) -> tuple[Schedule, list[Any], ReorderReport]:
        candidate = read_schedule(nodes, cost, ranks_per_node, left)
        return candidate, *_finish(found, candidate, plan_in_order(candidate.problem), memory_budget_bytes)

    order, report = _finish(found, found, plan, memory_budget_bytes)
    if _is_worth(report.step_ns, sum(found.problem.region_ns)):
        lowered, again, other = attempt(
            lowered_order(snodes, found.inputs, found.anchored), memory_budget_bytes
        )
        if not other.kept and _is_worth(report.step_ns, other.step_ns):
            schedule, order, report = lowered, again, dataclasses.replace(other, restored=True)
    if not move_compute:
        return order, report
    moved, motion = move_kernels(schedule)
    if moved is None or motion is None:
        return order, dataclasses.replace(report, motion=motion)
    held = max(0, motion.after.peak_bytes - motion.before.peak_bytes)
    left = None if memory_budget_bytes is None else memory_budget_bytes - held
    _, again, other = attempt(moved, left)
    if not other.kept and other.step_ns < report.step_ns:
        return again, dataclasses.replace(other, motion=motion, restored=report.restored)
    kept = other.kept or "with all collectives the step is not shorter"
    return order, dataclasses.replace(report, motion=dataclasses.replace(motion, kept=kept))


def _is_worth(before_ns: int, after_ns: int) -> bool:
    """Whether a step is so much shorter."""
    return before_ns * (1000 - _WORTH_PER_MILLE) > after_ns * 1000


def _finish(
    found: Schedule, schedule: Schedule, plan: Plan | None, memory_budget_bytes: int | None
) -> tuple[list[Any], ReorderReport]:
    """The order of a plan, or the order found where that is shorter or holds too much memory.

    Args:
        found: the scheduler nodes in the order found.
        schedule: the same nodes in the order that was planned.
        plan: a plan for `schedule`; None where there is none.
        memory_budget_bytes: by how much the peak of live bytes may rise, None for no bound.
    """
    report = PlanReport(schedule.problem, plan or schedule.found)
    snodes = list(found.snodes)
    if plan is None:
        return snodes, ReorderReport(found.found, report, "the order of the collectives cannot be kept")
    if plan.step_ns > found.found.step_ns:
        return snodes, ReorderReport(found.found, report, "it is shorter than the best one known")
    order = permutation(schedule, plan)
    check_schedule(found, order)
    if memory_budget_bytes is not None:
        before, after = _compat.peak_bytes(snodes), _compat.peak_bytes(order)
        if before is not None and after is not None and after > before + memory_budget_bytes:
            kept = f"the peak would rise from {before} to {after} bytes, by more than the budget"
            return snodes, ReorderReport(found.found, report, kept)
    return order, ReorderReport(found.found, report, "")


def move_kernels(schedule: Schedule) -> tuple[list[Any] | None, MotionReport | None]:
    """Move compute under collectives that are not ours to prefetch.

    Half of the memory budget may go into holding compute back.

    Returns:
        The nodes in the new order, None where no order is shorter, and the report, None where nothing may move.
    """
    timed = {
        start: Timed(item.key.group, schedule.problem.alpha_ns[item.key] + item.transfer_ns, wait)
        for start, wait, item in zip(
            schedule.starts, schedule.waits, schedule.problem.collectives, strict=True
        )
        if item.role is Role.FIXED
    }
    times = dict(zip(schedule.anchored, schedule.problem.region_ns, strict=True))
    problem = read_kernels(schedule.snodes, schedule.inputs, times, timed) if timed else None
    if problem is None:
        return None, None
    budget = schedule.problem.memory_budget_bytes
    motion = plan_motion(problem, None if budget is None else budget // 2)
    report = report_motion(problem, motion, label_kernels(schedule.snodes))
    if motion.is_found_order:
        return None, report
    check_motion(problem, motion.order)
    return [schedule.snodes[number] for number in motion.order], report


def read_schedule(
    snodes: Sequence[Any], cost: CostModel, ranks_per_node: int, memory_budget_bytes: int | None
) -> Schedule:
    """Read scheduler nodes as a planning problem. Arguments as of `reorder_pass`."""
    inputs = _inputs(snodes)
    wait_of = {
        source: snode
        for snode in snodes
        if _compat.is_wait_kernel(snode)
        for source in inputs[snode]
        if _compat.is_collective_kernel(source)
    }
    starts = [snode for snode in snodes if snode in wait_of and _find_start(snode) is not None]
    fx_starts = [start for start in map(_find_start, starts) if start is not None]
    roles = {snode: role_of(start) for snode, start in zip(starts, fx_starts, strict=True)}
    number_of = {snode: number for number, snode in enumerate(starts)}
    number_of_wait = {wait_of[snode]: number for snode, number in number_of.items()}
    floating = _find_floating(snodes, inputs, roles, {wait_of[snode] for snode in starts})
    walk: Walk[Any] = Walk([role is Role.FIXED for role in roles.values()])
    anchored: list[Any] = []
    found: list[tuple[int, int, bool]] = []
    for snode in snodes:
        if snode in number_of:
            walk.start(snode, inputs[snode])
            found.append((len(anchored), number_of[snode], False))
        elif snode in number_of_wait:
            walk.wait(snode, number_of_wait[snode])
            found.append((len(anchored), number_of_wait[snode], True))
        elif snode in floating:
            walk.floating(snode, inputs[snode])
        else:
            unknown = _compat.is_collective_kernel(snode) or _compat.is_wait_kernel(snode)
            walk.anchored(snode, inputs[snode], cut_before=True, cut_after=True, barrier=unknown)
            anchored.append(snode)
    problem = make_problem(
        region_ns=_durations(anchored, cost),
        starts=fx_starts,
        windows=walk.windows(),
        cost=cost,
        ranks_per_node=ranks_per_node,
        memory_budget_bytes=memory_budget_bytes,
    )
    waits = tuple(wait_of[snode] for snode in starts)
    return Schedule(
        tuple(snodes), inputs, tuple(anchored), tuple(starts), waits, problem, plan_of(problem, found)
    )


def permutation(schedule: Schedule, plan: Plan) -> list[Any]:
    """The order of scheduler nodes that a plan asks for.

    Raises:
        VerificationError: a node needs a result before the plan has it.
    """
    users: dict[Any, list[Any]] = {snode: [] for snode in schedule.snodes}
    for snode, sources in schedule.inputs.items():
        for source in sources:
            users[source].append(snode)
    held = (*schedule.anchored, *schedule.starts, *schedule.waits)
    emission: Emission[Any] = Emission(schedule.inputs.__getitem__, held)
    slot = 0
    for event in plan.events:
        emission.release(schedule.anchored[slot : event.slot])
        slot = event.slot
        (number,) = plan.buckets[event.bucket].members
        if event.action == ISSUE:
            emission.release([schedule.starts[number]])
        else:
            wait = schedule.waits[number]
            emission.release([wait])
            if schedule.problem.collectives[number].role is Role.REDUCE:
                emission.release_readers([wait], users)
            else:  # the results of an operator come in a list, and live as long as one of them is still in it
                emission.release_readers([wait], lambda snode: filter(_copies_for_bucket, users[snode]))
    emission.release(schedule.anchored[slot:])
    return emission.finish(schedule.snodes)


def check_schedule(schedule: Schedule, order: list[Any]) -> None:
    """Check that an order holds every node once, after what it needs, with all communication in the order found.

    Raises:
        VerificationError: names what is wrong.
    """
    check_same_order(list(schedule.snodes), order)
    seen: set[Any] = set()
    for snode in order:
        for source in schedule.inputs[snode]:
            if source not in seen:
                raise VerificationError(
                    f"{snode.get_name()} stands before {source.get_name()}, which it needs"
                )
        seen.add(snode)
    comm = [
        [item for item in nodes if _compat.is_collective_kernel(item)] for nodes in (schedule.snodes, order)
    ]
    if comm[0] != comm[1]:
        raise VerificationError("the order of the collectives changed")


def _inputs(snodes: Sequence[Any]) -> dict[Any, tuple[Any, ...]]:
    """What each node needs to have run before; of a collective that is also the one before it.

    See `_compat.order_only_buffers` for the dependencies that are left out in exchange.
    """
    writer = {name: snode for snode in snodes for name in _compat.written_buffers(snode)}
    inputs: dict[Any, tuple[Any, ...]] = {}
    before: list[Any] = []
    for snode in snodes:
        names = _compat.read_buffers(snode)
        sources = [writer[name] for name in names if name in writer]
        if _compat.is_collective_kernel(snode):
            wished = set(_compat.order_only_buffers(snode))
            sources = [
                writer[name]
                for name in names
                if name in writer and not (name in wished and _is_comm(writer[name]))
            ]
            sources += before
            before = [snode]
        inputs[snode] = tuple(dict.fromkeys(item for item in sources if item is not snode))
    return inputs


def _is_comm(snode: Any) -> bool:
    return _compat.is_collective_kernel(snode) or _compat.is_wait_kernel(snode)


def _find_start(snode: Any) -> fx.Node | None:
    """The graph node of a collective's start, None for a collective that the passes do not understand."""
    candidates = [node for node in _compat.origins(snode) if fxg.is_lowered_start(node)]
    return candidates[0] if len(candidates) == 1 and fxg.find_wait(candidates[0]) is not None else None


def _find_floating(
    snodes: Sequence[Any], inputs: dict[Any, tuple[Any, ...]], roles: dict[Any, Role], waits: set[Any]
) -> set[Any]:
    """The light kernels that only pack for movable starts or only unpack after movable waits.

    They are known by what they read and feed, not by the operators they came from: the cast that ends a gradient's
    computation fuses with the packing, every piece of a bucket names the origins of all, and the copy of a weight that
    a matrix product needs names those of its other factor. A kernel without reduction that feeds nothing but starts, or
    reads nothing but gathered values, handles about as many elements as travel.
    """
    movable = {snode for snode, role in roles.items() if role is not Role.FIXED}
    fixed_waits = waits - {wait for wait in waits if not movable.isdisjoint(inputs[wait])}
    users: dict[Any, list[Any]] = {snode: [] for snode in snodes}
    for snode, sources in inputs.items():
        for source in sources:
            users[source].append(snode)
    floating: set[Any] = set()
    for snode in reversed(snodes):
        serves = users[snode] and all(
            user in movable or user in floating or user in waits for user in users[snode]
        )
        if serves and snode not in waits and _is_light(snode):
            floating.add(snode)
    for snode in snodes:
        unpacks = inputs[snode] and all(
            source in floating or (source in waits and source not in fixed_waits) for source in inputs[snode]
        )
        if unpacks and snode not in waits and _is_light(snode) and not _compat.reads_graph_inputs(snode):
            floating.add(snode)
    return floating


def _is_light(snode: Any) -> bool:
    """Whether a kernel does nothing but compute each element of its result by itself."""
    return _copies_for_bucket(snode) or not (
        _compat.is_collective_kernel(snode)
        or _compat.is_opaque_kernel(snode)
        or _compat.is_reduction_kernel(snode)
    )


def _copies_for_bucket(snode: Any) -> bool:
    return _compat.called_operator(snode) in (bucket_ops.pack, bucket_ops.unpack)


def _durations(snodes: Sequence[Any], cost: CostModel) -> list[int]:
    """Modelled time of each node, from the graph nodes it came from."""
    if not snodes:
        return []
    graph = _compat.lowered_graph()
    position = {node: number for number, node in enumerate(graph.nodes)}
    nominal = work.nominal_size(graph)
    durations = []
    for snode in snodes:
        opaque = _compat.is_opaque_kernel(snode)
        nodes = [node for node in _compat.origins(snode) if node in position and not fxg.is_comm(node)]
        heavy = [node for node in nodes if fxg.is_heavy(node)]
        chosen = heavy if opaque and heavy else [node for node in nodes if not fxg.is_heavy(node)]
        chosen.sort(key=position.__getitem__)
        durations.append(work.time_ns(chosen, nominal, cost))
    return durations
