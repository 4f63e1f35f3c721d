"""From a traced sequence of nodes to a planning problem, and from slots back to nodes.

Owns the aggregation of nodes into regions and the windows that follow from dependencies and barriers. Must
not know
FX: nodes are positions ``0 .. n-1`` with a duration each. Only positions that matter to some collective
become slots, so a graph of tens of thousands of nodes gives a problem of a few thousand regions.
"""

from __future__ import annotations

import bisect
import dataclasses
import fnmatch
import itertools
from collections.abc import Mapping, Sequence

from inductor_passes.plan import Collective, GroupKey, PlanningProblem, Role

REGIONS_AT_LEAST = 256
"""Compute is cut into about this many regions even where no collective needs a slot."""


@dataclasses.dataclass(frozen=True)
class Traced:
    """A collective as it stands in the traced sequence. Positions are node positions.

    Args:
        name: What reports call it.
        key: Only equal keys share a bucket.
        role: What may be done with it.
        size_bytes: Bytes it holds in flight, as ``plan`` counts them.
        transfer_ns: Its time without the alpha.
        ready: Its input exists just before this node; 0 for graph inputs. Results of collectives it depends
            on do not count: they move with their waits.
        issue: Its start.
        wait: Its wait.
        need: First node that uses its result; the number of nodes when only the graph's output does. Uses by
            collectives that depend on it do not count: they move.
        depends_on: Numbers of collectives (positions in the list) whose results feed it.
        copy_in_ns: Time to copy it into a bucket of several.
        copy_out_ns: Time to copy it out of one.
        staging_bytes: Extra bytes it holds for a moment in a bucket of several.
        block: Module of the user's ``blocks`` it belongs to.
    """

    name: str
    key: GroupKey
    role: Role
    size_bytes: int
    transfer_ns: int
    ready: int
    issue: int
    wait: int
    need: int
    depends_on: tuple[int, ...] = ()
    copy_in_ns: int = 0
    copy_out_ns: int = 0
    staging_bytes: int = 0
    block: str | None = None


@dataclasses.dataclass(frozen=True)
class BuiltProblem:
    """A problem and where its slots are: slot ``k`` is just before node ``slot_nodes[k]``, the last one at
    the end."""

    problem: PlanningProblem
    slot_nodes: tuple[int, ...]


def build_problem(
    node_ns: Sequence[int],
    collectives: Sequence[Traced],
    alpha_ns: Mapping[GroupKey, int],
    *,
    barriers: Sequence[int] = (),
    issue_ns: int = 0,
    kernel_ns: int = 0,
    memory_budget_bytes: int | None = None,
    longest_region_ns: int | None = None,
) -> BuiltProblem:
    """Aggregate nodes into regions and give every collective its window.

    A barrier is a node nothing may cross: what was started (or waited for) before it stays before it, what
    was started after it stays after it. An unknown collective or a side effect is one.

    Args:
        node_ns: Duration of every node; 0 for movable collectives and their waits.
        collectives: In the order of their starts.
        alpha_ns: Fixed time of a collective of each key.
        barriers: Positions of barrier nodes.
        issue_ns: Time a start takes from the compute stream.
        kernel_ns: Fixed cost of a copy kernel.
        memory_budget_bytes: Bound on bytes in flight; ``None`` for none.
        longest_region_ns: Cut regions longer than this where nodes allow, so that starts may also lie inside
            long stretches of compute; ``None`` for one in :data:`REGIONS_AT_LEAST` of all compute.

    Raises:
        ValueError: A collective's positions contradict one another.
    """
    count = len(node_ns)
    for number, item in enumerate(collectives):
        if (
            not 0 <= item.ready <= item.issue <= item.wait <= count
            or item.need < item.issue
            or item.need > count
        ):
            raise ValueError(
                f"collective {number} ({item.name}): need 0 <= ready <= issue <= wait and issue <= need <= {count}, "
                f"got ready {item.ready}, issue {item.issue}, wait {item.wait}, need {item.need}"
            )
    if longest_region_ns is None:
        longest_region_ns = sum(node_ns) // REGIONS_AT_LEAST
    cuts = _cuts(node_ns, collectives, barriers, longest_region_ns)
    regions = [sum(node_ns[first:last]) for first, last in itertools.pairwise(cuts)]
    earliest = [item.issue if item.role is Role.FIXED else item.ready for item in collectives]
    last_issue = [item.issue if item.role is Role.FIXED else item.need for item in collectives]
    last_wait = [item.wait if item.role is Role.FIXED else item.need for item in collectives]
    walls = sorted(barriers)
    for number, item in enumerate(collectives):
        if item.role is Role.FIXED:
            continue
        before = bisect.bisect_left(walls, item.issue)
        if before:
            earliest[number] = max(earliest[number], walls[before - 1] + 1)
        if before < len(walls):
            last_issue[number] = min(last_issue[number], walls[before])
        after_wait = bisect.bisect_left(walls, item.wait)
        if after_wait < len(walls):
            last_wait[number] = min(last_wait[number], walls[after_wait])
    for number, item in enumerate(collectives):
        for other in item.depends_on:
            earliest[number] = max(earliest[number], earliest[other])
    for number in range(len(collectives) - 1, -1, -1):
        last_issue[number] = min(last_issue[number], last_wait[number])
        for other in collectives[number].depends_on:
            last_issue[other] = min(last_issue[other], last_issue[number])
            last_wait[other] = min(last_wait[other], last_issue[number])
    slot_of = {node: slot for slot, node in enumerate(cuts)}
    items = tuple(
        Collective(
            name=item.name,
            key=item.key,
            role=item.role,
            size_bytes=item.size_bytes,
            transfer_ns=item.transfer_ns,
            earliest_issue=slot_of[earliest[number]],
            latest_issue=slot_of[last_issue[number]],
            latest_wait=slot_of[last_wait[number]],
            depends_on=item.depends_on,
            copy_in_ns=item.copy_in_ns,
            copy_out_ns=item.copy_out_ns,
            staging_bytes=item.staging_bytes,
            block=item.block,
        )
        for number, item in enumerate(collectives)
    )
    problem = PlanningProblem(tuple(regions), items, alpha_ns, issue_ns, kernel_ns, memory_budget_bytes)
    return BuiltProblem(problem, tuple(cuts))


def _cuts(
    node_ns: Sequence[int],
    collectives: Sequence[Traced],
    barriers: Sequence[int],
    longest_region_ns: int,
) -> list[int]:
    count = len(node_ns)
    wanted = {0, count}
    for item in collectives:
        wanted.update((item.issue, item.wait) if item.role is Role.FIXED else (item.ready, item.need))
    for barrier in barriers:
        wanted.update((barrier, barrier + 1))
    length = 0
    for node, duration in enumerate(node_ns):
        if node in wanted:
            length = 0
        elif length and length + duration > longest_region_ns:
            wanted.add(node)
            length = 0
        length += duration
    return sorted(wanted)


def match_block(blocks: Sequence[str], modules: Sequence[tuple[str, str]]) -> str | None:
    """The innermost module that the user's ``blocks`` name.

    Args:
        blocks: ``PassConfig.blocks``: qualified names, globs over them, or class names (with or without the
            module they are defined in).
        modules: (qualified name, class name with module) of the modules around a parameter, outermost first.

    Returns:
        The qualified name of the module; ``None`` when none is named.
    """
    for name, class_name in reversed(modules):
        for block in blocks:
            if fnmatch.fnmatchcase(name, block) or block in (class_name, class_name.rsplit(".", 1)[-1]):
                return name
    return None
