"""Cut a sequence of nodes into regions and find the slots that each collective may use.

It owns what follows from order alone: who produces, who reads, who may not be crossed. It must not know what a node is:
FX nodes and scheduler nodes both come through here.

The caller hands over the nodes in order, each in one of five roles: an *input*; a *start* or *wait* of a collective;
a *floating* node, which goes wherever its collective goes; an *anchored* node, which stays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

Node = TypeVar("Node", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class Window:
    """The slots a collective may use, and the collectives whose results it needs."""

    earliest_issue: int
    latest_issue: int
    latest_wait: int
    depends_on: tuple[int, ...]


class Walk(Generic[Node]):
    """One pass over nodes in order: cuts regions and notes where each collective may start and must end.

    Collectives are numbered in the order of their starts.

    Args:
        fixed: of each collective, whether it must stay where it was traced.
    """

    def __init__(self, fixed: Sequence[bool]) -> None:
        self._fixed = fixed
        self._regions: list[list[Node]] = []
        self._open: list[Node] = []
        self._barriers: list[int] = []  # regions that are a barrier
        # Of each node so far: the first slot where it may exist, and the collectives whose results it carries to
        # whoever reads it.
        self._ready: dict[Node, int] = {}
        self._carried: dict[Node, frozenset[int]] = {}
        # Of each collective so far.
        self._earliest: list[int] = []
        self._depends: list[frozenset[int]] = []
        self._barriers_before: list[int] = []
        self._traced_wait: dict[int, int] = {}
        self._first_use: dict[int, int] = {}

    def floating(self, node: Node, inputs: Iterable[Node] = ()) -> None:
        """Take an input or a floating node."""
        self._ready[node], self._carried[node] = self._reach(inputs)

    def start(self, node: Node, inputs: Iterable[Node]) -> None:
        """Take the start of the next collective."""
        ready, carried = self._reach(inputs)
        after_barrier = self._barriers[-1] + 1 if self._barriers else 0
        number = len(self._earliest)
        self._earliest.append(self._close() if self._fixed[number] else max(ready, after_barrier))
        self._depends.append(carried)
        self._barriers_before.append(len(self._barriers))
        self._ready[node], self._carried[node] = self._earliest[number], frozenset()

    def wait(self, node: Node, number: int) -> None:
        """Take the wait of a collective; whoever reads it reads the collective's result."""
        ready = self._earliest[number]
        if self._fixed[number]:
            ready = self._traced_wait[number] = self._close()
        self._ready[node], self._carried[node] = ready, frozenset({number})

    def anchored(
        self,
        node: Node,
        inputs: Iterable[Node],
        *,
        cut_before: bool = False,
        cut_after: bool = False,
        barrier: bool = False,
    ) -> None:
        """Take a node that stays where it is.

        Args:
            node: the node.
            inputs: what it reads.
            cut_before: begin a region with it.
            cut_after: end its region with it; needed where a collective's input is produced.
            barrier: nothing that communicates may cross it.
        """
        _, carried = self._reach(inputs)
        first_used = [number for number in carried if number not in self._first_use]
        if cut_before or barrier or first_used:
            self._close()
        for number in first_used:
            self._first_use[number] = len(self._regions)
        if barrier:
            self._barriers.append(len(self._regions))
        self._open.append(node)
        self._ready[node], self._carried[node] = len(self._regions) + 1, frozenset()
        if cut_after or barrier:
            self._close()

    def regions(self) -> tuple[tuple[Node, ...], ...]:
        """The anchored nodes of each region, once all nodes were taken."""
        self._close()
        return tuple(map(tuple, self._regions))

    def windows(self) -> list[Window]:
        """The window of every collective, once all nodes were taken."""
        last = self._close()
        latest = [last] * len(self._earliest)
        windows: list[Window] = []
        for number in reversed(range(len(latest))):
            if self._fixed[number]:
                issue, wait = self._earliest[number], self._traced_wait[number]
            else:
                next_barrier = self._barriers[self._barriers_before[number] :][:1]
                issue = wait = min([latest[number], self._first_use.get(number, last), *next_barrier])
            for other in self._depends[number]:
                latest[other] = min(latest[other], issue)
            depends_on = tuple(sorted(self._depends[number]))
            windows.append(Window(self._earliest[number], issue, wait, depends_on))
        return windows[::-1]

    def _reach(self, inputs: Iterable[Node]) -> tuple[int, frozenset[int]]:
        inputs = list(inputs)
        ready = max((self._ready[source] for source in inputs), default=0)
        return ready, frozenset[int]().union(*(self._carried[source] for source in inputs))

    def _close(self) -> int:
        """End the open region; the number of the slot after it."""
        if self._open:
            self._regions.append(self._open)
            self._open = []
        return len(self._regions)
